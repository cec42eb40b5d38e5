//! What a job is, and how it ended.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};

use crate::RunnerGrant;

/// What an assignment runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Work {
    /// A job in hand.
    Job(DirectJob),
    /// A runner that takes one job from its forge.
    Runner(Box<RunnerGrant>),
}

/// A container job of the built-in queue.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DirectJob {
    /// Image reference, or `pilotlight/host` for the built-in image made of the host's own `/usr`.
    pub image: String,
    /// Replaces the image's entrypoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entrypoint: Option<Vec<String>>,
    /// Replaces the image's command; empty keeps it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// Environment, byte for byte: newlines, quotes and all.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// `user`, `uid`, `user:group` or `uid:gid`; the image's own when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Working directory; the image's own when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
}

// The values of a job's environment are its author's secrets as often as not.
impl fmt::Debug for DirectJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirectJob")
            .field("image", &self.image)
            .field("env", &self.env.keys().collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}

/// A directory of the machine that the pool's admin offers to jobs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Volume {
    /// The name in the config.
    pub name: String,
    /// Absolute path on the machine.
    pub host: String,
    /// Absolute path in the container.
    pub mount: String,
    /// Whether the job may only read.
    pub read_only: bool,
}

/// How a job ended. `failure` and `infrastructure` are never mixed up: the first is the job's fault, the second ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Exit code 0.
    Success,
    /// Another exit code, out of memory, or (without an exit code) an image that cannot be used.
    Failure,
    /// Cancelled by its author or an admin.
    Cancelled,
    /// Its deadline passed.
    Timeout,
    /// The machine, Docker, the network or Pilotlight itself failed.
    Infrastructure,
}

impl Verdict {
    /// The word used in JSON, tables and metric labels.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Success => "success",
            Self::Failure => "failure",
            Self::Cancelled => "cancelled",
            Self::Timeout => "timeout",
            Self::Infrastructure => "infrastructure",
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// What a job used, measured by the agent from container start to exit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    /// Container start to exit, seconds.
    pub wall_seconds: f64,
    /// Processor time, seconds; absent where the cgroup could not be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_seconds: Option<f64>,
    /// Peak memory of the job's cgroup, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_peak_bytes: Option<u64>,
    /// Whether the kernel killed the job for memory.
    #[serde(default)]
    pub out_of_memory: bool,
}
