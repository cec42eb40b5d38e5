//! Keeping agents running: one keeper per instance that is alive by its files.
//!
//! ```text
//! look ── done, broken, being destroyed, gone ──> the keeper ends
//!  │ └─── the lock is held: adopt ──────────────┐
//!  └───── nobody holds it: start ───────────────┴─> wait for its end ─> 5th quick death in a row: broken
//!                                                          └─────────── else look again
//! ```
//!
//! The slot's lock is held while looking and starting, never while waiting, and `destroy` holds it from its mark to
//! the end: whoever starts an agent has seen that there is no mark.

use std::{collections::HashSet, io, time::Duration};

use pilotlight_runtime::{Report, failpoint};
use pilotlight_wire::InstanceId;
use tokio::{
    sync::Mutex,
    task::JoinSet,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;

use super::{
    LocalProvider, Slot,
    folder::{Folder, Life},
    off_thread,
    process::{self, Holder, Process},
};

/// How soon a directory that cannot be judged now is looked at again.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// How soon a file system that fails is asked again.
const RETRY: Duration = Duration::from_secs(1);

/// What came of one look at an instance.
enum Turn {
    /// No agent is to run here.
    Over,
    /// Somebody holds the lock and has not said who.
    Unclear,
    /// The agent ended, or could not be started.
    Died { lived: Duration, how: String },
}

impl LocalProvider {
    /// Keeps an agent running in every instance's directory until `shutdown`: starts those of new instances, adopts
    /// those of an earlier scaler, starts again what died without leaving for good, reaps. The agents run on after
    /// the shutdown. To be called once, and to be polled for as long as the scaler runs.
    pub async fn supervise(&self, shutdown: CancellationToken) {
        let mut keepers = JoinSet::new();
        let mut kept = HashSet::new();
        // Those of an earlier scaler are looked for once; each later one is told by its create call, however many there
        // are beside it.
        let mut looked = false;
        loop {
            let mut found = self.0.take_created();
            if !looked {
                match self.alive().await {
                    Ok(instances) => {
                        found.extend(instances);
                        looked = true;
                    }
                    Err(error) => tracing::warn!(error = %Report(&error), "cannot look for instances; trying again"),
                }
            }
            for instance in found.into_iter().filter(|instance| kept.insert(*instance)) {
                let provider = self.clone();
                keepers.spawn(async move {
                    provider.keep(instance).await;
                    instance
                });
            }
            tokio::select! {
                // Dropping a keeper lets go of its agent and does not end it.
                () = shutdown.cancelled() => return,
                () = self.0.news.notified() => {}
                () = sleep(RETRY), if !looked => {}
                Some(ended) = keepers.join_next() => match ended {
                    Ok(instance) => drop(kept.remove(&instance)),
                    Err(error) => {
                        // Keepers are never aborted, so this one panicked: a bug, and not one to go on with.
                        if let Ok(panic) = error.try_into_panic() { std::panic::resume_unwind(panic) }
                    }
                },
            }
        }
    }

    async fn alive(&self) -> io::Result<Vec<InstanceId>> {
        let root = self.0.root.clone();
        let lives = off_thread(move || super::lives(&root)).await?;
        Ok(lives.into_iter().filter(|(_, life)| *life == Life::Alive).map(|(instance, _)| instance).collect())
    }

    async fn keep(&self, instance: InstanceId) {
        let folder = Folder::new(&self.0.root, instance);
        let slot = self.slot(instance);
        let limits = &self.0.limits;
        let mut deaths = 0;
        loop {
            match turn(&folder, &slot, instance).await {
                Ok(Turn::Over) => return,
                Ok(Turn::Unclear) => sleep(LOOK_AGAIN).await,
                Ok(Turn::Died { lived, how }) => {
                    deaths = if lived < limits.quick_death { deaths + 1 } else { 1 };
                    if deaths < limits.deaths {
                        tracing::warn!(%instance, how, deaths, "the agent died; starting it again");
                        // At once the first time, then 1, 2, 4 s.
                        sleep(if deaths == 1 { Duration::ZERO } else { limits.delay * (1 << (deaths - 2)) }).await;
                    } else {
                        give_up(&folder, &slot, instance, deaths, &how).await;
                    }
                }
                Err(error) => {
                    tracing::warn!(%instance, error = %Report(&error), "cannot look after the agent; trying again");
                    sleep(RETRY).await;
                }
            }
        }
    }
}

async fn turn(folder: &Folder, slot: &Mutex<Slot>, instance: InstanceId) -> io::Result<Turn> {
    let mut held = slot.lock().await;
    if folder.life()? != Life::Alive {
        return Ok(Turn::Over);
    }
    let since = Instant::now();
    let agent = match process::holder(&folder.lock())? {
        Holder::Agent(agent) => {
            tracing::info!(%instance, "adopted the running agent");
            agent
        }
        Holder::Unnamed => return Ok(Turn::Unclear),
        Holder::Nobody => match process::start(folder).and_then(|child| held.take_in(child)) {
            Ok(agent) => {
                failpoint!("scaler.local-agent.spawned");
                tracing::info!(%instance, "started the agent");
                agent
            }
            Err(error) => return Ok(Turn::Died { lived: Duration::ZERO, how: format!("cannot be started: {error}") }),
        },
    };
    drop(held);
    agent.exited().await?;
    let status = match slot.lock().await.child.take() {
        Some(mut child) => Some(child.wait().await?),
        None => None,
    };
    // An agent that leaves for good has written its mark before.
    if folder.life()? != Life::Alive {
        return Ok(Turn::Over);
    }
    Ok(Turn::Died {
        lived: since.elapsed(),
        how: status.map_or_else(|| "exit status unknown".to_owned(), |status| status.to_string()),
    })
}

async fn give_up(folder: &Folder, slot: &Mutex<Slot>, instance: InstanceId, deaths: u32, how: &str) {
    let _held = slot.lock().await;
    let note = format!("the agent died {deaths} times in a row ({how}); its log is {}", folder.log().display());
    let broken = folder.clone();
    tracing::error!(%instance, how, deaths, "the agent dies again and again and is not started any more");
    let marked = off_thread(move || match broken.life()? {
        Life::Alive => broken.mark_broken(&note),
        _ => Ok(()),
    });
    if let Err(error) = marked.await {
        // Without the mark the next turn starts the agent once more and comes back here.
        tracing::warn!(%instance, error = %Report(&error), "cannot mark the instance as broken");
        sleep(RETRY).await;
    }
}

impl Slot {
    /// Takes a child in, to be reaped here.
    fn take_in(&mut self, child: tokio::process::Child) -> io::Result<Process> {
        let pid = child.id().ok_or(io::ErrorKind::NotFound)?;
        self.child = Some(child);
        Process::open(pid)
    }
}
