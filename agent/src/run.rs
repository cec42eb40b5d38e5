//! One life of an agent on its directory: where the parts meet.

use std::{collections::BTreeSet, io, path::Path, time::Duration};

use jiff::Timestamp;
use pilotlight_runtime::{
    Report,
    clock::{self, Clock},
    signals,
};
use pilotlight_wire::{
    InstanceId,
    agent::{EnrolRequest, Inventory},
};
use tracing::{info, warn};

use crate::{
    assignment::{self, Record},
    bootstrap::{self, AgentDir, DirError},
    container::{self, Engine, EngineError, Networks, Share, TeardownError},
    dispatch::{self, Exit, Fatal, Job, Setup},
    host::{self, Roots},
    job::{
        Channels, End,
        direct::{self, JobContext},
    },
    link::Client,
    machine,
    power::{self, Switch},
};

/// How often Docker is asked before the machine counts as unhealthy, and before an agent with jobs gives up: dockerd
/// may be being restarted.
const DOCKER_TRIES: u32 = 5;
const DOCKER_TRIES_WITH_JOBS: u32 = 300;
const DOCKER_PAUSE: Duration = Duration::from_secs(2);

/// Why an agent could not start, or not go on.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Its directory.
    #[error("cannot use the agent's directory")]
    Dir(#[from] DirError),
    /// A file of an assignment, or the runtime itself.
    #[error("cannot start")]
    Io(#[from] io::Error),
    /// What the machine has.
    #[error("cannot take the inventory")]
    Host(#[from] host::HostError),
    /// TLS.
    #[error("cannot set up the connection to the scaler")]
    Client(#[from] reqwest::Error),
    /// Docker, while there are jobs of ours in it.
    #[error("Docker does not answer, and jobs of this agent are in it")]
    Docker(#[from] EngineError),
    /// The loop.
    #[error("the agent cannot go on")]
    Fatal(#[from] Fatal),
    /// Something of the instance is left.
    #[error("cannot clean up")]
    Teardown(#[from] TeardownError),
}

/// Runs the agent of a directory until it is stopped, leaves or fails.
///
/// # Errors
/// [`RunError`]; started again, the agent takes up where it was.
pub async fn run(path: &Path) -> Result<(), RunError> {
    let shutdown = signals::shutdown_token()?;
    let bootstrap = bootstrap::read_bootstrap(path)?;
    let dir = AgentDir::take(path)?;
    if let Some(reason) = dir.done()? {
        info!(reason, "this agent has left for good");
        return Ok(());
    }
    let found = assignment::load(path)?;
    let kept: BTreeSet<_> =
        found.iter().filter(|found| matches!(found.record, Record::Started { .. })).map(|found| found.id).collect();
    let tries = if kept.is_empty() { DOCKER_TRIES } else { DOCKER_TRIES_WITH_JOBS };
    let engine = match connect(tries).await {
        Ok(engine) => Some(engine),
        Err(error) if kept.is_empty() => {
            warn!(error = %Report(&error), "Docker does not answer");
            None
        }
        Err(error) => return Err(error.into()),
    };
    if let Some(engine) = &engine
        && let Err(error) = container::reap(engine, bootstrap.instance, &kept).await
    {
        warn!(error = %Report(&error), "what an earlier life left is not all removed");
    }

    let clock = Clock::system(Timestamp::MIN);
    let docker = engine.as_ref().map(|engine| engine.facts().version.clone());
    let (inventory, health) = host::inventory(path, &Roots::default(), bootstrap.gpus.as_deref(), docker)?;
    for problem in &health.problems {
        warn!(problem, "not healthy");
    }
    let workshop = match engine {
        Some(engine) => {
            Some(Workshop::new(engine, path, bootstrap.instance, &inventory, bootstrap.host_image, clock.clone())?)
        }
        None => None,
    };
    let gpus = inventory.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
    let enrol = EnrolRequest {
        instance: bootstrap.instance,
        secret: bootstrap.secret,
        nonce: dir.nonce()?,
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        agent_started_at: dir.started_at(clock.now())?,
        inventory,
        health,
    };
    let machine =
        machine::Setup { run: dir.next_run()?, boot_id: clock::boot_id()?, gpus, policy: dir.policy()?, found };
    info!(instance = %bootstrap.instance, run = machine.run, assignments = machine.found.len(), "agent starts");
    let client = Client::new(&bootstrap.scaler_url)?;
    let setup = Setup { dir: path.to_owned(), client, enrol, machine, clock, boottime: clock::boottime };
    let runner = |job, channels| run_job(workshop.clone(), job, channels);
    let refill = async {
        if let Some(workshop) = &workshop {
            workshop.networks.refill().await;
        }
    };
    let (exit, ()) = tokio::join!(dispatch::run(setup, runner, shutdown), refill);
    match exit? {
        Exit::Stopped => {
            info!("stopped; jobs go on");
            Ok(())
        }
        Exit::Left(leave) => {
            if let Some(workshop) = &workshop
                && let Err(error) = container::reap(&workshop.engine, bootstrap.instance, &BTreeSet::new()).await
            {
                warn!(error = %Report(&error), "not everything is cleaned up; the provider does the rest");
            }
            dir.mark_done(leave)?;
            info!(reason = leave.as_str(), "agent leaves");
            Ok(power::leave(bootstrap.power, Switch::REAL)?)
        }
    }
}

/// Ends everything that an agent, now dead, has on this box.
///
/// # Errors
/// When something may be left: call it again.
pub async fn clean(path: &Path) -> Result<(), RunError> {
    let bootstrap = bootstrap::read_bootstrap(path)?;
    // Held to the end, so that no agent starts meanwhile.
    let _dir = AgentDir::take(path)?;
    let engine = Engine::connect(&Engine::default_socket()).await?;
    Ok(container::teardown(&engine, path, bootstrap.instance).await?)
}

async fn connect(tries: u32) -> Result<Engine, EngineError> {
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

/// What every job of this machine needs.
#[derive(Clone, Debug)]
struct Workshop {
    engine: Engine,
    networks: Networks,
    context: JobContext,
}

impl Workshop {
    fn new(
        engine: Engine,
        path: &Path,
        instance: InstanceId,
        inventory: &Inventory,
        host_image: bool,
        clock: Clock,
    ) -> io::Result<Self> {
        let networks = Networks::new(engine.clone(), instance);
        let context = JobContext {
            engine: engine.clone(),
            networks: networks.clone(),
            instance,
            agent_dir: path.to_owned(),
            program: std::env::current_exe()?,
            share: Share {
                memory_bytes: inventory.memory_bytes,
                gpus: u32::try_from(inventory.gpus.len()).unwrap_or(u32::MAX),
                cpu_jobs: 0,
            },
            host_image,
            clock,
        };
        Ok(Self { engine, networks, context })
    }
}

async fn run_job(workshop: Option<Workshop>, job: Job, channels: Channels) -> End {
    let Some(Workshop { context, .. }) = workshop else {
        return End::Refused { reason: "Docker did not answer when the agent started".to_owned() };
    };
    let share = Share { cpu_jobs: job.cpu_jobs, ..context.share };
    direct::run(JobContext { share, ..context }, job.start, channels).await
}
