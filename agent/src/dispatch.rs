//! The agent's loop: everything that happens, one thing after another, goes through [`Machine`], and what it decides
//! is carried out here (design 5).
//!
//! One task owns the state. Jobs, deliveries and enrolment are tasks of one set that ends with the loop: none is
//! detached, and one that panics or meets a failing disk ends the agent. Jobs are containers and do not notice; the
//! next start takes them up.

use std::{collections::BTreeMap, future::Future, io, path::PathBuf, pin::pin, time::Duration};

use futures_util::{StreamExt, future::BoxFuture, stream::FuturesUnordered};
use pilotlight_runtime::{Report, clock::Clock, failpoint};
use pilotlight_wire::{
    AssignmentId,
    agent::{EnrolRequest, EnrolResponse, Start, SyncResponse},
};
use tokio::{
    sync::{mpsc, watch},
    task::{JoinError, JoinSet},
    time::{Instant, sleep_until},
};
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::{info, warn};

use crate::{
    assignment::{self, Moment},
    bootstrap,
    disk::{self, blocking},
    host,
    job::{AssignmentDir, Channels, End, Wish},
    link::{Answer, Client, Session},
    machine::{Effect, Event, Leave, LogEnd, Machine},
    outbox::{self, Outbox},
    upload::Upload,
};

mod pace;
mod tasks;
#[cfg(test)]
mod tests;

use pace::Pace;

/// Deadlines and the lease count the time of a suspended machine, sleeps do not: so none is long.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);

/// What an agent starts with.
#[derive(Debug)]
pub struct Setup {
    /// The agent's directory.
    pub dir: PathBuf,
    /// The scaler.
    pub client: Client,
    /// What enrolment says.
    pub enrol: EnrolRequest,
    /// What the machine starts with.
    pub machine: crate::machine::Setup,
    /// Wall time.
    pub clock: Clock,
    /// Time since boot: [`pilotlight_runtime::clock::boottime`], or what follows paused time in tests.
    pub boottime: fn() -> Duration,
}

/// A job for the runner.
#[derive(Clone, Debug)]
pub struct Job {
    /// What to run; `remaining_seconds` is as of now.
    pub start: Start,
    /// How many jobs without GPUs may run at once on this machine.
    pub cpu_jobs: u32,
}

/// How the loop ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Somebody stopped the process; jobs go on.
    Stopped,
    /// The agent has nothing to do on this machine any more.
    Left(Leave),
}

