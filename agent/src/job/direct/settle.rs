//! A container that has ended: what that means, and leaving nothing behind.

use std::{fs, time::Duration};

use jiff::Timestamp;
use pilotlight_runtime::{Report, failpoint, units::Size};
use pilotlight_wire::{Usage, Verdict};
use tokio::time::{sleep, timeout};

use super::{Task, watching::Watched};
use crate::{
    container::{EngineError, Exit},
    host,
    job::{End, Wish},
};

/// Cleaning up has a deadline of its own; what is left then is the reaper's.
const CLEAN_UP: Duration = Duration::from_secs(60);

/// How often and how long apart a container is removed that Docker cannot remove: whoever waits for the job's end waits
/// for this, too.
const REMOVE_TRIES: u32 = 4;
const REMOVE_PAUSE: Duration = Duration::from_secs(1);

/// A disk with less is full for a job, bytes.
const FULL: u64 = 16 * 1024 * 1024;

impl Task {
    /// What the end of the container means for the job.
    pub(super) async fn settle(&mut self, watched: Watched) -> End {
        // Whatever the first process left behind ends with it.
        self.cgroup.kill().await;
        let mut usage = Usage::default();
        self.cgroup.measure(&mut usage);
        match watched {
            Watched::Exited { exit, code, gap, wish } => {
                usage.wall_seconds = seconds(exit.started_at, exit.finished_at);
                usage.out_of_memory = exit.out_of_memory;
                let (verdict, reason) = self.verdict(&exit, &code, wish);
                End::Finished {
                    verdict,
                    exit_code: code.ok().flatten(),
                    reason,
                    log_gap: gap,
                    usage: Some(usage),
                    finished_at: exit.finished_at,
                }
            }
            Watched::Lost { reason, gap, wish } => {
                // Without an exit code nothing is a success, and nothing the job's fault (link 4).
                let (verdict, reason) = match wish {
                    Wish::Cancel => (Verdict::Cancelled, format!("cancelled; {reason}")),
                    Wish::Timeout => (Verdict::Timeout, format!("its deadline passed; {reason}")),
                    Wish::Run | Wish::Terminate => (Verdict::Infrastructure, reason),
                };
                End::Finished {
                    verdict,
                    exit_code: None,
                    reason: Some(reason),
                    log_gap: gap,
                    usage: None,
                    finished_at: self.context.clock.now(),
                }
            }
        }
    }

    fn verdict(&self, exit: &Exit, code: &Result<Option<i32>, String>, wish: Wish) -> (Verdict, Option<String>) {
        match wish {
            Wish::Cancel => (Verdict::Cancelled, Some("cancelled while it ran".to_owned())),
            Wish::Timeout => (Verdict::Timeout, Some("its deadline passed".to_owned())),
            Wish::Terminate => (Verdict::Infrastructure, Some("its machine was terminated while it ran".to_owned())),
            Wish::Run if exit.out_of_memory => {
                let limit = Size(self.context.share.memory(self.start.gpus.len()));
                (Verdict::Failure, Some(format!("out of memory: the job's limit is {limit}")))
            }
            Wish::Run => match code {
                Ok(Some(0)) => (Verdict::Success, None),
                Ok(Some(_)) => (Verdict::Failure, self.full_disk()),
                Ok(None) => (Verdict::Infrastructure, Some("Docker does not know its exit code".to_owned())),
                // Not the job's fault, and no success either: it did not end by itself.
                Err(reason) => (Verdict::Infrastructure, Some(reason.clone())),
            },
        }
    }

    /// What a job that failed had better know: its files and its output are still there at this point.
    fn full_disk(&self) -> Option<String> {
        let places = [&self.context.engine.facts().root, &self.context.agent_dir];
        let full = places.into_iter().find(|place| host::disk_free(place).is_ok_and(|free| free < FULL))?;
        Some(format!("the machine's disk was full when it ended: {}", full.display()))
    }

    /// Removes the container, and retires its network.
    pub(super) async fn remove_container(&self) -> Result<(), EngineError> {
        let mut networks = self.context.engine.networks_of(&self.name).await;
        if networks.is_empty() {
            // Whoever removed the container left its network.
            networks.extend(fs::read_to_string(self.dir.started()).ok().filter(|name| !name.is_empty()));
        }
        let removed = self.context.engine.remove(&self.name).await;
        networks.into_iter().for_each(|network| self.context.networks.retire(network));
        removed
    }

    /// Removes the container, its network and its cgroup.
    pub(super) async fn clean_up(&self) {
        let work = async {
            self.attacher.end().await;
            for last in (0..REMOVE_TRIES).rev() {
                match self.remove_container().await {
                    Ok(()) => break,
                    Err(error) if last == 0 => tracing::warn!(error = %Report(&error), "left to the reaper"),
                    Err(error) => {
                        tracing::warn!(error = %Report(&error), "trying again");
                        sleep(REMOVE_PAUSE).await;
                    }
                }
            }
            failpoint!("agent.container.removed");
            self.cgroup.kill().await;
            self.cgroup.remove();
            failpoint!("agent.cgroup.removed");
        };
        if timeout(CLEAN_UP, work).await.is_err() {
            tracing::warn!(container = self.name, "not cleaned up in time; left to the reaper");
        }
    }
}

fn seconds(from: Timestamp, to: Timestamp) -> f64 {
    to.duration_since(from).as_secs_f64().max(0.0)
}
