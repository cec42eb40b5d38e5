//! Jobs. The built-in queue hands over real ones, so the set of their ids is the truth; of a forge, each runner that
//! was granted is one (see [`super::forge`]).

use jiff::{SignedDuration, Timestamp};
use pilotlight_wire::{AssignmentId, ForgeName, InstanceId, JobId, LabelName, PoolName, Usage, Verdict, api::Phases};
use serde::{Deserialize, Serialize};

use super::forge::{Registration, Runner};

/// Why and how often a job may be queued again by itself (link 3).
pub const MAX_REFUSALS: u32 = 3;

/// One job of the built-in queue, or one runner of a forge. Its payload (image, command, environment; the runner's
/// credentials) lies sealed in the store.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// Its id, made by the client.
    pub id: JobId,
    /// Where it comes from.
    pub forge: ForgeName,
    /// What it asked for.
    pub label: LabelName,
    /// The label's pool when it was submitted.
    pub pool: PoolName,
    /// GPUs it asked for.
    pub gpus: u32,
    /// Higher goes first.
    pub priority: i32,
    /// From assignment to deadline.
    pub timeout: SignedDuration,
    /// What its author calls it.
    pub name: String,
    /// SHA-256 of the submitted body: a known id with the same body is the same job. Empty when a database was lost.
    pub body_hash: String,
    /// When it was accepted.
    pub queued_at: Timestamp,
    /// Where it is.
    pub state: JobState,
    /// The last machine that refused it before it started.
    pub refusal: Option<Refused>,
    /// When each phase was reached.
    pub phases: Phases,
    /// The machine it is or was on.
    pub instance: Option<InstanceId>,
    /// For a forge's runner: what it took, and how its registration stands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runner: Option<Box<Runner>>,
}

/// A machine refused a job before it started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// How many have, in a row.
    pub count: u32,
    /// Why the last one did.
    pub reason: String,
    /// When the job is tried again: what ails a machine may pass.
    pub until: Timestamp,
}

/// Where a job is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// Waiting for a machine.
    Queued,
    /// On a machine.
    Placed {
        /// The machine.
        instance: InstanceId,
        /// The claim.
        assignment: AssignmentId,
    },
    /// Over.
    Finished(Box<Ended>),
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ended {
    /// Whose fault, if any.
    pub verdict: Verdict,
    /// The container's own exit code.
    pub exit_code: Option<i32>,
    /// One sentence when the verdict is not plain.
    pub reason: Option<String>,
    /// When the result was known.
    pub at: Timestamp,
    /// The log.
    pub log: Log,
    /// Whether bytes of the output are missing.
    pub log_gap: bool,
    /// What it used.
    pub usage: Option<Usage>,
    /// What it cost by the placement's price.
    pub cost: Option<f64>,
}

/// How the log of a finished job stands (link 6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Log {
    /// The agent says how many bytes there are; they may still be on their way.
    Expected {
        /// How many.
        bytes: u64,
    },
    /// Nobody will say: the job never ran, or its machine is gone.
    Over {
        /// Whether some of it may be missing.
        incomplete: bool,
    },
    /// It is being closed.
    Closing {
        /// Whether some of it may be missing.
        incomplete: bool,
    },
    /// All there is, is there.
    Closed,
}

impl Job {
    /// Whether a submission with this hash is the same job; of an adopted one only its id is known.
    #[must_use]
    pub fn has_body(&self, hash: &str) -> bool {
        self.is_adopted() || self.body_hash == hash
    }

    /// Whether it was taken over from its agent after a lost database: what it runs is known to that agent alone.
    #[must_use]
    pub fn is_adopted(&self) -> bool {
        self.body_hash.is_empty()
    }

    /// Whether it waits for a machine.
    #[must_use]
    pub fn is_queued(&self) -> bool {
        matches!(self.state, JobState::Queued)
    }

    /// How it ended, if it has.
    #[must_use]
    pub fn ended(&self) -> Option<&Ended> {
        match &self.state {
            JobState::Finished(ended) => Some(ended),
            JobState::Queued | JobState::Placed { .. } => None,
        }
    }

    /// Whether nothing more can change: it is over, its log is closed, and its registration is gone.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.ended().is_some_and(|ended| ended.log == Log::Closed) && !self.needs_payload()
    }

    /// Whether what it runs must be kept: it may have to run, or its registration to be ended.
    #[must_use]
    pub fn needs_payload(&self) -> bool {
        match &self.runner {
            Some(runner) => runner.registration != Registration::Over,
            None => self.ended().is_none(),
        }
    }

    /// Whether its agent may be told to start it: a runner first needs its registration.
    #[must_use]
    pub fn can_start(&self) -> bool {
        self.runner.as_ref().is_none_or(|runner| matches!(runner.registration, Registration::Held { .. }))
    }
}
