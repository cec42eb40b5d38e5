//! The local provider: instances are agents on the scaler's own box (link 10).
//!
//! Each instance is a directory `state_dir/local/<id>/` with an agent process that outlives the scaler. What is
//! listed are the directories, and whether an instance lives is said by their files alone ([`Folder::life`]), so a
//! scaler that was killed at any point is followed by one that sees the same. Docker is never spoken to here: what an
//! agent made, `pilotlight-agent clean` removes (docs/decisions/0003).

mod folder;
mod keeper;
mod process;

use std::{
    collections::HashMap,
    fmt, fs, io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use pilotlight_runtime::{Report, durable, failpoint};
use pilotlight_wire::{InstanceId, agent::Bootstrap};
use tokio::{
    process::Child,
    sync::Notify,
    time::{Instant, sleep},
};

use self::{
    folder::{Folder, Life},
    process::{Holder, Process},
};
use super::{CreateError, Listed, ProviderError, Tags};
use crate::fleet::LocalPlacement;

/// How often a lock whose holder is not known yet is looked at.
const POLL: Duration = Duration::from_millis(50);

/// The local provider. Cheap to clone; [`LocalProvider::supervise`] has to run for agents to start.
#[derive(Clone)]
pub struct LocalProvider(Arc<Shared>);

struct Shared {
    root: PathBuf,
    limits: Limits,
    /// One per instance that somebody works on; those that nobody holds any more go.
    slots: Mutex<HashMap<InstanceId, Weak<tokio::sync::Mutex<Slot>>>>,
    /// Instances that were made and that no keeper looks after yet.
    created: Mutex<Vec<InstanceId>>,
    /// There are some.
    news: Notify,
}

/// Serialises all that is done to one instance.
#[derive(Debug, Default)]
struct Slot {
    /// The agent, where this scaler started it and has not reaped it yet.
    child: Option<Child>,
}

#[derive(Debug)]
struct Limits {
    /// An agent that dies sooner than this after its start counts towards the breaker.
    quick_death: Duration,
    /// The breaker stops at this many quick deaths in a row.
    deaths: u32,
    /// Before the start after the second quick death; doubled after each further one.
    delay: Duration,
    /// From SIGTERM to SIGKILL.
    grace: Duration,
    /// For one run of the clean-up.
    clean: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            quick_death: Duration::from_secs(60),
            deaths: 5,
            delay: Duration::from_secs(1),
            grace: Duration::from_secs(10),
            clean: Duration::from_secs(120),
        }
    }
}

impl fmt::Debug for LocalProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalProvider").field("root", &self.0.root).finish_non_exhaustive()
    }
}

impl LocalProvider {
    /// The instances beneath `state_dir/local`. What a crashed create call left unfinished is removed; no other
    /// scaler may use the directory.
    #[must_use]
    pub fn new(state_dir: &Path) -> Self {
        Self::with_limits(state_dir, Limits::default())
    }

