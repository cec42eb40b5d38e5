//! A thousand agents against the real scaler on one core (design 10): what they cost, and how fast news reach them.
//!
//! Agents are played; everything else is as in production: jobs are submitted, machines are made by the local provider
//! (their processes sleep), agents enrol with the secrets of their bootstraps and sync as the real one does.

use std::{collections::HashMap, path::Path, time::Duration};

use anyhow::{Context, bail};
use futures_util::{StreamExt, TryStreamExt, stream};
use jiff::Timestamp;
use pilotlight_benches::{
    agent::{Agent, Reached, SAMPLE_EVERY},
    machine,
    numbers::{Times, row},
    scaler::{self, Scaler},
};
use pilotlight_runtime::{clock::Clock, limits};
use pilotlight_wire::{JobId, agent::Bootstrap};
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{Instant, interval, sleep, timeout},
};

/// Fleets that are measured, each the one before and more: agents in all, the label of the new ones (or the machines that
/// are there would take their jobs), and the budget of the scaler's memory.
const FLEETS: [(usize, &str, &str); 2] = [(200, "some", "32 MB"), (1000, "many", "64 MB")];

/// The label of jobs that are given to agents that wait, and that of jobs that each get a machine.
const WARM: &str = "many";
const FRESH: &str = "fresh";

/// Calls under way at once when a rate is measured.
const AT_ONCE: usize = 32;

/// Syncs of each new agent when their rate is measured.
const SYNCS: usize = 20;

/// How long a fleet is watched at rest.
const REST: Duration = Duration::from_secs(20);

/// Jobs whose way to a held sync is measured, and the time between two.
const WARM_JOBS: usize = 200;
const WARM_PACE: Duration = Duration::from_millis(50);

/// Jobs whose way to the provider is measured: 150 a minute.
const FRESH_JOBS: usize = 150;
const FRESH_PACE: Duration = Duration::from_millis(400);

/// How long anything may take that normally takes a moment.
const PATIENCE: Duration = Duration::from_secs(120);

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if machine::played(&arguments)? {
        return Ok(());
    }
    limits::raise_open_files()?;
    // Target directory / release / deps / our own name.
    let own = std::env::current_exe()?;
    let program = own.ancestors().nth(2).context("no directory")?.join("pilotlight");
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        tokio::select! {
            done = measure(&program) => done,
            _ = tokio::signal::ctrl_c() => bail!("interrupted"),
        }
    })
}

async fn measure(program: &Path) -> anyhow::Result<()> {
    let most = FLEETS.iter().map(|(size, ..)| *size).max().unwrap_or(0);
    let scaler = Scaler::start(program, &[FLEETS[0].1, FLEETS[1].1, FRESH], most).await?;
    row("scaler, resident, without machines", &format!("{:.1} MB", scaler.resident()?), "");
    let mut fleet = Fleet::new(&scaler)?;
    for (size, label, budget) in FLEETS {
        fleet.grow(size, label).await?;
        fleet.rest(budget).await?;
    }
    fleet.warm_jobs().await?;
    fleet.fresh_jobs().await?;
    row("scaler, resident, at the end", &format!("{:.1} MB", scaler.resident()?), "");
    Ok(())
}

struct Fleet<'a> {
    scaler: &'a Scaler,
    clock: Clock,
    http: reqwest::Client,
    agents: JoinSet<anyhow::Result<()>>,
    size: usize,
    sender: mpsc::Sender<Reached>,
    reached: mpsc::Receiver<Reached>,
}

impl<'a> Fleet<'a> {
    fn new(scaler: &'a Scaler) -> anyhow::Result<Self> {
        let (sender, reached) = mpsc::channel(8192);
        let (clock, http) = (Clock::system(Timestamp::MIN), scaler::client()?);
        Ok(Self { scaler, clock, http, agents: JoinSet::new(), size: 0, sender, reached })
    }

