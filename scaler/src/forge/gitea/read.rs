//! What waits at a Gitea server: the job list, read every few seconds, and at once when a webhook says so.

use std::time::Duration;

use jiff::Timestamp;
use pilotlight_runtime::clock::Clock;
use pilotlight_wire::LabelName;
use tokio_util::sync::CancellationToken;

use super::{ForgeError, Gitea, api::Job};
use crate::{
    config::{GiteaForge, allows},
    control::{Handle, Stopped},
    fleet::{
        Event,
        forge::{ForgeJob, Reading, Taken, Unserved, Wanted},
    },
};

/// How much slower a server is asked where nothing happens; with webhooks, which say when something does, much slower.
const QUIET: u32 = 4;
const QUIET_WITH_WEBHOOKS: u32 = 20;

/// A server that does not answer is asked ever more slowly, up to this.
const FAILING: Duration = Duration::from_secs(60);

/// How often registrations that nobody knows are looked for.
const SWEEP_EVERY: Duration = Duration::from_secs(5 * 60);

/// What is to be done with a queued job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Judged {
    /// One of our labels serves it.
    Wanted(Wanted),
    /// It asks for us, and cannot be served.
    Unserved(Unserved),
    /// It is somebody else's.
    Foreign,
}

/// Judges a queued job: the server gives a job to a runner that has *all* of its labels, and ours have one each, so that
/// none takes a job that asks for less (spec gitea 5.2, 8).
#[must_use]
pub fn judge(job: &Job, config: &GiteaForge, labels: &[LabelName], now: Timestamp) -> Judged {
    let served = |text: &String| {
        let allowed = |label: &&LabelName| config.labels.as_ref().is_none_or(|some| some.contains(label));
        labels.iter().filter(allowed).find(|label| label.as_str() == text).cloned()
    };
    // A caller of a reusable workflow has none, and no runner ever takes it.
    let Some((label, repository)) = job.labels.iter().find_map(served).zip(job.repository()) else {
        return Judged::Foreign;
    };
    let of = ForgeJob {
        id: job.id,
        run: job.run_id,
        attempt: job.run_attempt.max(1),
        repository: repository.to_string(),
        name: job.name.clone(),
        url: job.html_url.clone(),
    };
    let refused = |why: String| Judged::Unserved(Unserved { job: of.clone(), labels: job.labels.clone(), why });
    if let Some(allowed) = &config.repositories
        && !allows(allowed, &of.repository)
    {
        return refused(format!(
            "repository {} is not among the repositories that [forge.{}] allows",
            of.repository, config.name
        ));
    }
    if let Some(other) = job.labels.iter().find(|other| *other != label.as_str()) {
        return refused(format!(
            "it asks for {other:?} besides {:?}, and a runner of ours has one label: write `runs-on: {label}`",
            label.as_str()
        ));
    }
    Judged::Wanted(Wanted { job: of, label, queued_at: job.created_at.min(now) })
}

