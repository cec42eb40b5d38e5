//! The scaler: listens for jobs, keeps machines for them, and proves that they are gone afterwards.

pub mod cli;
pub mod config;
pub mod fleet;
pub mod keys;
pub mod logs;
pub mod provider;
