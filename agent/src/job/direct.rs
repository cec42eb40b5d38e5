//! One job of the built-in queue in one container, from image to outcome.
//!
//! ```text
//! outcome.json there? ── yes ─▶ that is the end
//!   │ no
//! container: absent ─▶ image ▶ network ▶ create ▶ attach ▶ `started` ▶ start ─▶ watch ▶ settle
//!            created ─▶ remove, as absent (it never ran)                          ▲        │
//!            running ─▶ attach again if need be ──────────────────────────────────┘        │
//!            exited ─▶ settle ◀────────────────────────────────────────────────────────────┘
//! ```
//!
//! `started` is written before the start: a container that was there and is gone must not be run a second time. It
//! holds the name of the network, which a container that somebody removed cannot tell any more.

mod settle;
mod sight;
mod watching;

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use jiff::Timestamp;
use pilotlight_runtime::{
    Report,
    clock::{Clock, boottime},
    durable, failpoint,
    units::Size,
};
use pilotlight_wire::{DirectJob, InstanceId, Usage, Verdict, Work, agent::Start};
use tokio::sync::watch;

use self::{sight::Sight, watching::Watched};
use super::{AssignmentDir, Channels, End, Progress, Wish, output::Attacher};
use crate::{
    container::{Cgroup, Engine, EngineError, Found, Image, ImageError, Networks, Order, Share},
    disk, host,
    machine::MIN_DISK_FREE,
};

/// The third killer comes ten minutes after the deadline (link 5).
const OVERTIME_SECONDS: u64 = 600;

/// The longest single string that the kernel hands to a program, bytes.
const MAX_STRING: usize = 128 * 1024 - 1;

/// What a job's task needs.
#[derive(Clone, Debug)]
pub struct JobContext {
    /// Docker.
    pub engine: Engine,
    /// The instance's networks.
    pub networks: Networks,
    /// The instance.
    pub instance: InstanceId,
    /// The agent's directory.
    pub agent_dir: PathBuf,
    /// The agent's own program, which is also the attach process.
    pub program: PathBuf,
    /// What the machine has to share out.
    pub share: Share,
    /// Whether jobs may use `pilotlight/host`.
    pub host_image: bool,
    /// Time.
    pub clock: Clock,
}

/// One job's task.
struct Task {
    context: JobContext,
    start: Start,
    spec: DirectJob,
    dir: AssignmentDir,
    name: String,
    cgroup: Cgroup,
    attacher: Attacher,
    channels: Channels,
}

/// A job that is over before its container ran, or an end that needs no more looking.
enum Early {
    Refused(String),
    Finished(Verdict, Option<String>),
    /// There is a container of that name, or nobody knows whether it started: look again.
    Again,
}

/// Runs a job to its end, or carries on with it. Idempotent by assignment.
pub async fn run(context: JobContext, start: Start, channels: Channels) -> End {
    let dir = AssignmentDir::new(&context.agent_dir, start.assignment);
    let name = format!("pilotlight-{}", start.assignment);
    let cgroup = context.engine.cgroup(context.instance, start.assignment);
    let attacher = Attacher {
        program: context.program.clone(),
        agent_dir: context.agent_dir.clone(),
        dir: dir.clone(),
        engine: context.engine.clone(),
        container: name.clone(),
        kill_at: boottime().as_secs().saturating_add(start.remaining_seconds).saturating_add(OVERTIME_SECONDS),
    };
    let spec = match &start.work {
        Work::Job(spec) => spec.clone(),
        Work::Runner(_) => return End::Refused { reason: "this agent runs no forge's runners".to_owned() },
    };
    let mut task = Task { context, start, spec, dir, name, cgroup, attacher, channels };
    let end = match recorded(&task.dir) {
        Some(end) => end,
        None => task.run_and_record().await,
    };
    // After a recorded end, too: the agent may have been killed before it had cleaned up.
    task.clean_up().await;
    end
}

