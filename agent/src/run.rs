//! One life of an agent on its directory: where the parts meet.

use std::{future::Future, io};

use jiff::Timestamp;
use pilotlight_runtime::clock::{self, Clock};
use pilotlight_wire::agent::{Bootstrap, EnrolRequest};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    assignment::Found,
    bootstrap::{AgentDir, DirError},
    dispatch::{self, Exit, Fatal, Job, Setup},
    host::{self, Roots},
    job::{Channels, End},
    link::Client,
    machine,
};

/// Why an agent could not start, or not go on.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Its directory.
    #[error("cannot use the agent's directory")]
    Dir(#[from] DirError),
    /// The kernel's id of this boot.
    #[error("cannot read the boot id")]
    BootId(#[source] io::Error),
    /// What the machine has.
    #[error("cannot take the inventory")]
    Host(#[from] host::HostError),
    /// TLS.
    #[error("cannot set up the connection to the scaler")]
    Client(#[from] reqwest::Error),
    /// The loop.
    #[error("the agent cannot go on")]
    Fatal(#[from] Fatal),
}

/// Runs an agent until it is stopped, leaves or fails. `found` are the assignments on disk, `docker` is Docker's
/// version, `runner` runs one job.
///
/// # Errors
/// [`RunError`].
pub async fn run<R, F>(
    dir: &AgentDir,
    bootstrap: Bootstrap,
    found: Vec<Found>,
    docker: Option<String>,
    runner: R,
    shutdown: CancellationToken,
) -> Result<Exit, RunError>
where
    R: Fn(Job, Channels) -> F,
    F: Future<Output = End> + Send + 'static,
{
    let clock = Clock::system(Timestamp::MIN);
    let wanted = bootstrap.gpus.as_deref();
    let (inventory, health) = host::inventory(dir.path(), &Roots::default(), wanted, docker)?;
    for problem in &health.problems {
        warn!(problem, "not healthy");
    }
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
    let boot_id = clock::boot_id().map_err(RunError::BootId)?;
    let machine = machine::Setup { run: dir.next_run()?, boot_id, gpus, policy: dir.policy()?, found };
    info!(instance = %bootstrap.instance, run = machine.run, assignments = machine.found.len(), "agent starts");
    let client = Client::new(&bootstrap.scaler_url)?;
    let setup = Setup { dir: dir.path().to_owned(), client, enrol, machine, clock, boottime: clock::boottime };
    Ok(dispatch::run(setup, runner, shutdown).await?)
}
