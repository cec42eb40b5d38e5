//! Whole-system tests: golden planner scripts and scenarios with the real programs.

pub mod plans;
pub mod site;
