//! Gitea Actions: demand by polling a scope's job list, runners registered for one job each, and dead machines' tasks
//! ended by protocol (spec gitea).

mod api;
mod end;
mod grant;
mod read;

use std::sync::Arc;

use jiff::Timestamp;
use pilotlight_wire::{JobId, RunnerGrant};
use tokio::sync::Notify;

pub use self::{
    api::{Api, Job, Repository, Runner},
    grant::Order,
    read::{Judged, judge},
};
use super::ForgeError;
use crate::config::GiteaForge;

/// A Gitea server. Clones share it.
#[derive(Clone, Debug)]
pub struct Gitea {
    config: Arc<GiteaForge>,
    api: Api,
    /// How our registrations' names begin: no other controller's are touched.
    prefix: Arc<str>,
    wake: Arc<Notify>,
}

impl Gitea {
    /// A client of a configured server.
    ///
    /// # Errors
    /// When TLS cannot be set up.
    pub fn new(config: GiteaForge, controller: &str) -> Result<Self, reqwest::Error> {
        let api = Api::new(&config.url, &config.token_file)?;
        let prefix = format!("pilotlight-{controller}-").into();
        Ok(Self { config: Arc::new(config), api, prefix, wake: Arc::default() })
    }

    /// What was configured.
    #[must_use]
    pub fn config(&self) -> &GiteaForge {
        &self.config
    }

    /// Its calls.
    #[must_use]
    pub fn api(&self) -> &Api {
        &self.api
    }

    /// Something happened there: it is read at once.
    pub fn wake(&self) {
        self.wake.notify_one();
    }

    /// The name of a runner's registration. It holds the row's id, so that a registration whose reply was lost is found
    /// again, and one that nobody knows is swept.
    #[must_use]
    pub fn runner_name(&self, job: JobId) -> String {
        format!("{}{job}", self.prefix)
    }

    /// Whose registration a name is; `None` for one that is not ours.
    #[must_use]
    pub fn runner_of(&self, name: &str) -> Option<JobId> {
        name.strip_prefix(&*self.prefix)?.parse().ok()
    }
}

/// What a runner leaves behind, and how it is to be ended.
#[derive(Clone, Debug)]
pub struct Leftover {
    /// Its row.
    pub job: JobId,
    /// What it took, or was granted for.
    pub of: crate::fleet::forge::ForgeJob,
    /// The repository that it is registered for; `None`: all of the scope.
    pub repository: Option<String>,
    /// The task that it took, if any.
    pub task: Option<pilotlight_wire::Task>,
    /// Its credentials, unless they were lost.
    pub grant: Option<RunnerGrant>,
    /// Whether its job was cancelled.
    pub cancelled: bool,
    /// What the job's log says of its end.
    pub reason: String,
    /// When its job began, as far as is known.
    pub began_at: Timestamp,
    /// When that was known to be over.
    pub ended_at: Timestamp,
    /// Whether its job is to run again elsewhere.
    pub rerun: bool,
}
