//! An agent, as far as the scaler can tell: it enrols, syncs, and says of each job that it ran.

use std::{collections::HashSet, time::Duration};

use anyhow::Context;
use pilotlight_runtime::clock::Clock;
use pilotlight_wire::{
    AssignmentId, InstanceId, JobId, Verdict,
    agent::{
        AssignmentEvent, AssignmentEventKind, Bootstrap, Directive, EnrolRequest, EnrolResponse, Finished, Health,
        HostSample, Inventory, Seq, Start, SyncRequest, SyncResponse,
    },
};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep},
};

/// How often an agent sends a sample, and so supersedes its held sync.
pub const SAMPLE_EVERY: Duration = Duration::from_secs(5);

/// A job that reached its agent.
#[derive(Clone, Copy, Debug)]
pub struct Reached {
    /// Which.
    pub job: JobId,
    /// When, by the monotonic clock.
    pub at: Instant,
    /// When, by the wall clock.
    pub wall: jiff::Timestamp,
}

/// One agent.
#[derive(Debug)]
pub struct Agent {
    http: reqwest::Client,
    url: String,
    clock: Clock,
    instance: InstanceId,
    bearer: String,
    n: u64,
    done: HashSet<AssignmentId>,
}

impl Agent {
    /// Enrols.
    ///
    /// # Errors
    /// When the scaler does not take it.
    pub async fn enrol(http: reqwest::Client, clock: Clock, bootstrap: &Bootstrap) -> anyhow::Result<Self> {
        let url = bootstrap.scaler_url.clone();
        let request = EnrolRequest {
            instance: bootstrap.instance,
            secret: bootstrap.secret.clone(),
            nonce: "ab".repeat(32),
            agent_version: "0".to_owned(),
            agent_started_at: clock.now(),
            inventory: Inventory { cpus: 16, docker: Some("26.1.5".to_owned()), ..Inventory::default() },
            health: Health::default(),
            bearer: None,
        };
        let call = http.post(format!("{url}/agent/v1/enrol")).json(&request);
        let answer: EnrolResponse = call.send().await?.error_for_status()?.json().await?;
        // Exposed for the header that it is for.
        let bearer = answer.bearer.expose().to_owned();
        Ok(Self { http, url, clock, instance: bootstrap.instance, bearer, n: 0, done: HashSet::new() })
    }

    /// The next sync; it supersedes the one before.
    pub fn sync(&mut self) -> impl Future<Output = anyhow::Result<Vec<Directive>>> + Send + 'static {
        self.n += 1;
        let sample = HostSample {
            at: self.clock.now(),
            cpu_percent: 12.5,
            memory_used_bytes: 1 << 33,
            disk_free_bytes: 1 << 38,
            load1: 0.5,
        };
        let seq = Seq { run: 1, n: self.n };
        let request = SyncRequest { seq, assignments: Vec::new(), sample: Some(sample), note: None };
        let call = self.post("sync").json(&request);
        async move {
            let answer: SyncResponse = call.send().await?.error_for_status()?.json().await?;
            Ok(answer.directives)
        }
    }

    /// Syncs once and runs what it is told to; there is something.
    ///
    /// # Errors
    /// When the scaler refuses anything.
    pub async fn run_first(&mut self, reached: &mpsc::Sender<Reached>) -> anyhow::Result<()> {
        for directive in self.sync().await? {
            if let Directive::Start(start) = directive {
                self.run(*start, reached).await?;
            }
        }
        Ok(())
    }

    /// Lives for ever: a sync is held at any time, a sample follows every few seconds, and each job is over as soon as
    /// it comes. `first` is the pause before the first sync: agents do not come in step.
    ///
    /// # Errors
    /// When the scaler refuses anything.
    pub async fn live(mut self, first: Duration, reached: mpsc::Sender<Reached>) -> anyhow::Result<()> {
        sleep(first).await;
        let (answers, mut answered) = mpsc::channel(8);
        loop {
            let (n, sync, answers) = (self.n + 1, self.sync(), answers.clone());
            // A superseded one is not dropped, as with the real agent: its answer comes at once.
            tokio::spawn(async move { answers.send((n, sync.await)).await });
            let next = sleep(SAMPLE_EVERY);
            let mut next = std::pin::pin!(next);
            loop {
                let (n, directives) = tokio::select! {
                    () = &mut next => break,
                    Some(answer) = answered.recv() => answer,
                };
                for directive in directives? {
                    if let Directive::Start(start) = directive {
                        self.run(*start, &reached).await?;
                    }
                }
                if n == self.n {
                    break;
                }
            }
        }
    }

    async fn run(&mut self, start: Start, reached: &mpsc::Sender<Reached>) -> anyhow::Result<()> {
        if !self.done.insert(start.assignment) {
            return Ok(());
        }
        let wall = self.clock.now();
        reached.send(Reached { job: start.job.id, at: Instant::now(), wall }).await?;
        let finished = Finished {
            verdict: Verdict::Success,
            exit_code: Some(0),
            reason: None,
            log_bytes: 0,
            log_gap: false,
            usage: None,
        };
        let started = AssignmentEventKind::Started { image_ready_at: wall, image_id: None };
        for (n, event) in (1..).zip([started, AssignmentEventKind::Finished(finished)]) {
            let event = AssignmentEvent { n, at: self.clock.now(), event };
            let call = self.post(&format!("assignments/{}/events", start.assignment)).json(&event);
            call.send().await?.error_for_status().with_context(|| format!("event {n} of {}", self.instance))?;
        }
        Ok(())
    }

    fn post(&self, path: &str) -> reqwest::RequestBuilder {
        self.http.post(format!("{}/agent/v1/{path}", self.url)).bearer_auth(&self.bearer)
    }
}
