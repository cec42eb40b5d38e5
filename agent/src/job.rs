//! Jobs: what the dispatcher and a job's task say to each other.
//!
//! One task per assignment runs [`direct::run`]. It is idempotent by assignment: called again after a restart of the
//! agent it finds the container by its derived name and carries on from wherever that is (link 4).

pub mod direct;
mod output;

use std::path::{Path, PathBuf};

use jiff::Timestamp;
use pilotlight_wire::{AssignmentId, Usage, Verdict};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, watch};

/// What a job's task is asked to do. Only ever goes forward: `Run` to one of the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// Run to the end.
    Run,
    /// The author or an admin cancelled it.
    Cancel,
    /// Its deadline passed.
    Timeout,
    /// The machine is going away: end it at once, without the grace.
    Terminate,
}

/// What a job's task tells while it runs.
#[derive(Clone, Debug, PartialEq)]
pub enum Progress {
    /// A line for the job's author, such as the progress of a pull.
    Detail(String),
    /// The container was started (or found running again).
    Started {
        /// When the image was ready.
        image_ready_at: Timestamp,
        /// When Docker started the container.
        started_at: Timestamp,
        /// Image id or digest.
        image_id: Option<String>,
    },
}

/// How a job's task ends. The container and its cgroup are gone by then, and the spool is complete.
///
/// It is written durably (`outcome.json`) before the container is removed: what has ended stays ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "end", rename_all = "snake_case")]
pub enum End {
    /// It never started, for a reason of the machine's: another machine may take it.
    Refused {
        /// Why.
        reason: String,
    },
    /// It is over.
    Finished {
        /// Whose fault, if any.
        verdict: Verdict,
        /// The container's own exit code.
        exit_code: Option<i32>,
        /// One sentence when the verdict is not plain.
        reason: Option<String>,
        /// Whether bytes of the output are missing from the spool.
        log_gap: bool,
        /// What it used.
        usage: Option<Usage>,
        /// When the container ended.
        finished_at: Timestamp,
    },
}

/// The channels between the dispatcher and one job's task.
#[derive(Debug)]
pub struct Channels {
    /// What the dispatcher wishes.
    pub wish: watch::Receiver<Wish>,
    /// What the task tells.
    pub progress: mpsc::Sender<Progress>,
}

/// Where one assignment lives on disk.
///
/// ```text
/// DIR/assignments/<id>/assignment.json   the Start and its deadline; fsynced before anything is done
///                      spool             the job's bytes, appended by the attach process
///                      attach.lock       held by the attach process, with its pid inside
///                      started           there was a container of ours; without one the job must not run again
///                      outcome.json      how the job ended; written before its container is removed
///                      events/<n>.json   the outbox: events not yet acknowledged
/// ```
#[derive(Clone, Debug)]
pub struct AssignmentDir(PathBuf);

impl AssignmentDir {
    /// The directory of an assignment beneath the agent's directory.
    #[must_use]
    pub fn new(agent_dir: &Path, id: AssignmentId) -> Self {
        Self(agent_dir.join("assignments").join(id.to_string()))
    }

    /// The directory itself.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The assignment's file; without it the assignment does not exist.
    #[must_use]
    pub fn file(&self) -> PathBuf {
        self.0.join("assignment.json")
    }

    /// The job's bytes.
    #[must_use]
    pub fn spool(&self) -> PathBuf {
        self.0.join("spool")
    }

    /// Held by the attach process while it lives.
    #[must_use]
    pub fn attach_lock(&self) -> PathBuf {
        self.0.join("attach.lock")
    }

    /// There was a container of ours.
    #[must_use]
    pub fn started(&self) -> PathBuf {
        self.0.join("started")
    }

    /// How the job ended.
    #[must_use]
    pub fn outcome(&self) -> PathBuf {
        self.0.join("outcome.json")
    }

    /// The outbox.
    #[must_use]
    pub fn events(&self) -> PathBuf {
        self.0.join("events")
    }
}
