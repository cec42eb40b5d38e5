//! The contract between Pilotlight's scaler, its agents and its clients: types and ids, nothing that acts.
//!
//! [`agent`] is what an agent and the scaler say to each other, [`api`] what clients and the scaler say. The JSON of
//! both is fixed by golden tests (`wire/tests/golden.rs`): agents of an older version talk to a newer scaler.

pub mod agent;
pub mod api;
mod ids;
mod job;
mod runner;
mod secret;

pub use ids::{
    AssignmentId, BadName, ForgeName, GpuId, Id, InstanceId, JobId, LabelName, Name, PlacementName, PoolName,
};
pub use job::{DirectJob, Usage, Verdict, Volume, Work};
pub use runner::{ForgeKind, RunnerGrant, Task};
pub use secret::Secret;

use serde::{Deserialize, Serialize};

/// The body of every answer that is not a success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// A stable word for programs, such as `instance_gone`.
    pub code: String,
    /// A sentence for people: what is wrong, with which value, and what to do.
    pub message: String,
    /// The event number that the scaler expects next (409 on events).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected: Option<u64>,
    /// The size of the log on the scaler in bytes (409 on log uploads).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
}

impl ErrorBody {
    /// The one code that ends jobs from above (link 2).
    pub const INSTANCE_GONE: &'static str = "instance_gone";

    /// An error without the numbers of a conflict.
    #[must_use]
    pub fn new(code: &str, message: impl Into<String>) -> Self {
        Self { code: code.to_owned(), message: message.into(), expected: None, size: None }
    }
}
