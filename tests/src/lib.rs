//! Whole-system tests: golden planner scripts and scenarios with the real programs.

pub mod clock;
pub mod disk;
pub mod dockerd;
pub mod gitea;
pub mod net;
pub mod plans;
pub mod site;
pub mod store;