fn recorded(dir: &AssignmentDir) -> Option<End> {
    serde_json::from_slice(&fs::read(dir.outcome()).ok()?).ok()
}

async fn record(agent_dir: &Path, dir: &AssignmentDir, end: &End) -> io::Result<()> {
    let (path, bytes) = (dir.outcome(), serde_json::to_vec(end)?);
    disk::blocking(agent_dir, move || durable::write(&path, &bytes)).await
}

impl Task {
    async fn run_and_record(&mut self) -> End {
        let end = self.run().await;
        failpoint!("agent.outcome.unwritten");
        if let Err(error) = record(&self.context.agent_dir, &self.dir, &end).await {
            // The scaler learns the end all the same; only a crash before that would ask Docker again.
            tracing::error!(assignment = %self.start.assignment, error = %Report(&error), "outcome not written");
        }
        failpoint!("agent.outcome.written");
        end
    }

    async fn run(&mut self) -> End {
        loop {
            let mut wishes = self.channels.wish.clone();
            let looked = tokio::select! {
                looked = self.look() => looked,
                wish = wished(&mut wishes, Wish::Run), if !self.dir.started().exists() => {
                    return self.early(before_start(wish));
                }
            };
            let found = match looked {
                Ok(found) => found,
                // A job that has been started must not be run a second time elsewhere.
                Err(error) if self.dir.started().exists() => {
                    let lost = self.lost(format!("nobody knows how it ended: {}", error.message())).await;
                    return self.settle(lost).await;
                }
                Err(error) => return self.early(Early::Refused(error.message())),
            };
            let watched = match found {
                Found::Exited(exit) => {
                    let mut output = self.attacher.find();
                    self.exited(exit, &mut output, Sight::Whole, false, Wish::Run).await
                }
                Found::Running { started_at } => self.adopt(started_at).await,
                Found::Created => {
                    // It never ran, so its marker must go first: without it the job may begin again.
                    self.attacher.end().await;
                    let gone = durable::remove(&self.dir.started());
                    let removed = self.remove_container().await;
                    match (gone, removed) {
                        (Ok(()), Ok(())) => continue,
                        (Err(error), _) => return self.early(Early::Refused(error.to_string())),
                        (_, Err(error)) => return self.early(Early::Refused(error.message())),
                    }
                }
                Found::Absent if self.dir.started().exists() => {
                    self.lost("its container is gone and nobody knows how it ended".to_owned()).await
                }
                Found::Absent => match self.begin().await {
                    Ok(watched) => watched,
                    Err(Early::Again) => continue,
                    Err(early) => return self.early(early),
                },
            };
            return self.settle(watched).await;
        }
    }

    /// A job of an earlier agent, or one whose start was not answered, of whose end nobody knows.
    async fn lost(&self, reason: String) -> Watched {
        self.lose(reason, &mut self.attacher.find(), false, Wish::Run).await
    }