    /// Jobs for as many machines as are missing, all at once; their agents enrol, and then live.
    async fn grow(&mut self, size: usize, label: &str) -> anyhow::Result<()> {
        let (scaler, new) = (self.scaler, size - self.size);
        let creates = scaler.creates()?;
        let begun = Instant::now();
        let known: Vec<_> = scaler.bootstraps()?.iter().map(|bootstrap| bootstrap.instance).collect();
        let submits = stream::iter(0..new).map(|_| scaler.submit(label)).buffer_unordered(AT_ONCE);
        let jobs: Vec<JobId> = submits.try_collect().await?;
        rate("  submit", new, begun, scaler.processor()?, 0.0);
        let mut bootstraps: Vec<Bootstrap> = Vec::new();
        while bootstraps.len() < new {
            if begun.elapsed() > PATIENCE {
                bail!("{} of {new} machines after {PATIENCE:?}", bootstraps.len());
            }
            sleep(Duration::from_millis(50)).await;
            bootstraps = scaler.bootstraps()?;
            bootstraps.retain(|bootstrap| !known.contains(&bootstrap.instance));
        }
        let last = creates.try_iter().last().context("no create call was seen")?;
        let took = last.duration_since(begun).as_secs_f64();
        row(&format!("{new} jobs at once: until the last create call"), &format!("{took:.2} s"), "");

        let (begun, used) = (Instant::now(), scaler.processor()?);
        let enrols =
            bootstraps.iter().map(|bootstrap| timed(Agent::enrol(self.http.clone(), self.clock.clone(), bootstrap)));
        let enrolled: Vec<(Agent, Duration)> = stream::iter(enrols).buffer_unordered(AT_ONCE).try_collect().await?;
        rate("  enrolments", new, begun, scaler.processor()?, used);
        let (mut agents, times): (Vec<Agent>, Vec<Duration>) = enrolled.into_iter().unzip();
        row("  one enrolment", &Times::from_iter(times).show(), "");

        let (begun, used) = (Instant::now(), scaler.processor()?);
        let runs = agents.iter_mut().map(|agent| agent.run_first(&self.sender));
        stream::iter(runs).buffer_unordered(AT_ONCE).try_for_each(|()| async { Ok(()) }).await?;
        rate("  jobs: sync, started, finished", new, begun, scaler.processor()?, used);

        let (begun, used) = (Instant::now(), scaler.processor()?);
        let rounds = agents.iter_mut().map(supersede);
        let times: Vec<Vec<Duration>> = stream::iter(rounds).buffer_unordered(AT_ONCE).try_collect().await?;
        rate("  syncs, each superseding the one before", new * SYNCS, begun, scaler.processor()?, used);
        row("  one sync", &times.into_iter().flatten().collect::<Times>().show(), "");

        // Spread over the time between two samples, as agents are that did not start in the same moment.
        for (n, agent) in (0_u32..).zip(agents) {
            let first = SAMPLE_EVERY * n / u32::try_from(new)?;
            self.agents.spawn(agent.live(first, self.sender.clone()));
        }
        self.size = size;
        self.reach(&jobs, "the first jobs").await.map(drop)
    }

    /// When each of these jobs reached its agent.
    async fn reach(&mut self, jobs: &[JobId], what: &str) -> anyhow::Result<HashMap<JobId, Reached>> {
        let mut found = HashMap::new();
        let all = async {
            while !jobs.iter().all(|job| found.contains_key(job)) {
                tokio::select! {
                    Some(reached) = self.reached.recv() => { found.entry(reached.job).or_insert(reached); }
                    Some(ended) = self.agents.join_next() => ended??,
                }
            }
            anyhow::Ok(())
        };
        timeout(PATIENCE, all).await.with_context(|| format!("{what} do not reach their agents"))??;
        Ok(found)
    }

