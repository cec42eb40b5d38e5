//! A forge's runner, as it is handed to an agent: one registration for one job.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Secret;

/// A one-job registration at a forge, minted for one assignment (design 6). It is all that a machine ever holds of the
/// forge: the registration token stays with the scaler.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct RunnerGrant {
    /// Which forge it is for.
    pub forge: ForgeKind,
    /// The forge's base URL, without a trailing slash.
    pub url: String,
    /// The registration's number at the forge.
    pub id: i64,
    /// What the runner says who it is.
    pub uuid: String,
    /// What it proves that with.
    pub token: Secret,
    /// The registration's name at the forge; it carries the assignment's id, so that a lost one is found again.
    pub name: String,
    /// The labels that it serves: those of its assignment and no others.
    pub labels: Vec<String>,
    /// The image that the runner and the steps of its job run in.
    pub image: String,
    /// What an hour of its machine's share costs, in the currency of the config.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price_per_hour: Option<f64>,
    /// What the job's log begins with: lines for its author on the machine and the times so far.
    #[serde(default)]
    pub preface: Vec<String>,
}

impl fmt::Debug for RunnerGrant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunnerGrant").field("url", &self.url).field("name", &self.name).finish_non_exhaustive()
    }
}

/// The forges whose official runners an agent can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ForgeKind {
    /// Gitea Actions.
    Gitea,
}

/// The job that a runner has taken, as the forge handed it over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Task {
    /// The forge's number of this attempt at the job; with the runner's credentials, enough to end it.
    pub id: i64,
    /// `owner/name`.
    pub repository: String,
    /// The number of the workflow's run.
    pub run: i64,
    /// The job's name in its workflow.
    pub job: String,
    /// How many steps it has; they are ended with it.
    pub steps: u32,
}
