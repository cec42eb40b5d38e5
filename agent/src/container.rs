//! Containers through Docker (design 6): what the agent needs of the engine, one assignment's worth at a time.

mod cgroup;
mod create;
mod gpu;
mod host_image;
mod image;
mod network;
mod reap;

use std::{
    future::Future,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use bollard::{
    API_DEFAULT_VERSION, Docker,
    models::{
        ContainerInspectResponse, ContainerStateStatusEnum, SystemInfoCgroupDriverEnum, SystemInfoCgroupVersionEnum,
    },
    query_parameters::{
        EventsOptions, InspectContainerOptions, KillContainerOptions, RemoveContainerOptions, WaitContainerOptions,
    },
};
use futures_util::StreamExt;
use jiff::Timestamp;
use pilotlight_runtime::Report;
use pilotlight_wire::{AssignmentId, InstanceId};
use tokio_util::task::TaskTracker;

pub use self::{
    cgroup::Cgroup,
    create::{Order, Share},
    image::{Image, ImageError},
    network::Networks,
    reap::{TeardownError, reap, teardown},
};
pub(crate) use self::{
    create::VISIBLE_DEVICES,
    reap::{attach_pid, end_attach},
};

/// Label of everything that an instance makes.
pub const INSTANCE_LABEL: &str = "pilotlight.instance";

/// Label of everything that belongs to one assignment.
pub const ASSIGNMENT_LABEL: &str = "pilotlight.assignment";

/// How long a plain call to Docker may take. Waits and pulls have bounds of their own.
const CALL_TIMEOUT: Duration = Duration::from_secs(120);

/// Seconds around a container's start in which its event lies.
const EVENT_SLACK: i64 = 5;

/// How long Docker may take to remember.
const EVENT_TIME: Duration = Duration::from_secs(15);

/// Docker does not do what it should.
#[derive(Debug, thiserror::Error)]
#[error("cannot {doing}")]
pub struct EngineError {
    /// What was being done.
    pub doing: String,
    /// Why it failed.
    #[source]
    pub source: bollard::errors::Error,
}

impl EngineError {
    /// Docker's status, when it answered.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        status(&self.source)
    }

    /// Whether Docker says that it has no room.
    #[must_use]
    pub fn is_full_disk(&self) -> bool {
        self.message().to_lowercase().contains("no space left")
    }

    /// Docker's own sentence, or the whole chain of ours.
    #[must_use]
    pub fn message(&self) -> String {
        match &self.source {
            bollard::errors::Error::DockerResponseServerError { message, .. } => message.clone(),
            _ => Report(self).to_string(),
        }
    }
}

/// Docker as it is on this machine. Clones share the connection.
#[derive(Clone, Debug)]
pub struct Engine {
    docker: Docker,
    socket: PathBuf,
    facts: Arc<Facts>,
    /// Calls under way that make something.
    making: TaskTracker,
}

/// What this Docker is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Its version.
    pub version: String,
    /// Whether cgroups are of version 2.
    pub cgroup_v2: bool,
    /// Whether systemd makes the cgroups.
    pub systemd_cgroups: bool,
    /// Where CDI specs lie; empty without CDI.
    pub cdi_dirs: Vec<PathBuf>,
    /// Whether the `nvidia` runtime is there.
    pub nvidia_runtime: bool,
    /// Whether containers go on while dockerd is away.
    pub live_restore: bool,
    /// Where it keeps images and containers.
    pub root: PathBuf,
}

/// A container as inspect shows it.
#[derive(Clone, Debug, PartialEq)]
pub enum Found {
    /// No such container.
    Absent,
    /// Made, never started: it has no exit code, whatever a wait says (link 4).
    Created,
    /// Running, or in any other state that is not an end.
    Running {
        /// When it was started.
        started_at: Option<Timestamp>,
    },
    /// It ran and ended.
    Exited(Exit),
}

/// How a container that ran has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// Its own exit code; absent when Docker does not know it.
    pub code: Option<i32>,
    /// Whether the kernel killed it for memory.
    pub out_of_memory: bool,
    /// When it was started.
    pub started_at: Timestamp,
    /// When it ended.
    pub finished_at: Timestamp,
}

impl Engine {
    /// The socket to use: `PILOTLIGHT_DOCKER_SOCKET`, a `unix://` `DOCKER_HOST`, or the usual place.
    #[must_use]
    pub fn default_socket() -> PathBuf {
        if let Some(path) = std::env::var_os("PILOTLIGHT_DOCKER_SOCKET") {
            return path.into();
        }
        let host = std::env::var("DOCKER_HOST").unwrap_or_default();
        host.strip_prefix("unix://").unwrap_or("/var/run/docker.sock").into()
    }

