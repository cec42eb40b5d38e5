//! The agent's end of the attach process: start it, find it again, learn of its death.

use std::{io, os::fd::OwnedFd, path::PathBuf, process::Stdio, time::Duration};

use pilotlight_runtime::{Report, failpoint};
use pilotlight_wire::agent::Start;
use rustix::process::{PidfdFlags, pidfd_open};
use tokio::{
    io::{AsyncBufReadExt, BufReader, unix::AsyncFd},
    process::{Child, Command},
    time::timeout,
};

use super::AssignmentDir;
use crate::{
    attach::{AWAY, END, GAPPED, LOST, READY, mark_gap, mark_lost},
    container::{Engine, attach_pid, end_attach},
    disk,
};

/// How long an attach process may take to say `ready`.
const READY_TIME: Duration = Duration::from_secs(30);

/// What is needed to attach to one container.
#[derive(Clone, Debug)]
pub(super) struct Attacher {
    pub(super) program: PathBuf,
    pub(super) agent_dir: PathBuf,
    pub(super) dir: AssignmentDir,
    pub(super) engine: Engine,
    pub(super) container: String,
    /// Seconds since boot at which the attach process kills the container, whoever else is gone.
    pub(super) kill_at: u64,
}

/// How an attach process has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Left {
    /// At the end of the stream, which was the container's own; else some of the output may be missing.
    pub(super) at_the_end: bool,
    /// Docker was not there then: nobody has seen how the container ended.
    pub(super) without_docker: bool,
}

/// The process that reads a container's output.
#[derive(Debug)]
pub(super) enum Output {
    /// It lives.
    Live {
        /// Readable when it is dead, our child or not.
        pidfd: AsyncFd<OwnedFd>,
        /// Our own child, to be waited for.
        child: Option<Box<Child>>,
    },
    /// It has ended.
    Over,
}

impl Attacher {
    /// Starts the attach process and waits until Docker has attached.
    pub(super) async fn start(&self, start: &Start, resume: bool) -> io::Result<Output> {
        let mut command = Command::new(&self.program);
        command
            .arg("attach")
            .arg("--dir")
            .arg(&self.agent_dir)
            .arg("--assignment")
            .arg(start.assignment.to_string())
            .arg("--container")
            .arg(&self.container)
            .arg("--socket")
            .arg(self.engine.socket())
            .arg("--max-log")
            .arg(start.max_log_bytes.to_string())
            .arg("--kill-at")
            .arg(self.kill_at.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        if resume {
            command.arg("--resume");
        }
        let mut child = command.spawn()?;
        failpoint!("agent.attach.spawned");
        let lost = || io::Error::other("the attach process ended before it was ready");
        let stdout = child.stdout.take().ok_or_else(lost)?;
        let mut line = String::new();
        let said = timeout(READY_TIME, BufReader::new(stdout).read_line(&mut line)).await;
        if !matches!(said, Ok(Ok(_)) if line.trim_end() == READY) {
            child.kill().await?;
            return Err(lost());
        }
        let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).and_then(rustix::process::Pid::from_raw);
        let pidfd = pidfd_open(pid.ok_or_else(lost)?, PidfdFlags::NONBLOCK)?;
        Ok(Output::Live { pidfd: watchable(pidfd)?, child: Some(Box::new(child)) })
    }

    /// Finds the living attach process of an earlier agent.
    pub(super) fn find(&self) -> Output {
        let Some(pid) = attach_pid(&self.dir) else { return Output::Over };
        let opened = pidfd_open(pid, PidfdFlags::NONBLOCK).map_err(io::Error::from).and_then(watchable);
        match opened {
            // Asked again: between the two looks the pid may have become somebody else's.
            Ok(pidfd) if attach_pid(&self.dir) == Some(pid) => Output::Live { pidfd, child: None },
            Ok(_) => Output::Over,
            Err(error) => {
                tracing::warn!(error = %Report(&error), "the attach process cannot be watched");
                Output::Over
            }
        }
    }

    /// How the attach process, now gone, has left.
    pub(super) fn left(&self) -> Left {
        let text = std::fs::read_to_string(self.dir.attach_lock()).unwrap_or_default();
        Left { at_the_end: text.ends_with(END), without_docker: text.contains(AWAY) }
    }

    /// Whether the attach process, now gone, knew of output that is missing; what it could not write into the spool is
    /// written there now.
    pub(super) async fn gap(&self) -> bool {
        let text = std::fs::read_to_string(self.dir.attach_lock()).unwrap_or_default();
        let lost = text.lines().find_map(|line| line.strip_prefix(LOST)?.parse().ok());
        if let Some(bytes) = lost
            && bytes > 0
        {
            self.mark(move |dir| mark_lost(dir, bytes)).await;
        }
        lost.is_some() || text.contains(GAPPED)
    }

    /// Writes into the spool that output may be missing; nobody else writes to it any more.
    pub(super) async fn mark_gap(&self) {
        self.mark(mark_gap).await;
    }

    async fn mark(&self, write: impl Fn(&AssignmentDir) -> io::Result<()> + Send + 'static) {
        let dir = self.dir.clone();
        if let Err(error) = disk::blocking(&self.agent_dir, move || write(&dir)).await {
            tracing::warn!(error = %Report(&error), "a gap in the output is not marked");
        }
    }

    /// Bytes of the spool.
    pub(super) fn size(&self) -> u64 {
        std::fs::metadata(self.dir.spool()).map_or(0, |spool| spool.len())
    }

    /// Ends the attach process, if one lives.
    pub(super) async fn end(&self) {
        end_attach(&self.dir).await;
    }
}

/// A pidfd that the runtime can wait for: readable when the process has ended.
#[expect(unsafe_code, reason = "tokio has no safe way to register a descriptor")]
fn watchable(pidfd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` always gives the same descriptor, which is open for as long as the `AsyncFd` owns it.
    unsafe { AsyncFd::register(pidfd) }.map_err(io::Error::from)
}

impl Output {
    /// Returns when the process has ended; at once when it has.
    pub(super) async fn ended(&mut self) {
        if let Self::Live { pidfd, child } = self {
            if let Err(error) = pidfd.readable().await {
                tracing::warn!(error = %Report(&error), "the attach process cannot be watched");
            }
            if let Some(child) = child {
                // Reaped, or it would stay a zombie for as long as we live.
                let _status = child.wait().await;
            }
            *self = Self::Over;
        }
    }

    pub(super) fn is_over(&self) -> bool {
        matches!(self, Self::Over)
    }
}
