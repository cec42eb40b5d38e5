//! The agent's directory: what the provider put there, and what must outlive the process.
//!
//! ```text
//! DIR/bootstrap.json  from the provider, 0600
//!     agent.lock      held while an agent lives; its pid and start time inside
//!     nonce           made before the first enrolment, used again ever after (link 1)
//!     run             how often an agent started here (link 3)
//!     started_at      when the first one did
//!     policy.json     the scaler's last policy; there once an agent was enrolled
//!     bearer          the token of the last enrolment
//!     done            why the agent left for good: it is not started again
//!     reserve         room for events on a disk that is full; see `disk`
//!     assignments/    see `job`
//! ```

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use jiff::Timestamp;
use pilotlight_runtime::durable;
use pilotlight_wire::{
    Secret,
    agent::{Bootstrap, Policy},
};
use rand::Rng;

use crate::{disk, machine::Leave};

/// Why an agent cannot start in a directory.
#[derive(Debug, thiserror::Error)]
pub enum DirError {
    /// Another agent lives there.
    #[error("another agent runs in {}{}", .dir.display(), .holder.as_ref().map(|pid| format!(" (pid {pid})")).unwrap_or_default())]
    Taken {
        /// The directory.
        dir: PathBuf,
        /// Its pid, if it has written it.
        holder: Option<String>,
    },
    /// The provider's file is not usable.
    #[error("{} is not a bootstrap file", .path.display())]
    Bootstrap {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: io::Error,
    },
    /// A file of the agent's own cannot be read or written.
    #[error("cannot use {}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// How long a lock that somebody holds is tried again: a supervisor may hold it for an instant to see whether it is
/// free.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// An agent's directory. While this value lives, no other agent starts in it.
#[derive(Debug)]
pub struct AgentDir {
    path: PathBuf,
    _lock: File,
}

impl AgentDir {
    /// Takes the directory.
    ///
    /// # Errors
    /// [`DirError::Taken`] when an agent lives there; [`DirError::File`] when the lock file cannot be used.
    pub fn take(path: &Path) -> Result<Self, DirError> {
        let lock_path = path.join("agent.lock");
        let failed = |source| DirError::File { path: lock_path.clone(), source };
        let mut lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .mode(0o600)
            .open(&lock_path)
            .map_err(failed)?;
        let mut waited = Duration::ZERO;
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if waited < LOCK_PATIENCE => {
                    std::thread::sleep(LOCK_PAUSE);
                    waited += LOCK_PAUSE;
                }
                Err(TryLockError::WouldBlock) => {
                    let holder = fs::read_to_string(&lock_path).ok();
                    let holder = holder.and_then(|text| Some(text.split_whitespace().next()?.to_owned()));
                    return Err(DirError::Taken { dir: path.to_owned(), holder });
                }
                Err(TryLockError::Error(source)) => return Err(failed(source)),
            }
        }
        let identity = start_time().map(|start| format!("{} {start}\n", std::process::id()));
        identity.and_then(|text| lock.set_len(0).and_then(|()| lock.write_all(text.as_bytes()))).map_err(failed)?;
        Ok(Self { path: path.to_owned(), _lock: lock })
    }

    /// The directory itself.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The nonce: made and fsynced at the first call ever, the same ever after (link 1).
    ///
    /// # Errors
    /// When it cannot be read or written.
    pub fn nonce(&self) -> Result<String, DirError> {
        self.once("nonce", || {
            let mut bytes = [0_u8; 32];
            rand::rng().fill_bytes(&mut bytes);
            bytes.iter().map(|byte| format!("{byte:02x}")).collect()
        })
    }

    /// When the first agent started here.
    ///
    /// # Errors
    /// When it cannot be read or written.
    pub fn started_at(&self, now: Timestamp) -> Result<Timestamp, DirError> {
        let text = self.once("started_at", || now.to_string())?;
        text.parse().map_err(|error: jiff::Error| self.failed("started_at")(io::Error::other(error)))
    }

    /// The number of this start: one more than that of the start before, durable when this returns.
    ///
    /// # Errors
    /// When it cannot be read or written.
    pub fn next_run(&self) -> Result<u64, DirError> {
        let failed = self.failed("run");
        let last: u64 = match self.read("run")? {
            Some(text) => text.parse().map_err(|error| failed(io::Error::other(error)))?,
            None => 0,
        };
        self.write("run", (last + 1).to_string().as_bytes())?;
        Ok(last + 1)
    }

    /// The policy of the last enrolment, if there was one.
    ///
    /// # Errors
    /// When it cannot be read or understood.
    pub fn policy(&self) -> Result<Option<Policy>, DirError> {
        let text = self.read("policy.json")?;
        text.map(|text| serde_json::from_str(&text))
            .transpose()
            .map_err(|error| self.failed("policy.json")(error.into()))
    }

    /// The bearer of the last enrolment, if there was one.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn bearer(&self) -> Result<Option<Secret>, DirError> {
        Ok(self.read("bearer")?.map(Secret::new))
    }

    /// Why an agent left here for good, if one did.
    ///
    /// # Errors
    /// When that cannot be read.
    pub fn done(&self) -> Result<Option<String>, DirError> {
        self.read("done")
    }

    /// Says that the agent has left for good.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn mark_done(&self, leave: Leave) -> Result<(), DirError> {
        self.write("done", leave.as_str().as_bytes())
    }

    fn once(&self, name: &str, make: impl FnOnce() -> String) -> Result<String, DirError> {
        if let Some(text) = self.read(name)? {
            return Ok(text);
        }
        let text = make();
        self.write(name, text.as_bytes())?;
        Ok(text)
    }

    /// An agent without jobs had better fail on a full disk, so that another machine is used. One with jobs waits: dying
    /// again and again it would end them.
    fn write(&self, name: &str, bytes: &[u8]) -> Result<(), DirError> {
        let has_jobs = fs::read_dir(self.path.join("assignments")).is_ok_and(|mut entries| entries.next().is_some());
        let patience = if has_jobs { disk::full_disk_patience() } else { Duration::ZERO };
        let path = self.path.join(name);
        disk::patiently(&self.path, patience, || durable::write(&path, bytes)).map_err(self.failed(name))
    }

    fn read(&self, name: &str) -> Result<Option<String>, DirError> {
        match fs::read_to_string(self.path.join(name)) {
            Ok(text) => Ok(Some(text.trim().to_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.failed(name)(error)),
        }
    }

    fn failed(&self, name: &str) -> impl Fn(io::Error) -> DirError + use<> {
        let path = self.path.join(name);
        move |source| DirError::File { path: path.clone(), source }
    }
}

