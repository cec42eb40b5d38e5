//! What both Pilotlight programs need: time, logging, signals, limits, durable files, durations, sizes, error printing.

pub mod clock;
pub mod durable;
pub mod failpoint;
pub mod limits;
pub mod logging;
mod report;
pub mod signals;
pub mod units;

pub use report::Report;
