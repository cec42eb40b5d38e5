//! The daemon: everything put together, and taken apart in order.

use std::{collections::BTreeMap, fs::File, io, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use pilotlight_runtime::{
    Report,
    clock::{Clock, Step},
};
use pilotlight_wire::ForgeName;
use tokio::{
    net::TcpListener,
    sync::{mpsc, watch},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    config::{Config, GiteaForge, Rules},
    control::{self, Control},
    effects::Effects,
    fleet::World,
    forge::Gitea,
    http::{self, App},
    keys::{AdminToken, KeyError, Keys},
    logs::{LogError, LogStore},
    metrics::Metrics,
    provider::local::LocalProvider,
    reload::{self, Reload},
    store::{Store, StoreError},
};

/// How long shutdown may take; below systemd's own limit.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

/// How often old logs and jobs are looked for.
const SWEEP_EVERY: Duration = Duration::from_secs(10 * 60);

/// Why the scaler ended. The kind decides the exit code (design 7).
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Another scaler has the state directory.
    #[error("another scaler runs on state directory {}; stop it, or name another with --state-dir", .0.display())]
    Locked(PathBuf),
    /// The state directory cannot be used.
    #[error("cannot use state directory {}", .path.display())]
    StateDir {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A key file cannot be used.
    #[error("keys")]
    Keys(#[from] KeyError),
    /// The address cannot be listened on.
    #[error("cannot listen on {address}")]
    Listen {
        /// Which.
        address: SocketAddr,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The log directory cannot be used.
    #[error("job logs")]
    Logs(#[from] LogError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A client of a forge cannot be made.
    #[error("set up TLS for forges")]
    Forge(#[source] reqwest::Error),
    /// The HTTP server failed.
    #[error("serve HTTP")]
    Serve(#[source] io::Error),
}

/// Runs the scaler until `shutdown`, by the config it is given and those that `reloads` brings. Agents and their jobs
/// go on without it.
///
/// # Errors
/// See [`RunError`].
pub async fn run(config: Config, reloads: mpsc::Receiver<Reload>, shutdown: CancellationToken) -> Result<(), RunError> {
    let state_dir = config.state_dir.clone();
    let _lock = lock(&state_dir)?;
    let database = state_dir.join("pilotlight.db");
    let key_file = config.key_file.clone().unwrap_or_else(|| state_dir.join("key"));
    let keys = Arc::new(Keys::load_or_create(&key_file, database.exists())?);
    let admin_file = config.admin_token_file.clone().unwrap_or_else(|| state_dir.join("admin.token"));
    let admin = AdminToken::load_or_create(&admin_file)?;
    let store = Store::open(&database, Arc::clone(&keys))?;
    let loaded = store.load()?;
    let (clock, step) = Clock::resumed(loaded.floor, loaded.floor_age);
    let logs = LogStore::open(&state_dir.join("logs"), clock.clone())?;
    for job in &loaded.jobs {
        logs.create(job.id).await?;
    }

    if let Some(step) = &step {
        let step_seconds = step.by.as_secs();
        tracing::warn!(step_seconds, "the system's clock was stepped since the last scaler; see `pilotlight status`");
        control::keep_longer(&store, &logs, step.skipped).await?;
    }

    let listener =
        TcpListener::bind(config.listen).await.map_err(|source| RunError::Listen { address: config.listen, source })?;
    let address = listener.local_addr().map_err(RunError::Serve)?;

    let (settings, now) = (config.settings(), clock.now());
    let world = match step {
        // Committed with the first pass; a scaler that dies before that finds the same step again.
        Some(Step { by, skipped, .. }) => {
            World::stepped(settings, rand::random(), now, (by, skipped), loaded.instances, loaded.jobs)
        }
        None => World::new(settings, rand::random(), now, loaded.instances, loaded.jobs),
    };
    let (rules_sender, rules) = watch::channel(config.rules());
    let local = Arc::new(LocalProvider::new(&state_dir));
    let metrics = Metrics::default();
    let (handle, inbox) = control::channel();
    let tasks = TaskTracker::new();
    let forges = forges(&config, &keys)?;
    let effects = Effects {
        control: handle.clone(),
        local: Arc::clone(&local),
        forges: Arc::clone(&forges),
        store: store.clone(),
        logs: logs.clone(),
        keys: Arc::clone(&keys),
        agent_url: format!("http://{address}"),
        tasks: tasks.clone(),
        soon: watch::Sender::new(false),
    };
    let app = App::new(http::Inner {
        control: handle.clone(),
        store: store.clone(),
        logs: logs.clone(),
        keys,
        admin,
        metrics: metrics.clone(),
        clock: clock.clone(),
        rules: rules.clone(),
        syncs: http::Syncs::default(),
        forges: Arc::clone(&forges),
        shutdown: shutdown.clone(),
    });

    // The world outlives the server by a moment, so that requests in flight get their answer.
    let stop_world = CancellationToken::new();
    let control = Control { world, store: store.clone(), clock: clock.clone(), effects: effects.clone(), metrics };
    let mut world_task = tokio::spawn(control.run(inbox, stop_world.clone()));
    let mut server = tokio::spawn(http::serve(listener, app, shutdown.clone()));
    tasks.spawn({
        let (local, shutdown) = (Arc::clone(&local), shutdown.clone());
        async move { local.supervise(shutdown).await }
    });
    tasks.spawn(effects.keep_listing(clock.clone(), shutdown.clone()));
    for forge in forges.values() {
        tasks.spawn(forge.clone().run(handle.clone(), clock.clone(), shutdown.clone()));
    }
    tasks.spawn(sweep(logs, store, clock, rules, shutdown.clone()));
    tasks.spawn({
        let (follow, shutdown) = (reload::follow(reloads, config, rules_sender, handle), shutdown.clone());
        async move {
            let _stopped = shutdown.run_until_cancelled(follow).await;
        }
    });
    tracing::info!(%address, state_dir = %state_dir.display(), version = env!("CARGO_PKG_VERSION"), "scaler started");

    let early = tokio::select! {
        () = shutdown.cancelled() => Ok(()),
        ended = &mut world_task => join(ended)?.map_err(RunError::Store),
        ended = &mut server => join(ended)?.map_err(RunError::Serve),
    };
    shutdown.cancel();
    early?;
    tracing::info!("stopping; agents and their jobs go on (`pilotlight drain --all --now` ends them)");
    let stop = async {
        if !server.is_finished() {
            join(server.await)?.map_err(RunError::Serve)?;
        }
        tasks.close();
        tasks.wait().await;
        stop_world.cancel();
        if !world_task.is_finished() {
            join(world_task.await)?.map_err(RunError::Store)?;
        }
        Ok(())
    };
    match tokio::time::timeout(STOP_TIMEOUT, stop).await {
        Ok(result) => result,
        Err(_elapsed) => {
            tracing::warn!(
                "not everything ended in time; provider calls that were cut off are made again at the next start"
            );
            Ok(())
        }
    }
}

/// A client of each configured forge.
fn forges(config: &Config, keys: &Keys) -> Result<Arc<BTreeMap<ForgeName, Gitea>>, RunError> {
    let controller = keys.controller_id();
    let one = |forge: &GiteaForge| {
        let client = Gitea::new(forge.clone(), controller).map_err(RunError::Forge)?;
        Ok((forge.name.clone(), client))
    };
    Ok(Arc::new(config.forges.values().map(one).collect::<Result<_, RunError>>()?))
}

/// A task that panicked takes the process along: what it held is in an unknown state.
fn join<T>(ended: Result<T, tokio::task::JoinError>) -> Result<T, RunError> {
    ended.map_err(|error| RunError::Store(StoreError::Thread(error)))
}

/// Keeps a second scaler out (design 8).
fn lock(state_dir: &std::path::Path) -> Result<File, RunError> {
    let failed = |source| RunError::StateDir { path: state_dir.to_owned(), source };
    std::fs::create_dir_all(state_dir).map_err(failed)?;
    std::fs::set_permissions(state_dir, std::os::unix::fs::PermissionsExt::from_mode(0o700)).map_err(failed)?;
    let file = File::create(state_dir.join("scaler.lock")).map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => Err(RunError::Locked(state_dir.to_owned())),
        Err(std::fs::TryLockError::Error(source)) => Err(failed(source)),
    }
}

/// Deletes old logs and forgets old jobs.
async fn sweep(logs: LogStore, store: Store, clock: Clock, rules: watch::Receiver<Rules>, shutdown: CancellationToken) {
    loop {
        let keep = rules.borrow().keep_logs;
        if let Err(error) = logs.sweep(keep).await {
            tracing::warn!(error = %Report(&error), "old logs not swept");
        }
        let before = clock.now().saturating_sub(keep).unwrap_or(clock.now());
        if let Err(error) = store.drop_settled_before(before).await {
            tracing::warn!(error = %Report(&error), "old jobs not dropped");
        }
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(SWEEP_EVERY) => {}
        }
    }
}
