//! The container side of an agent, opened for one instance.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    time::Duration,
};

use jiff::Timestamp;
use pilotlight_runtime::{Report, clock::Clock};
use pilotlight_wire::{AssignmentId, InstanceId, Verdict, agent::Bootstrap};
use tracing::warn;

use crate::{
    container::{self, Engine, EngineError, Networks, Share, TeardownError},
    dispatch::Job,
    host::{self, Roots},
    job::{
        AssignmentDir, Channels, End,
        direct::{self, JobContext},
    },
};

/// How often Docker is asked before the machine counts as unhealthy, and before an agent with jobs gives them up:
/// dockerd may be being restarted, or come up later than we do.
const DOCKER_TRIES: u32 = 5;
const DOCKER_TRIES_WITH_JOBS: u32 = 300;
const DOCKER_PAUSE: Duration = Duration::from_secs(2);

/// What every job of this machine needs.
#[derive(Clone, Debug)]
pub(crate) struct Workshop {
    instance: InstanceId,
    /// Absent when Docker does not answer.
    context: Option<JobContext>,
    dir: PathBuf,
}

impl Workshop {
    /// Connects to Docker, and removes what belongs to none of the kept assignments.
    pub(crate) async fn open(dir: &Path, bootstrap: &Bootstrap, kept: &BTreeSet<AssignmentId>) -> Self {
        let tries = if kept.is_empty() { DOCKER_TRIES } else { DOCKER_TRIES_WITH_JOBS };
        let instance = bootstrap.instance;
        let capacity = host::inventory(dir, &Roots::default(), bootstrap.gpus.as_deref(), None);
        let context = match (connect(tries).await, capacity) {
            (Err(error), _) => {
                warn!(error = %Report(&error), "Docker does not answer");
                None
            }
            // The agent ends with the same error when it takes the inventory for the scaler.
            (_, Err(error)) => {
                warn!(error = %Report(&error), "the machine cannot be looked at");
                None
            }
            (Ok(engine), Ok((inventory, _))) => {
                if let Err(error) = container::reap(&engine, instance, kept).await {
                    warn!(error = %Report(&error), "what an earlier life left is not all removed");
                }
                let program = std::env::current_exe().unwrap_or_else(|_unreadable| "pilotlight-agent".into());
                let networks = Networks::new(engine.clone(), instance);
                let gpus = u32::try_from(inventory.gpus.len()).unwrap_or(u32::MAX);
                let share = Share { memory_bytes: inventory.memory_bytes, gpus, cpu_jobs: 0 };
                let (host_image, clock) = (bootstrap.host_image, Clock::system(Timestamp::MIN));
                let agent_dir = dir.to_owned();
                Some(JobContext { engine, networks, instance, agent_dir, program, share, host_image, clock })
            }
        };
        Self { instance, context, dir: dir.to_owned() }
    }

    /// Docker's version, if it answers.
    pub(crate) fn docker(&self) -> Option<String> {
        self.context.as_ref().map(|context| context.engine.facts().version.clone())
    }

    /// Keeps a network ready for the next job, for as long as it is polled.
    pub(crate) async fn keep_ready(&self) {
        if let Some(context) = &self.context {
            context.networks.keep().await;
        }
    }

    /// Runs one job.
    pub(crate) async fn run(self, job: Job, channels: Channels) -> End {
        let Some(context) = self.context else {
            let reason = "Docker does not answer on this machine".to_owned();
            // A job that has been started must not be run a second time elsewhere.
            return if AssignmentDir::new(&self.dir, job.start.assignment).started().exists() {
                End::lost(reason, Clock::system(Timestamp::MIN).now())
            } else {
                End::Refused { reason }
            };
        };
        let share = Share { cpu_jobs: job.cpu_jobs, ..context.share };
        direct::run(JobContext { share, ..context }, job.start, channels).await
    }

    /// Removes everything of the instance that is left; its jobs are over.
    pub(crate) async fn close(self) -> Result<(), TeardownError> {
        match self.context {
            Some(context) => {
                // A job's task or the making of the next network may have been left in the middle of a call.
                context.engine.settle().await;
                container::reap(&context.engine, self.instance, &BTreeSet::new()).await.map(drop)
            }
            None => Ok(()),
        }
    }
}

impl End {
    /// The end of a job of which nobody knows how it ended.
    pub(crate) fn lost(reason: String, at: Timestamp) -> Self {
        Self::Finished {
            verdict: Verdict::Infrastructure,
            exit_code: None,
            reason: Some(reason),
            log_gap: false,
            usage: None,
            finished_at: at,
        }
    }
}

pub(crate) async fn connect(tries: u32) -> Result<Engine, EngineError> {
    let socket = Engine::default_socket();
    let mut left = tries;
    loop {
        match Engine::connect(&socket).await {
            Err(error) if left > 1 => {
                left -= 1;
                warn!(error = %Report(&error), "Docker does not answer, trying again");
                tokio::time::sleep(DOCKER_PAUSE).await;
            }
            result => return result,
        }
    }
}