    /// From nothing to a container that runs.
    async fn begin(&mut self) -> Result<Watched, Early> {
        check(&self.spec)?;
        self.room()?;
        let mut wishes = self.channels.wish.clone();
        let image = tokio::select! {
            image = self.image() => image?,
            wish = wished(&mut wishes, Wish::Run) => return Err(before_start(wish)),
        };
        let image_ready_at = self.context.clock.now();
        failpoint!("agent.image.ready");
        let network = self.context.networks.take().await.map_err(refused)?;
        failpoint!("agent.network.taken");
        let order = Order {
            name: &self.name,
            instance: self.context.instance,
            start: &self.start,
            spec: &self.spec,
            image: &image,
            network: &network,
            cgroup: &self.cgroup,
            memory: self.context.share.memory(self.start.gpus.len()),
        };
        let created = self.context.engine.create(&order).await;
        if let Err(error) = created {
            self.context.networks.retire(network);
            return Err(match error.status() {
                Some(409) => Early::Again,
                Some(400) => Early::Finished(Verdict::Failure, Some(error.message())),
                // Measured: a working directory that is a file in the image is a 500. So is one on a full disk.
                Some(500) if error.message().starts_with("Cannot mkdir") && !error.is_full_disk() => {
                    Early::Finished(Verdict::Failure, Some(format!("the working directory: {}", error.message())))
                }
                _ => refused(error),
            });
        }
        failpoint!("agent.container.created");
        // An agent that was killed may have started one, which only now holds its lock.
        self.attacher.end().await;
        let output = self.attacher.start(&self.start, false).await;
        let output = output.map_err(|error| Early::Refused(format!("its output cannot be read: {error}")))?;
        failpoint!("agent.attach.ready");
        let wished = *self.channels.wish.borrow();
        if wished != Wish::Run {
            return Err(before_start(wished));
        }
        let marker = durable::write(&self.dir.started(), network.as_bytes());
        marker.map_err(|error| Early::Refused(format!("the agent's disk: {error}")))?;
        failpoint!("agent.marker.written");
        match self.context.engine.start(&self.name).await {
            Ok(()) => {}
            // No answer: it may run. Docker is asked again, or the job would run here and elsewhere.
            Err(error) if error.status().is_none() => return Err(Early::Again),
            Err(error) => match self.look().await {
                Ok(Found::Created) => return Err(start_failed(&error, &image)),
                // Docker says that it failed, and the container ran.
                _ => return Err(Early::Again),
            },
        }
        failpoint!("agent.container.started");
        let started_at = self.context.clock.now();
        self.tell(Progress::Started { image_ready_at, started_at, image_id: image.id }).await;
        self.context.networks.want_spare();
        Ok(self.watch(output, false).await)
    }

    /// A container of an earlier agent that still runs.
    async fn adopt(&mut self, started_at: Option<Timestamp>) -> Watched {
        let started_at = started_at.unwrap_or_else(|| self.context.clock.now());
        self.tell(Progress::Started { image_ready_at: started_at, started_at, image_id: None }).await;
        let output = self.attacher.find();
        self.watch(output, false).await
    }

    /// Refuses a job for whose output, image and files there is no room.
    fn room(&self) -> Result<(), Early> {
        let places = [
            ("the agent's disk", &self.context.agent_dir),
            // One that cannot be seen from here says by itself that it is full.
            ("Docker's disk", &self.context.engine.facts().root),
        ];
        for (what, place) in places {
            if let Ok(free) = host::disk_free(place)
                && free < MIN_DISK_FREE
            {
                let (free, needed, place) = (Size(free), Size(MIN_DISK_FREE), place.display());
                return Err(Early::Refused(format!("{what} is full: {free} free in {place}, {needed} needed")));
            }
        }
        Ok(())
    }

    async fn image(&self) -> Result<Image, Early> {
        if self.spec.env.contains_key(crate::container::VISIBLE_DEVICES) {
            let text =
                format!("{} is set by Pilotlight; the job's own value is dropped", crate::container::VISIBLE_DEVICES);
            self.tell(Progress::Detail(text)).await;
        }
        for volume in &self.start.volumes {
            if !std::path::Path::new(&volume.host).exists() {
                return Err(Early::Refused(format!("volume {}: {} is not on this machine", volume.name, volume.host)));
            }
        }
        let progress = self.channels.progress.clone();
        // A line that the dispatcher has no room for is overtaken by the next.
        let tell = |line| drop(progress.try_send(Progress::Detail(line)));
        let image = self.context.engine.prepare_image(&self.spec.image, self.context.host_image, tell).await;
        image.map_err(|error| match error {
            ImageError::Unusable(text) => Early::Finished(Verdict::Failure, Some(text)),
            ImageError::Network(text) => Early::Finished(Verdict::Infrastructure, Some(text)),
            ImageError::Machine(text) => Early::Refused(text),
        })
    }

    async fn tell(&self, progress: Progress) {
        // The dispatcher may be stopping; the next agent tells it again.
        let _stopping = self.channels.progress.send(progress).await;
    }

