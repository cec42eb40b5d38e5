//! The agent as a process: start it, find it by its lock, end it, run its clean-up.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Read},
    os::{
        fd::OwnedFd,
        unix::fs::{OpenOptionsExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use pilotlight_runtime::failpoint;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::{
    io::{AsyncReadExt, Interest, unix::AsyncFd},
    process::{Child, Command},
    time::timeout,
};

use super::folder::Folder;
use crate::fleet::LocalPlacement;

/// The variables an agent gets from the scaler's environment. All others stay with the scaler: its secrets are none
/// of an agent's business.
const ENVIRONMENT: [&str; 7] = [
    "PATH",
    "HOME",
    "LANG",
    "PILOTLIGHT_LOG",
    "DOCKER_HOST",
    "PILOTLIGHT_DOCKER_SOCKET",
    // Tests shorten a wait of ten minutes.
    "PILOTLIGHT_FULL_DISK_SECONDS",
];

/// An agent's log longer than this is set aside at the next start, bytes.
const MAX_AGENT_LOG: u64 = 10 * 1024 * 1024;

/// How much of a failed clean-up's complaint is kept, bytes.
const MAX_COMPLAINT: usize = 2048;

/// A process, held by its pidfd: no signal can reach another that got its number.
#[derive(Debug)]
pub(super) struct Process {
    pid: Pid,
    pidfd: AsyncFd<OwnedFd>,
}

impl Process {
    pub(super) fn open(pid: u32) -> io::Result<Self> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidData)?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        #[expect(unsafe_code, reason = "tokio has no safe way to wait for a descriptor")]
        // SAFETY: `register` wants the descriptor to stay open and the same while the `AsyncFd` owns it, which an
        // `OwnedFd` is by its type.
        let pidfd = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }.map_err(io::Error::from)?;
        Ok(Self { pid, pidfd })
    }

    /// Waits for the process to end; a zombie has ended.
    pub(super) async fn exited(&self) -> io::Result<()> {
        self.pidfd.readable().await.map(drop)
    }

    /// SIGTERM, and SIGKILL after the grace.
    pub(super) async fn end(&self, grace: Duration) -> io::Result<()> {
        for signal in [Signal::TERM, Signal::KILL] {
            match pidfd_send_signal(&self.pidfd, signal) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(error) => return Err(error.into()),
            }
            if let Ok(exited) = timeout(grace, self.exited()).await {
                return exited;
            }
        }
        let pid = self.pid.as_raw_nonzero();
        Err(io::Error::new(io::ErrorKind::TimedOut, format!("process {pid} does not end, not even by SIGKILL")))
    }
}

/// Who holds an `agent.lock`.
#[derive(Debug)]
pub(super) enum Holder {
    /// Nobody: no agent lives here, or it is a zombie.
    Nobody,
    /// Somebody who has not written yet who it is, or a remnant of one who died.
    Unnamed,
    /// This agent.
    Agent(Process),
}

/// Asks who holds a lock, by trying to take it.
///
/// For the moment of the question the lock is taken, and an agent that starts in that moment would believe that
/// another one lives. This is harmless because of who asks when: only the keeper and `destroy`, under the instance's
/// slot, and only while no agent started by this scaler lives. So the one agent that can be disturbed is one that a
/// scaler killed a moment ago had just started. It leaves before it has touched anything (the lock comes first), and
/// the keeper starts another. The other way round, an agent that takes the lock just after the question meets the one
/// started because of the answer, and the lock decides which of the two stays: there is never a second.
pub(super) fn holder(lock: &Path) -> io::Result<Holder> {
    let mut file = match File::open(lock) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Holder::Nobody),
        file => file?,
    };
    match file.try_lock_shared() {
        Ok(()) => {
            // Not left to the drop: a process that is being forked right now may have a copy of the descriptor.
            file.unlock()?;
            return Ok(Holder::Nobody);
        }
        Err(TryLockError::WouldBlock) => {}
        Err(TryLockError::Error(error)) => return Err(error),
    }
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    let mut words = text.split_ascii_whitespace().map(str::parse::<u64>);
    let (Some(Ok(pid)), Some(Ok(start))) = (words.next(), words.next()) else { return Ok(Holder::Unnamed) };
    let Ok(pid) = u32::try_from(pid) else { return Ok(Holder::Unnamed) };
    let Ok(process) = Process::open(pid) else { return Ok(Holder::Unnamed) };
    // Read after the pidfd was opened, so that it is this process's. The text may still be the last holder's.
    Ok(if start_time(pid) == Some(start) { Holder::Agent(process) } else { Holder::Unnamed })
}

