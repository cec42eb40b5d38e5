//! The scaler: listens for jobs, keeps machines for them, and proves that they are gone afterwards.

pub mod cli;
pub mod config;
pub mod control;
pub mod effects;
pub mod fleet;
pub mod forge;
pub mod http;
pub mod keys;
pub mod logs;
pub mod metrics;
pub mod provider;
pub mod reload;
mod run;
pub mod store;

pub use run::{RunError, run};