    fn with_limits(state_dir: &Path, limits: Limits) -> Self {
        let root = state_dir.join("local");
        // The agents run elsewhere in the file system.
        let root = std::path::absolute(&root).unwrap_or(root);
        for entry in fs::read_dir(&root).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().ends_with(UNFINISHED)
                && let Err(error) = fs::remove_dir_all(entry.path())
            {
                tracing::warn!(path = %entry.path().display(), %error, "cannot remove an unfinished directory");
            }
        }
        Self(Arc::new(Shared { root, limits, slots: Mutex::default(), created: Mutex::default(), news: Notify::new() }))
    }

    /// Makes an instance: its directory, whole or not at all, in which the supervision then starts an agent. The
    /// same instance again is fine, however far the first call came.
    ///
    /// # Errors
    /// `Invalid` when the agent's binary cannot be used, `Capacity` when the directory cannot be made, `MayExist` when
    /// nobody knows.
    pub async fn create(
        &self,
        bootstrap: &Bootstrap,
        placement: &LocalPlacement,
        tags: &Tags,
    ) -> Result<(), CreateError> {
        let instance = bootstrap.instance;
        let slot = self.slot(instance);
        let _held = slot.lock().await;
        let (root, bootstrap, placement, tags) =
            (self.0.root.clone(), bootstrap.clone(), placement.clone(), tags.clone());
        off_thread(move || Ok(make(&root, &bootstrap, &placement, &tags)))
            .await
            .unwrap_or_else(|error| Err(CreateError::MayExist(error.to_string())))?;
        self.0.created.lock().unwrap_or_else(PoisonError::into_inner).push(instance);
        self.0.news.notify_one();
        Ok(())
    }

    /// All instances that have a directory. An instance is alive while an agent runs in it or will be started in it.
    ///
    /// # Errors
    /// When a directory cannot be read: what is there is then unknown, not empty.
    pub async fn list(&self) -> Result<Vec<Listed>, ProviderError> {
        let root = self.0.root.clone();
        let listed = off_thread(move || {
            let found = lives(&root)?.into_iter().filter_map(|(instance, life)| {
                let (alive, note) = match life {
                    Life::Absent => return None,
                    Life::Alive => (true, None),
                    Life::Finished(note) => (false, Some(note)),
                    Life::Leaving => (false, Some("being destroyed".to_owned())),
                };
                Some(Listed { instance, alive, note, tags: Folder::new(&root, instance).tags() })
            });
            Ok(found.collect())
        });
        listed.await.map_err(|source| self.failed("list the instances in", source))
    }

    /// Destroys an instance: no further start, the agent stopped, everything it made removed, then the directory. The
    /// instance is listed until then. Idempotent, also across restarts of the scaler.
    ///
    /// # Errors
    /// When the agent does not end, the clean-up fails (such as while Docker is down; its last words are in the
    /// error), or files cannot be removed. Call again.
    pub async fn destroy(&self, instance: InstanceId) -> Result<(), ProviderError> {
        let folder = Folder::new(&self.0.root, instance);
        let slot = self.slot(instance);
        let mut held = slot.lock().await;
        let failed = |doing: &'static str| {
            let path = folder.path().display().to_string();
            move |source| ProviderError { doing: format!("{doing} {path}"), source }
        };
        if folder.life().map_err(failed("cannot look at"))? == Life::Absent {
            return Ok(());
        }
        if !folder.is_cleaned().map_err(failed("cannot look at"))? {
            let marked = folder.clone();
            off_thread(move || marked.mark_destroying()).await.map_err(failed("cannot mark as being destroyed"))?;
            failpoint!("scaler.local-destroy.marked");
            self.stop(&folder, &mut held).await.map_err(failed("cannot stop the agent of"))?;
            failpoint!("scaler.local-destroy.stopped");
            process::clean(&folder, self.0.limits.clean).await.map_err(failed("cannot clean up after"))?;
            failpoint!("scaler.local-destroy.cleaned");
            let cleaned = folder.bootstrap();
            off_thread(move || durable::remove(&cleaned)).await.map_err(failed("cannot remove the bootstrap of"))?;
        }
        failpoint!("scaler.local-destroy.without-bootstrap");
        // An agent that an earlier scaler started just before it was killed may have taken the lock only now. From
        // here on none can: there is no bootstrap.
        self.stop(&folder, &mut held).await.map_err(failed("cannot stop the agent of"))?;
        let gone = folder.clone();
        off_thread(move || gone.remove()).await.map_err(failed("cannot remove"))?;
        failpoint!("scaler.local-destroy.removed");
        tracing::info!(%instance, "destroyed");
        Ok(())
    }

    /// Ends the agent, whoever started it.
    async fn stop(&self, folder: &Folder, slot: &mut Slot) -> io::Result<()> {
        let grace = self.0.limits.grace;
        // Our own child may not have come as far as its lock.
        if let Some(child) = &mut slot.child {
            if let Some(pid) = child.id() {
                Process::open(pid)?.end(grace).await?;
            }
            child.wait().await?;
            slot.child = None;
        }
        let deadline = Instant::now() + grace;
        loop {
            match process::holder(&folder.lock())? {
                Holder::Nobody => return Ok(()),
                Holder::Agent(agent) => agent.end(grace).await?,
                Holder::Unnamed if Instant::now() < deadline => sleep(POLL).await,
                Holder::Unnamed => {
                    let text = "agent.lock is held by a process that it does not name";
                    return Err(io::Error::new(io::ErrorKind::TimedOut, text));
                }
            }
        }
    }

    fn slot(&self, instance: InstanceId) -> Arc<tokio::sync::Mutex<Slot>> {
        let mut slots = self.0.slots.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = slots.get(&instance).and_then(Weak::upgrade) {
            return slot;
        }
        slots.retain(|_, slot| slot.strong_count() > 0);
        let slot = Arc::default();
        slots.insert(instance, Arc::downgrade(&slot));
        slot
    }

    fn failed(&self, doing: &str, source: io::Error) -> ProviderError {
        ProviderError { doing: format!("cannot {doing} {}", self.0.root.display()), source }
    }
}

impl Shared {
    fn take_created(&self) -> Vec<InstanceId> {
        std::mem::take(&mut *self.created.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Ends the name of a directory that is being made.
const UNFINISHED: &str = ".new";

fn make(root: &Path, bootstrap: &Bootstrap, placement: &LocalPlacement, tags: &Tags) -> Result<(), CreateError> {
    let folder = Folder::new(root, bootstrap.instance);
    if folder.life().map_err(|error| CreateError::MayExist(error.to_string()))? != Life::Absent {
        return Ok(());
    }
    let agent = process::binary(placement).map_err(|error| CreateError::Invalid(error.to_string()))?;
    if let Some(problem) = process::unusable(&agent) {
        let agent = agent.display();
        return Err(CreateError::Invalid(format!(
            "the agent's binary {agent} cannot be used: {problem}; set `agent` of the local placement to its path"
        )));
    }
    let unfinished = folder.path().with_extension(&UNFINISHED[1..]);
    fill(root, &unfinished, bootstrap, placement, tags)
        .and_then(|()| fs::rename(&unfinished, folder.path()))
        .map_err(|error| CreateError::Capacity(format!("{}: {}", unfinished.display(), Report(&error))))?;
    failpoint!("scaler.local-create.renamed");
    durable::sync_parent(folder.path()).map_err(|error| CreateError::MayExist(error.to_string()))
}

fn fill(
    root: &Path,
    unfinished: &Path,
    bootstrap: &Bootstrap,
    placement: &LocalPlacement,
    tags: &Tags,
) -> io::Result<()> {
    if !root.try_exists()? {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(root)?;
        durable::sync_parent(root)?;
    }
    match fs::remove_dir_all(unfinished) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    fs::DirBuilder::new().mode(0o700).create(unfinished)?;
    Folder::fill(unfinished, bootstrap, placement, tags)?;
    failpoint!("scaler.local-create.filled");
    Ok(())
}

/// How each instance is that has a directory.
fn lives(root: &Path) -> io::Result<Vec<(InstanceId, Life)>> {
    let entries = match fs::read_dir(root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut lives = Vec::new();
    for entry in entries {
        let name = entry?.file_name();
        let Some(instance) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        lives.push((instance, Folder::new(root, instance).life()?));
    }
    Ok(lives)
}

/// Runs on a thread that may block.
async fn off_thread<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

#[cfg(test)]
mod tests;