/// Reads the provider's file.
///
/// # Errors
/// [`DirError::Bootstrap`] when it is absent or not in its format.
pub fn read_bootstrap(dir: &Path) -> Result<Bootstrap, DirError> {
    let path = dir.join("bootstrap.json");
    let read = fs::read(&path).and_then(|bytes| Ok(serde_json::from_slice(&bytes)?));
    read.map_err(|source| DirError::Bootstrap { path, source })
}

/// Keeps what an enrolment gave: an agent that starts again while the scaler is away still knows its lease, and can show
/// a scaler that lost its database that it had enrolled.
///
/// # Errors
/// When it cannot be written.
pub fn keep_enrolment(dir: &Path, policy: &Policy, bearer: &Secret) -> io::Result<()> {
    durable::write(&dir.join("policy.json"), &serde_json::to_vec(policy)?)?;
    durable::write(&dir.join("bearer"), bearer.expose().as_bytes())
}

/// The kernel's start time of this process, clock ticks since boot; with the pid it names a process for good.
fn start_time() -> io::Result<u64> {
    let stat = fs::read_to_string("/proc/self/stat")?;
    // The command may contain anything, parentheses included; the fields after the last one are plain. The start time
    // is the 22nd of all, proc(5).
    let fields = stat.rsplit(')').next().unwrap_or_default();
    fields
        .split_whitespace()
        .nth(19)
        .and_then(|field| field.parse().ok())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "/proc/self/stat has no start time"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_agent_per_directory() {
        let dir = tempfile::tempdir().unwrap();
        let first = AgentDir::take(dir.path()).unwrap();
        let text = fs::read_to_string(dir.path().join("agent.lock")).unwrap();
        let mut words = text.split_whitespace();
        assert_eq!(words.next(), Some(std::process::id().to_string().as_str()));
        assert!(words.next().unwrap().parse::<u64>().unwrap() > 0);
        let error = AgentDir::take(dir.path()).unwrap_err().to_string();
        assert!(
            error.starts_with("another agent runs in") && error.contains(&std::process::id().to_string()),
            "{error}"
        );
        drop(first);
        AgentDir::take(dir.path()).unwrap();
    }

    #[test]
    fn a_lock_that_is_only_looked_at_does_not_keep_an_agent_out() {
        let dir = tempfile::tempdir().unwrap();
        let probe = File::create(dir.path().join("agent.lock")).unwrap();
        probe.lock().unwrap();
        let path = dir.path().to_owned();
        let taking = std::thread::spawn(move || AgentDir::take(&path).map(drop));
        drop(probe);
        taking.join().unwrap().unwrap();
    }

    #[test]
    fn what_must_outlive_the_process_does() {
        let dir = tempfile::tempdir().unwrap();
        let agent = AgentDir::take(dir.path()).unwrap();
        let (nonce, first) = (agent.nonce().unwrap(), agent.started_at(Timestamp::UNIX_EPOCH).unwrap());
        assert_eq!((nonce.len(), agent.next_run().unwrap()), (64, 1));
        assert_eq!((agent.policy().unwrap(), agent.done().unwrap()), (None, None));
        let policy = Policy { lease_seconds: 600, result_grace_seconds: 3600, sample_seconds: 5, cpu_jobs: 1 };
        keep_enrolment(dir.path(), &policy, &Secret::new("b")).unwrap();
        agent.mark_done(Leave::Lapsed).unwrap();
        drop(agent);

        let agent = AgentDir::take(dir.path()).unwrap();
        assert_eq!(agent.nonce().unwrap(), nonce);
        assert_eq!(agent.started_at(Timestamp::MAX).unwrap(), first);
        assert_eq!(agent.next_run().unwrap(), 2);
        assert_eq!(agent.policy().unwrap(), Some(policy));
        assert_eq!(agent.bearer().unwrap().unwrap().expose(), "b");
        assert_eq!(agent.done().unwrap().as_deref(), Some("lapsed"));
    }

    #[test]
    fn a_broken_bootstrap_is_named() {
        let dir = tempfile::tempdir().unwrap();
        for text in ["", "{}", "<html>"] {
            fs::write(dir.path().join("bootstrap.json"), text).unwrap();
            assert!(read_bootstrap(dir.path()).unwrap_err().to_string().contains("bootstrap.json"));
        }
    }
}