/// Why an agent cannot go on. The next start takes up what this one leaves.
#[derive(Debug, thiserror::Error)]
pub enum Fatal {
    /// The disk failed: nothing may be said or done that it does not hold.
    #[error("cannot use the agent's directory")]
    Disk(#[from] io::Error),
    /// The host cannot be looked at.
    #[error("cannot sample the host")]
    Host(#[from] host::HostError),
    /// A task of the agent's own panicked.
    #[error("a task panicked")]
    Panic(#[from] JoinError),
}

/// Runs the agent until it is stopped, leaves or fails. `runner` runs one job and is idempotent by assignment.
///
/// # Errors
/// [`Fatal`].
pub async fn run<R, F>(setup: Setup, runner: R, shutdown: CancellationToken) -> Result<Exit, Fatal>
where
    R: Fn(Job, Channels) -> F,
    F: Future<Output = End> + Send + 'static,
{
    disk::reserve(&setup.dir).await;
    let now = Moment { boot: (setup.boottime)(), wall: setup.clock.now() };
    let (machine, first) = Machine::new(setup.machine, now);
    let (events, inbox) = mpsc::channel(256);
    let mut dispatch = Dispatch {
        sampler: host::Sampler::new(&setup.dir)?,
        dir: setup.dir,
        clock: setup.clock,
        boottime: setup.boottime,
        runner,
        machine,
        events,
        tasks: JoinSet::new(),
        jobs: BTreeMap::new(),
        deliveries: BTreeMap::new(),
        session: None,
        syncs: FuturesUnordered::new(),
        pace: Pace::new(),
    };
    let enrolment = tasks::enrol(setup.client.clone(), setup.enrol);
    let result = dispatch.serve(first, inbox, setup.client, enrolment, shutdown).await;
    dispatch.tasks.shutdown().await;
    result
}

struct Dispatch<R> {
    dir: PathBuf,
    clock: Clock,
    boottime: fn() -> Duration,
    sampler: host::Sampler,
    runner: R,
    machine: Machine,
    events: mpsc::Sender<Event>,
    tasks: JoinSet<io::Result<()>>,
    /// What each running job is asked to do.
    jobs: BTreeMap<AssignmentId, watch::Sender<Wish>>,
    deliveries: BTreeMap<AssignmentId, Delivery>,
    session: Option<Session>,
    /// Syncs under way. A superseded one is not dropped: its answer renews the lease, and samples supersede syncs all
    /// the time.
    syncs: FuturesUnordered<BoxFuture<'static, Sync>>,
    pace: Pace,
}

/// What one assignment's delivery tasks are told; dropped, it ends them.
struct Delivery {
    last_event: watch::Sender<u64>,
    log: watch::Sender<LogEnd>,
    _stop: DropGuard,
}

struct Sync {
    n: u64,
    sent: Duration,
    answer: Answer<SyncResponse>,
}

impl<R, F> Dispatch<R>
where
    R: Fn(Job, Channels) -> F,
    F: Future<Output = End> + Send + 'static,
{
    async fn serve(
        &mut self,
        first: Vec<Effect>,
        mut inbox: mpsc::Receiver<Event>,
        client: Client,
        enrolment: impl Future<Output = Answer<EnrolResponse>>,
        shutdown: CancellationToken,
    ) -> Result<Exit, Fatal> {
        let mut enrolment = pin!(enrolment);
        let mut enrolling = true;
        let mut left = self.apply(first).await?;
        while left.is_none() {
            let wake = self.machine.wake_after(self.now()).map(|after| Instant::now() + after.min(LONGEST_SLEEP));
            let (next_sample, next_sync) = (self.pace.next_sample(), self.pace.next_sync(self.syncs.len()));
            left = tokio::select! {
                biased;
                () = shutdown.cancelled() => return Ok(Exit::Stopped),
                Some(ended) = self.tasks.join_next() => {
                    ended??;
                    None
                }
                Some(event) = inbox.recv() => self.handle(event).await?,
                Some(sync) = self.syncs.next() => self.synced(sync).await?,
                answer = &mut enrolment, if enrolling => {
                    enrolling = false;
                    self.enrolled(&client, answer).await?
                }
                () = until(wake) => self.handle(Event::Tick).await?,
                () = until(next_sample) => self.sample().await?,
                () = until(next_sync) => {
                    self.sync();
                    None
                }
            };
        }
        Ok(left.map_or(Exit::Stopped, Exit::Left))
    }

    fn now(&self) -> Moment {
        Moment { boot: (self.boottime)(), wall: self.clock.now() }
    }

    async fn handle(&mut self, event: Event) -> Result<Option<Leave>, Fatal> {
        let now = self.now();
        let effects = self.machine.handle(event, now);
        self.apply(effects).await
    }

    async fn sample(&mut self) -> Result<Option<Leave>, Fatal> {
        self.pace.sampled();
        match self.sampler.sample(self.clock.now()) {
            Ok(sample) => self.handle(Event::Sampled(sample)).await,
            Err(error) => {
                warn!(error = %Report(&error), "no sample");
                Ok(None)
            }
        }
    }

    async fn enrolled(&mut self, client: &Client, answer: Answer<EnrolResponse>) -> Result<Option<Leave>, Fatal> {
        match answer {
            Answer::Ok(EnrolResponse { bearer, policy, .. }) => {
                info!(lease_seconds = policy.lease_seconds, "enrolled");
                failpoint!("agent.enrolment.answered");
                let (dir, kept, shown) = (self.dir.clone(), policy.clone(), bearer.clone());
                blocking(&self.dir, move || bootstrap::keep_enrolment(&dir, &kept, &shown)).await?;
                failpoint!("agent.enrolment.kept");
                self.session = Some(client.session(bearer));
                self.pace.sample_every(Duration::from_secs(policy.sample_seconds.clamp(1, 3600)));
                self.handle(Event::Enrolled(policy)).await
            }
            Answer::Gone => self.handle(Event::Gone).await,
            refused => {
                warn!(answer = %refused, "the scaler does not take this agent in");
                self.handle(Event::EnrolRefused).await
            }
        }
    }

    /// Sends a sync; the answers of those before it are still awaited.
    fn sync(&mut self) {
        let Some(session) = self.session.clone() else { return };
        let request = self.machine.sync_request(self.now());
        let (n, sent) = (request.seq.n, (self.boottime)());
        self.pace.sent();
        self.syncs.push(Box::pin(async move { Sync { n, sent, answer: session.sync(&request).await } }));
    }

    async fn synced(&mut self, Sync { n, sent, answer }: Sync) -> Result<Option<Leave>, Fatal> {
        // A superseded one returns early and empty, or not at all; the one that counts is still on its way.
        let newest = n == self.machine.last_sent();
        match answer {
            Answer::Ok(SyncResponse { directives, lease_seconds, .. }) => {
                self.pace.answered(newest);
                self.handle(Event::Synced { n, sent, directives, lease_seconds }).await
            }
            Answer::Gone => self.handle(Event::Gone).await,
            other => {
                // Samples send new ones all the time, so the newest may never be among those that fail.
                if n > self.machine.last_answered() {
                    warn!(answer = %other, "sync not answered");
                }
                if newest {
                    self.pace.failed();
                }
                Ok(None)
            }
        }
    }

    /// Carries effects out, each to its end before the next.
    async fn apply(&mut self, effects: Vec<Effect>) -> Result<Option<Leave>, Fatal> {
        let mut left = None;
        for effect in effects {
            match effect {
                Effect::Persist(id, record) => {
                    let dir = self.dir.clone();
                    blocking(&self.dir, move || assignment::create(&dir, id, &record)).await?;
                }
                Effect::Emit(id, event) => {
                    info!(assignment = %id, event = event.n, kind = ?event.event, "assignment event");
                    let (dir, n) = (AssignmentDir::new(&self.dir, id), event.n);
                    blocking(&self.dir, move || outbox::append(&dir, &event)).await?;
                    if let Some(delivery) = self.deliveries.get(&id) {
                        delivery.last_event.send_replace(n);
                    }
                }
                Effect::Run(start) => self.run_job(*start),
                Effect::Wish(id, wish) => {
                    info!(assignment = %id, ?wish, "ending job");
                    if let Some(job) = self.jobs.get(&id) {
                        job.send_replace(wish);
                    }
                }
                Effect::Deliver(id) => self.deliver(id).await?,
                Effect::Log(id, end) => {
                    if let Some(delivery) = self.deliveries.get(&id) {
                        delivery.log.send_replace(end);
                    }
                }
                Effect::Forget(id) => {
                    self.deliveries.remove(&id);
                    self.jobs.remove(&id);
                    let dir = self.dir.clone();
                    blocking(&self.dir, move || assignment::remove(&dir, id)).await?;
                    disk::reserve(&self.dir).await;
                    // The next job must not be refused for what this one has left to be freed.
                    self.pace.sample_now();
                }
                Effect::Sync => self.pace.now(),
                Effect::SyncSoon => self.pace.soon(),
                Effect::Leave(leave) => {
                    info!(reason = leave.as_str(), "leaving");
                    left = Some(leave);
                }
            }
        }
        Ok(left)
    }

    fn run_job(&mut self, start: Start) {
        let id = start.assignment;
        info!(assignment = %id, job = %start.job.id, gpus = start.gpus.len(), "running job");
        let (wish, wished) = watch::channel(Wish::Run);
        let (progress, told) = mpsc::channel(16);
        let job = Job { start, cpu_jobs: self.machine.cpu_jobs() };
        let running = (self.runner)(job, Channels { wish: wished, progress });
        let spool = AssignmentDir::new(&self.dir, id).spool();
        self.jobs.insert(id, wish);
        self.tasks.spawn(tasks::job(id, running, told, spool, self.events.clone()));
    }

    async fn deliver(&mut self, id: AssignmentId) -> Result<(), Fatal> {
        let Some(session) = self.session.clone() else { return Ok(()) };
        let dir = AssignmentDir::new(&self.dir, id);
        let (known, spool) = (dir.clone(), dir.spool());
        let (events, acked) = blocking(&self.dir, move || outbox::load(&known)).await?;
        let (last_event, last) = watch::channel(events.last().map_or(0, |event| event.n));
        let (log, end) = watch::channel(LogEnd::Open);
        let stop = CancellationToken::new();
        let outbox = Outbox { id, agent_dir: self.dir.clone(), dir, last, acked, boottime: self.boottime }
            .deliver(session.clone(), self.events.clone());
        let upload = Upload { id, spool, end }.run(session, self.events.clone());
        for delivery in [Box::pin(outbox) as BoxFuture<'static, io::Result<()>>, Box::pin(upload)] {
            let stop = stop.clone();
            self.tasks.spawn(async move { stop.run_until_cancelled(delivery).await.unwrap_or(Ok(())) });
        }
        self.deliveries.insert(id, Delivery { last_event, log, _stop: stop.drop_guard() });
        Ok(())
    }
}

/// Sleeps until then, or for ever.
async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}