impl Gitea {
    /// Reads the server until `shutdown`, and tells the world.
    pub async fn run(self, control: Handle, clock: Clock, shutdown: CancellationToken) {
        let poll = Duration::try_from(self.config.poll).unwrap_or(FAILING);
        let quiet = if self.config.webhook_secret_file.is_some() { QUIET_WITH_WEBHOOKS } else { QUIET };
        let (mut slower, mut failures, mut last, mut swept) = (1, 0_u32, None, None);
        loop {
            let pause = match self.read(&control, &clock).await {
                Ok(Ok(reading)) => {
                    failures = 0;
                    let now = (reading.wanted.clone(), reading.taken.clone());
                    let idle = now.0.is_empty() && now.1.is_empty() && last.as_ref() == Some(&now);
                    slower = if idle { (slower * 2).min(quiet) } else { 1 };
                    last = Some(now);
                    control.tell(Event::DemandRead(Box::new(reading))).await;
                    poll.saturating_mul(slower)
                }
                Ok(Err(error)) => {
                    tracing::warn!(forge = %self.config.name, error = error.line(), "forge not read");
                    let event = Event::DemandFailed { forge: self.config.name.clone(), message: error.line() };
                    control.tell(event).await;
                    failures = failures.saturating_add(1);
                    poll.saturating_mul(1 << failures.min(6)).min(FAILING.max(poll))
                }
                Err(Stopped) => return,
            };
            let now = tokio::time::Instant::now();
            if failures == 0 && swept.is_none_or(|at| now >= at + SWEEP_EVERY) {
                match self.sweep(&control).await {
                    // Too early to judge: the next reading looks again.
                    Ok(Ok(false)) => {}
                    Ok(Ok(true)) => swept = Some(now),
                    Ok(Err(error)) => {
                        swept = Some(now);
                        tracing::warn!(forge = %self.config.name, error = error.line(), "registrations not swept");
                    }
                    Err(Stopped) => return,
                }
            }
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = self.wake.notified() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// One reading of all that waits, and of what runs on our runners, when there are any.
    async fn read(&self, control: &Handle, clock: &Clock) -> Result<Result<Reading, ForgeError>, Stopped> {
        let name = self.config.name.clone();
        let (labels, runners) = control
            .read(move |world, _, _| {
                let labels: Vec<LabelName> = world.settings().labels.keys().cloned().collect();
                let live = |job: &crate::fleet::Job| job.forge == name && job.runner.is_some() && job.ended().is_none();
                (labels, world.jobs().any(live))
            })
            .await?;
        Ok(self.read_with(&labels, runners, clock).await)
    }

    async fn read_with(&self, labels: &[LabelName], runners: bool, clock: &Clock) -> Result<Reading, ForgeError> {
        let began_at = clock.now();
        let actions = self.config.scope.actions();
        let mut reading =
            Reading { forge: self.config.name.clone(), began_at, wanted: vec![], unserved: vec![], taken: vec![] };
        // Only what is ready: `waiting` is blocked by needs, concurrency or approval (spec gitea 8).
        for job in self.api.jobs(&actions, "queued").await? {
            match judge(&job, &self.config, labels, began_at) {
                Judged::Wanted(wanted) => reading.wanted.push(wanted),
                Judged::Unserved(unserved) => reading.unserved.push(unserved),
                Judged::Foreign => {}
            }
        }
        if runners {
            for job in self.api.jobs(&actions, "in_progress").await? {
                let runner = job.runner_name.as_deref().and_then(|name| self.runner_of(name));
                if let (Some(runner), Some(repository)) = (runner, job.repository()) {
                    let of = ForgeJob {
                        id: job.id,
                        run: job.run_id,
                        attempt: job.run_attempt.max(1),
                        repository: repository.to_string(),
                        name: job.name,
                        url: job.html_url,
                    };
                    reading.taken.push(Taken { runner, job: of });
                }
            }
        }
        Ok(reading)
    }

    /// Removes registrations of ours that nobody knows: a reply that was lost, a database that was lost. One that calls,
    /// or that has a job, is left alone. False when it is too early to judge.
    async fn sweep(&self, control: &Handle) -> Result<Result<bool, ForgeError>, Stopped> {
        let actions = self.config.scope.actions();
        let runners = match self.api.runners(&actions).await {
            Ok(runners) => runners,
            Err(error) => return Ok(Err(error)),
        };
        let ours: Vec<_> = runners
            .into_iter()
            .filter(|runner| runner.status == "offline")
            .filter_map(|runner| Some((runner.id, self.runner_of(&runner.name)?)))
            .collect();
        if ours.is_empty() {
            return Ok(Ok(true));
        }
        let (judged, unknown) = control
            .read(move |world, _, now| {
                // Right after the start a machine that a lost database knew may still be to be adopted.
                let judged = world.may_judge(now);
                let unknown = ours.into_iter().filter(|(_, job)| judged && world.job(*job).is_none());
                (judged, unknown.collect::<Vec<_>>())
            })
            .await?;
        Ok(self.remove_unknown(&actions, unknown).await.map(|()| judged))
    }

    async fn remove_unknown(
        &self,
        actions: &str,
        unknown: Vec<(i64, pilotlight_wire::JobId)>,
    ) -> Result<(), ForgeError> {
        if unknown.is_empty() {
            return Ok(());
        }
        let busy: Vec<i64> =
            self.api.jobs(actions, "in_progress").await?.into_iter().filter_map(|job| job.runner_id).collect();
        for (id, job) in unknown.into_iter().filter(|(id, _)| !busy.contains(id)) {
            tracing::info!(forge = %self.config.name, runner = id, %job, "removing a registration that nobody knows");
            self.api.delete_runner(actions, id).await?;
        }
        Ok(())
    }
}