    /// Connects and looks what there is.
    ///
    /// # Errors
    /// When Docker does not answer.
    pub async fn connect(socket: &Path) -> Result<Self, EngineError> {
        let doing = || format!("reach Docker at {}", socket.display());
        let failed = |source| EngineError { doing: doing(), source };
        let path = socket.to_string_lossy();
        let docker = Docker::connect_with_unix(&path, CALL_TIMEOUT.as_secs(), API_DEFAULT_VERSION).map_err(failed)?;
        let docker = docker.negotiate_version().await.map_err(failed)?;
        let info = docker.info().await.map_err(failed)?;
        let facts = Facts {
            version: info.server_version.unwrap_or_default(),
            cgroup_v2: info.cgroup_version == Some(SystemInfoCgroupVersionEnum::_2),
            systemd_cgroups: info.cgroup_driver == Some(SystemInfoCgroupDriverEnum::SYSTEMD),
            cdi_dirs: info.cdi_spec_dirs.unwrap_or_default().into_iter().map(PathBuf::from).collect(),
            nvidia_runtime: info.runtimes.is_some_and(|runtimes| runtimes.contains_key("nvidia")),
            live_restore: info.live_restore_enabled.unwrap_or(false),
            root: info.docker_root_dir.unwrap_or_default().into(),
        };
        Ok(Self { docker, socket: socket.to_owned(), facts: Arc::new(facts), making: TaskTracker::new() })
    }

    /// Makes something. Docker goes on with a call whose caller hangs up, and then it makes something that nobody
    /// knows of; so the call goes on, too, when nobody waits for it any more.
    async fn make<T: Send + 'static>(
        &self,
        call: impl Future<Output = Result<T, bollard::errors::Error>> + Send + 'static,
    ) -> Result<T, bollard::errors::Error> {
        let ended = self.making.spawn(call).await;
        ended.unwrap_or_else(|error| Err(bollard::errors::Error::IOError { err: std::io::Error::other(error) }))
    }

    /// Returns when nothing is being made; what there is can then be seen, and no more comes.
    pub async fn settle(&self) {
        self.making.close();
        self.making.wait().await;
    }

    /// What this Docker is.
    #[must_use]
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Docker's socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The cgroup of an assignment.
    #[must_use]
    pub fn cgroup(&self, instance: InstanceId, assignment: AssignmentId) -> Cgroup {
        Cgroup::new(&self.facts, instance, assignment)
    }

    /// Looks at a container.
    ///
    /// # Errors
    /// When Docker does not answer.
    pub async fn inspect(&self, name: &str) -> Result<Found, EngineError> {
        match self.docker.inspect_container(name, None::<InspectContainerOptions>).await {
            Ok(container) => Ok(found(&container)),
            Err(error) if status(&error) == Some(404) => Ok(Found::Absent),
            Err(source) => Err(EngineError { doing: format!("inspect container {name}"), source }),
        }
    }

    /// The networks of ours that a container is in; none when it cannot be looked at.
    pub async fn networks_of(&self, name: &str) -> Vec<String> {
        let Ok(container) = self.docker.inspect_container(name, None::<InspectContainerOptions>).await else {
            return Vec::new();
        };
        let networks = container.network_settings.and_then(|settings| settings.networks).unwrap_or_default();
        networks.into_keys().filter(|name| name.starts_with("pilotlight-")).collect()
    }

    /// Starts a container.
    ///
    /// # Errors
    /// Docker's refusal, which names what is wrong with the image, the command or the machine.
    pub async fn start(&self, name: &str) -> Result<(), EngineError> {
        let options = None::<bollard::query_parameters::StartContainerOptions>;
        let started = self.docker.start_container(name, options).await;
        started.map_err(|source| EngineError { doing: format!("start container {name}"), source })
    }

    /// Returns when a container is not running any more, with its exit code, or with nothing when Docker has lost sight
    /// of it. Of a container that was not seen running the code means nothing: measured, a wait on one that never
    /// started answers 0 at once.
    pub async fn wait(&self, name: &str) -> Option<i32> {
        let options = WaitContainerOptions { condition: "not-running".to_owned() };
        let code = match self.docker.wait_container(name, Some(options)).next().await? {
            Ok(answer) => answer.status_code,
            Err(bollard::errors::Error::DockerContainerWaitError { code, error }) if error.is_empty() => code,
            Err(_) => return None,
        };
        i32::try_from(code).ok()
    }

    /// Whether containers have gone on while dockerd was away: only if it was set before and still is.
    ///
    /// # Errors
    /// When Docker does not answer.
    pub async fn restores_live(&self) -> Result<bool, EngineError> {
        let info = self.docker.info().await;
        let info = info.map_err(|source| EngineError { doing: "ask Docker how it is set".to_owned(), source })?;
        Ok(self.facts.live_restore && info.live_restore_enabled.unwrap_or(false))
    }

    /// Whether this dockerd is the one that started a container: its events are in its memory only, the last 256 of
    /// them. One that was restarted does not know, and neither does one that has seen much since.
    pub async fn remembers_start(&self, name: &str, started_at: Timestamp) -> bool {
        let filters =
            [("container", name), ("event", "start")].map(|(key, value)| (key.to_owned(), vec![value.to_owned()]));
        let options = EventsOptions {
            since: Some((started_at.as_second() - EVENT_SLACK).to_string()),
            // A moment that has passed, or Docker would wait for it.
            until: Some((started_at.as_second() + EVENT_SLACK).to_string()),
            filters: Some(filters.into_iter().collect()),
        };
        let mut events = Box::pin(self.docker.events(Some(options)));
        matches!(tokio::time::timeout(EVENT_TIME, events.next()).await, Ok(Some(Ok(_))))
    }

    /// Sends a signal to a container's first process; one that is not running is fine.
    ///
    /// # Errors
    /// When Docker does not answer.
    pub async fn signal(&self, name: &str, signal: &str) -> Result<(), EngineError> {
        let options = KillContainerOptions { signal: signal.to_owned() };
        match self.docker.kill_container(name, Some(options)).await {
            Ok(()) => Ok(()),
            Err(error) if matches!(status(&error), Some(404 | 409)) => Ok(()),
            Err(source) => Err(EngineError { doing: format!("send {signal} to container {name}"), source }),
        }
    }

    /// Removes a container and its anonymous volumes, running or not; one that is absent is fine.
    ///
    /// # Errors
    /// When Docker does not answer or cannot.
    pub async fn remove(&self, name: &str) -> Result<(), EngineError> {
        let options = RemoveContainerOptions { force: true, v: true, ..RemoveContainerOptions::default() };
        match self.docker.remove_container(name, Some(options)).await {
            Ok(()) => Ok(()),
            // 409: somebody removes it already.
            Err(error) if matches!(status(&error), Some(404 | 409)) => Ok(()),
            Err(source) => Err(EngineError { doing: format!("remove container {name}"), source }),
        }
    }
}