    /// What a fleet costs that has nothing to do.
    async fn rest(&mut self, budget: &str) -> anyhow::Result<()> {
        // The last jobs are settled by then.
        sleep(SAMPLE_EVERY).await;
        let (begun, used) = (Instant::now(), self.scaler.processor()?);
        sleep(REST).await;
        let seconds = self.scaler.processor()? - used;
        let hours = begun.elapsed().as_secs_f64() / 3600.0 * f64::from(u32::try_from(self.size)?);
        let core = seconds / begun.elapsed().as_secs_f64() * 100.0;
        let size = self.size;
        row(
            &format!("{size} agents at rest: processor of the scaler"),
            &format!("{:.2} s per agent and hour, {core:.1} % of a core", seconds / hours),
            "",
        );
        let resident = self.scaler.resident()?;
        row(&format!("{size} agents at rest: scaler, resident"), &format!("{resident:.1} MB"), budget);
        Ok(())
    }

    /// Jobs for machines that wait: from submit, and from the plan, to the directive in a held sync.
    async fn warm_jobs(&mut self) -> anyhow::Result<()> {
        let mut submitted = HashMap::new();
        let mut pace = interval(WARM_PACE);
        for _ in 0..WARM_JOBS {
            pace.tick().await;
            let begun = Instant::now();
            submitted.insert(self.scaler.submit(WARM).await?, begun);
        }
        let jobs: Vec<JobId> = submitted.keys().copied().collect();
        let reached = self.reach(&jobs, "the warm jobs").await?;
        let whole = submitted.iter().filter_map(|(job, begun)| Some(reached.get(job)?.at.duration_since(*begun)));
        row("warm job: submit sent to `Start` read by its agent", &whole.collect::<Times>().show(), "");
        let mut told = Vec::new();
        for (job, reached) in &reached {
            let Some(assigned) = self.scaler.job(*job).await?.phases.assigned else { continue };
            told.push(Duration::try_from(reached.wall.duration_since(assigned)).unwrap_or_default());
        }
        row("  of which `Assign` planned to `Start` read", &told.into_iter().collect::<Times>().show(), "");
        Ok(())
    }

    /// Jobs that each need a machine: from submit to the provider's first step.
    async fn fresh_jobs(&mut self) -> anyhow::Result<()> {
        let creates = self.scaler.creates()?;
        let (mut times, mut disk) = (Vec::new(), Vec::new());
        let mut pace = interval(FRESH_PACE);
        for _ in 0..FRESH_JOBS {
            pace.tick().await;
            disk.push(self.scaler.disk()?);
            let begun = Instant::now();
            self.scaler.submit(FRESH).await?;
            // The next tick is late enough for this machine to be on its way.
            let mut create = creates.try_recv();
            while create.is_err() && begun.elapsed() < PATIENCE {
                sleep(Duration::from_millis(5)).await;
                create = creates.try_recv();
            }
            times.push(create.context("no create call")?.duration_since(begun));
        }
        let size = self.size;
        row(
            &format!("submit to provider call, 150 jobs a minute, {size} agents"),
            &times.into_iter().collect::<Times>().show(),
            "p99 50 ms",
        );
        row("  the disk, in turn: 4 kB written and fsynced", &disk.into_iter().collect::<Times>().show(), "");
        Ok(())
    }
}

async fn timed<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<(T, Duration)> {
    let begun = Instant::now();
    Ok((work.await?, begun.elapsed()))
}

/// Syncs as fast as they are answered: each is held until the next supersedes it. A time runs from sending the next to
/// the answer of the one before.
async fn supersede(agent: &mut Agent) -> anyhow::Result<Vec<Duration>> {
    let mut times = Vec::new();
    let mut held = tokio::spawn(agent.sync());
    for _ in 0..SYNCS {
        let next = tokio::spawn(agent.sync());
        let (_, time) = timed(async { held.await? }).await?;
        times.push(time);
        held = next;
    }
    held.abort();
    Ok(times)
}

fn rate(what: &str, count: usize, begun: Instant, used: f64, before: f64) {
    let count = f64::from(u32::try_from(count).unwrap_or(u32::MAX));
    let per_second = count / begun.elapsed().as_secs_f64();
    row(what, &format!("{per_second:.0}/s, {:.2} ms of processor each", (used - before) * 1e3 / count), "");
}