    fn early(&self, early: Early) -> End {
        match early {
            Early::Refused(reason) => End::Refused { reason },
            Early::Again => End::Refused { reason: "its container's name is taken".to_owned() },
            Early::Finished(verdict, reason) => End::Finished {
                verdict,
                exit_code: None,
                reason,
                log_gap: false,
                usage: None::<Usage>,
                finished_at: self.context.clock.now(),
            },
        }
    }
}

/// Returns the next wish after a known one; a dispatcher that is gone wishes nothing.
async fn wished(wishes: &mut watch::Receiver<Wish>, known: Wish) -> Wish {
    let next = wishes.wait_for(|wish| *wish != known && *wish != Wish::Run).await.map(|wish| *wish);
    match next {
        Ok(wish) => wish,
        Err(_gone) => std::future::pending().await,
    }
}

fn refused(error: EngineError) -> Early {
    Early::Refused(error.message())
}

/// The end of a job that was not to run any more before it started.
fn before_start(wish: Wish) -> Early {
    let (verdict, reason) = match wish {
        Wish::Run | Wish::Cancel => (Verdict::Cancelled, "cancelled before it started"),
        Wish::Timeout => (Verdict::Timeout, "its deadline passed before it started"),
        Wish::Terminate => (Verdict::Infrastructure, "its machine was terminated before it started"),
    };
    Early::Finished(verdict, Some(reason.to_owned()))
}

/// What no container can be given, said before Docker says it in its own way or not at all.
fn check(spec: &DirectJob) -> Result<(), Early> {
    let wrong = |text: String| Err(Early::Finished(Verdict::Failure, Some(text)));
    let words = spec.entrypoint.iter().flatten().chain(&spec.command).map(|word| ("a word of the command", word));
    let places = [("the user", &spec.user), ("the working directory", &spec.workdir)];
    let places = places.into_iter().filter_map(|(what, text)| Some((what, text.as_ref()?)));
    for (what, text) in words.chain(places) {
        if text.contains('\0') {
            return wrong(format!("{what} holds a zero byte, which no program can be given"));
        }
        if text.len() > MAX_STRING {
            return wrong(format!("{what} has {} bytes; the kernel takes {MAX_STRING} at most", text.len()));
        }
    }
    for (name, value) in &spec.env {
        if name.is_empty() || name.contains(['=', '\0']) {
            return wrong(format!("{name:?} cannot be the name of a variable"));
        }
        if value.contains('\0') {
            return wrong(format!("variable {name} holds a zero byte, which no program can be given"));
        }
        let len = name.len() + value.len() + 1;
        if len > MAX_STRING {
            return wrong(format!("variable {name} has {len} bytes; the kernel takes {MAX_STRING} at most"));
        }
    }
    Ok(())
}

/// Whose fault a failed start is. Docker says of most faults only here what they are.
fn start_failed(error: &EngineError, image: &Image) -> Early {
    let message = error.message();
    let lower = message.to_lowercase();
    let says = |needles: &[&str]| needles.iter().any(|needle| lower.contains(needle));
    let machine = says(&["no space left", "device driver", "cdi device", "nvidia-container-cli", "cgroup", "mounting"]);
    let job = says(&[
        "executable file not found",
        "no such file or directory",
        "permission denied",
        "exec format error",
        "unable to find user",
        "no matching entries in passwd",
        "unable to find group",
        "not a directory",
        "is a directory",
        "argument list too long",
        "cwd",
        "unsatisfied condition",
    ]);
    if job && !machine {
        Early::Finished(
            Verdict::Failure,
            Some(format!("image {}: {}", image.id.as_deref().unwrap_or(&image.reference), first_line(&message))),
        )
    } else {
        Early::Refused(first_line(&message).to_owned())
    }
}

fn first_line(text: &str) -> &str {
    text.trim().lines().next().unwrap_or_default()
}