fn found(container: &ContainerInspectResponse) -> Found {
    use ContainerStateStatusEnum::{CREATED, DEAD, EXITED, REMOVING};
    let Some(state) = &container.state else { return Found::Absent };
    let time = |text: &Option<String>| {
        let time: Timestamp = text.as_deref()?.parse().ok()?;
        // Docker's zero is the year 1.
        (time.as_second() > 0).then_some(time)
    };
    let started_at = time(&state.started_at);
    match (state.status, started_at) {
        // Whatever its state: never started is never ran, and never an exit code (link 4).
        (Some(CREATED | EXITED | DEAD | REMOVING), None) => Found::Created,
        (Some(EXITED | DEAD | REMOVING), Some(started_at)) => Found::Exited(Exit {
            code: state.exit_code.and_then(|code| i32::try_from(code).ok()),
            out_of_memory: state.oom_killed.unwrap_or(false),
            started_at,
            finished_at: time(&state.finished_at).unwrap_or(started_at).max(started_at),
        }),
        // Paused, restarting, stopping, or a word of a later Docker: not over.
        _ => Found::Running { started_at },
    }
}

fn status(error: &bollard::errors::Error) -> Option<u16> {
    match error {
        bollard::errors::Error::DockerResponseServerError { status_code, .. } => Some(*status_code),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use bollard::models::ContainerState;

    use super::*;

    #[test]
    fn an_exit_code_counts_only_of_a_container_that_ran_and_is_over() {
        use ContainerStateStatusEnum::{CREATED, EXITED, PAUSED, REMOVING, RUNNING, STOPPING};
        const NEVER: &str = "0001-01-01T00:00:00Z";
        const ONCE: &str = "2026-01-01T00:00:00.123456789Z";
        let look = |status, started: &str, exit_code| {
            let state = ContainerState {
                status: Some(status),
                started_at: Some(started.to_owned()),
                finished_at: Some(NEVER.to_owned()),
                exit_code,
                ..ContainerState::default()
            };
            found(&ContainerInspectResponse { state: Some(state), ..ContainerInspectResponse::default() })
        };
        // Measured: what could not be started has a code, too.
        assert_eq!(look(CREATED, NEVER, Some(127)), Found::Created);
        assert_eq!(look(EXITED, NEVER, Some(0)), Found::Created);
        for status in [RUNNING, PAUSED, STOPPING] {
            assert!(matches!(look(status, ONCE, Some(0)), Found::Running { started_at: Some(_) }), "{status:?}");
        }
        for (status, code) in [(EXITED, Some(3)), (REMOVING, Some(3)), (EXITED, None)] {
            let Found::Exited(exit) = look(status, ONCE, code) else { panic!("{status:?}") };
            assert_eq!(exit.code.map(i64::from), code);
            assert_eq!(exit.finished_at, exit.started_at, "never before its start");
        }
    }
}
