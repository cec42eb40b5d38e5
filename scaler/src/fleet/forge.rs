//! What forges ask for, and the runners that are registered with them. Pure, like all of the fleet.
//!
//! A forge's demand is a *count* per label, with job references as explanation (design 4): a runner that is granted for
//! one job may take another that asks for the same, and no harm is done. So a queued job of a forge is never given to a
//! machine. Instead a machine gets a runner, and the runner's job row says what it was granted for until it has taken a
//! job, and from then on which one it took.

use jiff::Timestamp;
use pilotlight_wire::{ForgeName, JobId, LabelName, Task};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{demand::Refused, instance::Call};

/// Under which queued jobs of forges are given ids of ours, for lists and for `plan`.
const NAMESPACE: Uuid = Uuid::from_u128(0x7c5d_1f0a_93b4_4e0e_8f6e_5b1a_2d3c_4f60);

/// How the fleet serves one forge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forge {
    /// Its name in the config.
    pub name: ForgeName,
    /// Whether a runner serves the repository of the job that it is granted for and no other: with a policy of allowed
    /// repositories, one that is registered for all would take the jobs of those that are not.
    pub per_repository: bool,
    /// Whether a job whose machine was lost is run again, once.
    pub rerun: bool,
}

/// One attempt at a job, as its forge has it. A re-run is another one, with another id.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForgeJob {
    /// The forge's number.
    pub id: i64,
    /// The number of its workflow's run.
    pub run: i64,
    /// Which attempt it is, from 1.
    pub attempt: u32,
    /// `owner/name`.
    pub repository: String,
    /// Its name in the workflow.
    pub name: String,
    /// Where a person reads about it.
    pub url: String,
}

/// A queued job that one of our labels serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The job.
    pub job: ForgeJob,
    /// The label.
    pub label: LabelName,
    /// Since when it is queued, by the forge's clock.
    pub queued_at: Timestamp,
}

/// A queued job that nobody here serves, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unserved {
    /// The job.
    pub job: ForgeJob,
    /// What it asks for.
    pub labels: Vec<String>,
    /// Why it is left alone, a sentence.
    pub why: String,
}

/// A job that a runner of ours has taken, by the forge's word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taken {
    /// The runner's job row.
    pub runner: JobId,
    /// What it took.
    pub job: ForgeJob,
}

/// What one reading of a forge showed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reading {
    /// Which forge.
    pub forge: ForgeName,
    /// When the first call began: it says nothing about what came later.
    pub began_at: Timestamp,
    /// What waits for a machine.
    pub wanted: Vec<Wanted>,
    /// What waits in vain.
    pub unserved: Vec<Unserved>,
    /// What runs on our runners.
    pub taken: Vec<Taken>,
}

/// What is known of a forge. Not persisted: after a restart nothing is known until it is read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// When the last good reading began.
    pub read_at: Option<Timestamp>,
    /// Since when readings fail, and what the forge says.
    pub failing: Option<(Timestamp, String)>,
    /// Since when no runner can be registered, and what the forge says.
    pub grants_failing: Option<(Timestamp, String)>,
    /// What waits for a machine.
    pub wanted: Vec<Wanted>,
    /// What waits in vain.
    pub unserved: Vec<Unserved>,
    /// Jobs that runners took since the last reading began: it may still show them as queued.
    pub picks: Vec<(Key, Timestamp)>,
    /// Labels that a machine refused a moment ago.
    pub refusals: Vec<(LabelName, Refused)>,
}

/// Runners of one key are interchangeable.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// The label.
    pub label: LabelName,
    /// The one repository that it serves; `None` for all of the forge's scope.
    pub repository: Option<String>,
}

/// A runner at a forge: part of the row of a [`Job`](super::Job), which is not settled before the registration is
/// known to be gone. So none is ever forgotten.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Runner {
    /// The job that it took; until then the one that it was granted for.
    pub job: ForgeJob,
    /// The one repository that it serves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repository: Option<String>,
    /// What it took, by its agent's word.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<Task>,
    /// When it took a job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub picked_at: Option<Timestamp>,
    /// How its registration stands.
    pub registration: Registration,
}

/// How a runner's registration stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Registration {
    /// To be made.
    Minting(Call),
    /// Made.
    Held {
        /// The forge's number.
        id: i64,
    },
    /// To be ended: a task that nobody runs any more is ended by protocol, a registration that was not used deleted.
    Ending(Call),
    /// Known to be gone.
    Over,
}

impl Wanted {
    /// The id under which we list it.
    #[must_use]
    pub fn id(&self, forge: &ForgeName) -> JobId {
        JobId::from_uuid(Uuid::new_v5(&NAMESPACE, format!("{forge}/{}", self.job.id).as_bytes()))
    }

    /// Which runners serve it.
    #[must_use]
    pub fn key(&self, forge: &Forge) -> Key {
        let repository = forge.per_repository.then(|| self.job.repository.clone());
        Key { label: self.label.clone(), repository }
    }
}

impl Runner {
    /// One that is to be registered for a job.
    #[must_use]
    pub fn minting(wanted: &Wanted, forge: &Forge) -> Self {
        Self {
            job: wanted.job.clone(),
            repository: wanted.key(forge).repository,
            task: None,
            picked_at: None,
            registration: Registration::Minting(Call::Sent { failures: 0 }),
        }
    }

    /// Whether it has taken a job.
    #[must_use]
    pub fn has_picked(&self) -> bool {
        self.picked_at.is_some()
    }
}