/// When a process started, clock ticks since boot (field 22 of `/proc/<pid>/stat`). `None` for a zombie: a lock that
/// is held in its name is held by a copy of the descriptor, in a child that it was forking when it died.
fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the program's name in parentheses, which may hold anything.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    if fields.next()? == "Z" {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// The agent's binary: as configured, else beside the scaler's own.
pub(super) fn binary(placement: &LocalPlacement) -> io::Result<PathBuf> {
    match &placement.agent {
        Some(path) => std::path::absolute(path),
        None => Ok(std::env::current_exe()?.with_file_name("pilotlight-agent")),
    }
}

/// Why a path is no program.
pub(super) fn unusable(path: &Path) -> Option<String> {
    match fs::metadata(path) {
        Err(error) => Some(error.to_string()),
        Ok(metadata) if !metadata.is_file() => Some("not a file".to_owned()),
        Ok(metadata) if metadata.permissions().mode() & 0o111 == 0 => Some("not executable".to_owned()),
        Ok(_) => None,
    }
}

/// Starts the agent of a directory. It outlives the scaler.
///
/// The session of its own comes from setsid(1), which becomes the agent without a fork in between, so that the
/// child's pid is the agent's: the call itself could only be made by unsafe code between fork and exec, or by an
/// agent that nobody made the leader of a process group.
pub(super) fn start(folder: &Folder) -> io::Result<Child> {
    let log = open_log(folder)?;
    program(Path::new("setsid"))
        .arg(binary(&folder.placement()?)?)
        .args(["run", "--dir"])
        .arg(folder.path())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
}

/// Removes everything of an instance but its directory: `pilotlight-agent clean`.
pub(super) async fn clean(folder: &Folder, limit: Duration) -> io::Result<()> {
    let agent = binary(&folder.placement()?)?;
    let mut command = program(&agent);
    command.args(["clean", "--dir"]).arg(folder.path()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| io::Error::new(error.kind(), format!("cannot run {}: {error}", agent.display())))?;
    let stderr = child.stderr.take();
    let ended = timeout(limit, async { tokio::join!(child.wait(), complaint(stderr)) });
    let Ok((status, complaint)) = ended.await else {
        return Err(io::Error::new(io::ErrorKind::TimedOut, format!("the clean-up took longer than {limit:?}")));
    };
    let status = status?;
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("{status}: {complaint}"))) }
}

fn program(path: &Path) -> Command {
    let names = ENVIRONMENT.iter().chain(failpoint::VARIABLES);
    let environment = names.filter_map(|name| Some((OsString::from(name), std::env::var_os(name)?)));
    let mut command = Command::new(path);
    command.env_clear().envs(environment).current_dir("/").stdin(Stdio::null());
    command
}

fn open_log(folder: &Folder) -> io::Result<File> {
    let path = folder.log();
    if fs::metadata(&path).is_ok_and(|metadata| metadata.len() > MAX_AGENT_LOG) {
        fs::rename(&path, path.with_extension("log.1"))?;
    }
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

/// The end of what a program writes to stderr.
async fn complaint(stderr: Option<impl tokio::io::AsyncRead + Unpin>) -> String {
    let mut tail = Vec::new();
    if let Some(mut stderr) = stderr {
        // A read that fails ends the text; the exit status tells what matters.
        while let Ok(1..) = stderr.read_buf(&mut tail).await {
            tail.drain(..tail.len().saturating_sub(MAX_COMPLAINT));
        }
    }
    String::from_utf8_lossy(&tail).trim().to_owned()
}
