//! One life of an agent on its directory: where the parts meet.

use std::{collections::BTreeSet, future::Future, io, path::Path, time::Duration};

use jiff::Timestamp;
use pilotlight_runtime::{
    Report,
    clock::{self, Clock},
    failpoint,
};
use pilotlight_wire::{
    AssignmentId,
    agent::{Bootstrap, EnrolRequest},
};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    assignment::{self, Found},
    bootstrap::{AgentDir, DirError, read_bootstrap},
    container::{EngineError, TeardownError},
    dispatch::{self, Exit, Fatal, Job, Setup},
    host::{self, Roots},
    job::{Channels, End},
    link::Client,
    machine,
    power::{self, Switch},
};

/// Why an agent could not start, or not go on.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Its directory.
    #[error("cannot start")]
    Dir(#[from] DirError),
    /// Its assignments.
    #[error("cannot read the assignments")]
    Assignments(#[source] io::Error),
    /// Signals, threads, the boot id, standard output.
    #[error("the operating system refuses")]
    Runtime(#[source] io::Error),
    /// What the machine has.
    #[error("cannot take the inventory")]
    Host(#[from] host::HostError),
    /// TLS.
    #[error("cannot set up the connection to the scaler")]
    Client(#[from] reqwest::Error),
    /// The loop.
    #[error("the agent cannot go on")]
    Fatal(#[from] Fatal),
    /// Docker, when everything of an instance is to be removed.
    #[error("cannot clean up")]
    Docker(#[from] EngineError),
    /// Something of the instance is left.
    #[error("cannot clean up")]
    Teardown(#[from] TeardownError),
    /// The machine stays on.
    #[error("cannot power off")]
    Power(#[source] io::Error),
}

/// The container side, opened for one instance.
#[derive(Debug)]
pub struct Containers<R, W, T> {
    /// Docker's version, if it answers.
    pub version: Option<String>,
    /// Runs one job; idempotent by assignment.
    pub runner: R,
    /// Keeps ready what the next job would wait for; polled beside the loop and dropped with it.
    pub keep_ready: W,
    /// Removes everything of the instance that is left.
    pub teardown: T,
}

/// How long the last cleaning may take; whatever ends the machine cleans again.
const TEARDOWN_LIMIT: Duration = Duration::from_secs(90);

/// Runs an agent on its directory until `shutdown`, until it leaves or fails. One that has left for good does not
/// start again: it only turns its machine off, if that is how it leaves.
///
/// `open` is given the bootstrap and the assignments on disk; all else of this instance may go.
///
/// # Errors
/// [`RunError`].
pub async fn run<R, F, W, T, E>(
    path: &Path,
    switch: Switch,
    shutdown: CancellationToken,
    open: impl AsyncFnOnce(&Bootstrap, BTreeSet<AssignmentId>) -> Containers<R, W, T>,
) -> Result<(), RunError>
where
    R: Fn(Job, Channels) -> F,
    F: Future<Output = End> + Send + 'static,
    W: AsyncFnOnce(),
    T: AsyncFnOnce() -> Result<(), E>,
    E: std::error::Error,
{
    let dir = AgentDir::take(path)?;
    failpoint!("agent.lock.taken");
    let bootstrap = read_bootstrap(path)?;
    if let Some(reason) = dir.done()? {
        info!(reason, "this agent has left for good");
    } else {
        let found = assignment::load(path).map_err(RunError::Assignments)?;
        let Containers { version, runner, keep_ready, teardown } =
            open(&bootstrap, found.iter().map(|found| found.id).collect()).await;
        let setup = prepare(&dir, &bootstrap, found, version)?;
        let beside = async {
            keep_ready().await;
            std::future::pending::<()>().await;
        };
        let exit = tokio::select! {
            exit = dispatch::run(setup, runner, shutdown) => exit?,
            () = beside => return Ok(()),
        };
        let Exit::Left(leave) = exit else {
            info!("stopped; jobs go on");
            return Ok(());
        };
        failpoint!("agent.leave.begun");
        match timeout(TEARDOWN_LIMIT, teardown()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!(error = %Report(&error), "not all containers are removed"),
            Err(_) => warn!("removing containers took too long"),
        }
        failpoint!("agent.leave.unmarked");
        dir.mark_done(leave)?;
        failpoint!("agent.leave.marked");
    }
    power::leave(bootstrap.power, switch).map_err(RunError::Power)
}

/// Looks at the machine and the directory. `docker` is Docker's version, if it answers.
fn prepare(
    dir: &AgentDir,
    bootstrap: &Bootstrap,
    found: Vec<Found>,
    docker: Option<String>,
) -> Result<Setup, RunError> {
    let clock = Clock::system(Timestamp::MIN);
    let wanted = bootstrap.gpus.as_deref();
    let (inventory, health) = host::inventory(dir.path(), &Roots::default(), wanted, docker)?;
    for problem in &health.problems {
        warn!(problem, "not healthy");
    }
    let gpus = inventory.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
    let enrol = EnrolRequest {
        instance: bootstrap.instance,
        secret: bootstrap.secret.clone(),
        nonce: dir.nonce()?,
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        agent_started_at: dir.started_at(clock.now())?,
        inventory,
        health,
        bearer: dir.bearer()?,
    };
    failpoint!("agent.nonce.written");
    let boot_id = clock::boot_id().map_err(RunError::Runtime)?;
    let disk_free = enrol.inventory.disk_free_bytes;
    let machine = machine::Setup { run: dir.next_run()?, boot_id, gpus, policy: dir.policy()?, found, disk_free };
    failpoint!("agent.run.counted");
    info!(instance = %bootstrap.instance, run = machine.run, assignments = machine.found.len(), "agent starts");
    let client = Client::new(&bootstrap.scaler_url)?;
    Ok(Setup { dir: dir.path().to_owned(), client, enrol, machine, clock, boottime: clock::boottime })
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, fs, sync::atomic::AtomicUsize, sync::atomic::Ordering};

    use axum::{Json, Router, http::StatusCode, routing::post};
    use pilotlight_wire::ErrorBody;
    use tempfile::TempDir;
    use tokio::net::TcpListener;

    use super::*;

    static OFF: AtomicUsize = AtomicUsize::new(0);
    const SWITCH: Switch = Switch {
        ask: || {
            OFF.fetch_add(1, Ordering::SeqCst);
            Ok(())
        },
        force: || Err(io::Error::other("not reached")),
    };

    /// A directory whose scaler says that the instance is gone.
    async fn gone(power: &str) -> TempDir {
        let gone = || async { (StatusCode::GONE, Json(ErrorBody::new(ErrorBody::INSTANCE_GONE, "gone"))) };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let router = Router::new().route("/agent/v1/enrol", post(gone));
        tokio::spawn(async move { axum::serve(listener, router).await });
        let dir = tempfile::tempdir().unwrap();
        let instance = "018f0000-0000-7000-8000-000000000009";
        let text = serde_json::json!({"scaler_url": url, "instance": instance, "secret": "s", "power": power});
        fs::write(dir.path().join("bootstrap.json"), text.to_string()).unwrap();
        dir
    }

    async fn live(dir: &TempDir, stop: &CancellationToken, torn: &Cell<usize>, result: io::Result<()>) -> bool {
        let opened = Cell::new(false);
        let open = async |_: &Bootstrap, kept: BTreeSet<AssignmentId>| {
            assert_eq!(kept, BTreeSet::new());
            opened.set(true);
            let runner = |_: Job, _: Channels| async { End::Refused { reason: String::new() } };
            let teardown = async || {
                assert!(!dir.path().join("done").exists(), "cleaned before it is said");
                torn.set(torn.get() + 1);
                result
            };
            Containers { version: None, runner, keep_ready: async || {}, teardown }
        };
        run(dir.path(), SWITCH, stop.clone(), open).await.unwrap();
        opened.get()
    }

    #[tokio::test]
    async fn an_agent_that_leaves_cleans_up_says_so_and_does_not_start_again() {
        let (stop, torn) = (CancellationToken::new(), Cell::new(0));
        for result in [Ok(()), Err(io::Error::other("Docker is down"))] {
            torn.set(0);
            let dir = gone("exit").await;
            assert!(live(&dir, &stop, &torn, result).await);
            assert_eq!(fs::read_to_string(dir.path().join("done")).unwrap(), "terminated");
            assert!(!live(&dir, &stop, &torn, Ok(())).await, "nothing is opened again");
            assert_eq!(torn.get(), 1);
        }
        assert_eq!(OFF.load(Ordering::SeqCst), 0);
        let dir = gone("poweroff").await;
        live(&dir, &stop, &torn, Ok(())).await;
        live(&dir, &stop, &torn, Ok(())).await;
        assert_eq!(OFF.load(Ordering::SeqCst), 2, "a machine that was turned on again goes off again");
    }

    #[tokio::test]
    async fn a_stopped_agent_cleans_nothing_and_may_start_again() {
        let (stop, torn) = (CancellationToken::new(), Cell::new(0));
        let dir = gone("poweroff").await;
        stop.cancel();
        live(&dir, &stop, &torn, Ok(())).await;
        assert_eq!(torn.get(), 0);
        assert!(!dir.path().join("done").exists());
        assert_eq!(fs::read_to_string(dir.path().join("run")).unwrap(), "1");
    }
}
