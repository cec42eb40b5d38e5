//! The agent on a Pilotlight machine: it enrols with the scaler, runs jobs in containers, and leaves when told to or
//! when its lease lapses. Design 5 and 6; the exact rules are in `docs/architecture.md`.

pub mod assignment;
pub mod attach;
pub mod bootstrap;
pub mod cli;
pub mod container;
mod disk;
pub mod dispatch;
pub mod host;
pub mod job;
pub mod link;
pub mod machine;
mod outbox;
pub mod power;
pub mod run;
mod upload;
mod workshop;
