//! The attach process: a small program of its own that holds on to one container's output (link 5).
//!
//! It is not the agent: an agent that is killed or upgraded loses no byte. It speaks to Docker with blocking calls on
//! the socket itself, which keeps it at a few MiB and at the speed of the pipe. It appends stdout and stderr to the
//! spool in the order in which Docker sends them, and ends at the end of the stream or when the container is removed.

mod docker;
mod spool;

use std::{
    fs::{File, TryLockError},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Args;
use jiff::{SignedDuration, Timestamp};
use pilotlight_runtime::{
    clock::{Clock, boottime},
    failpoint,
};
use pilotlight_wire::AssignmentId;

use self::{
    docker::{Api, Look, holds_its_streams, is_seen},
    spool::Spool,
};
use crate::job::AssignmentDir;

/// What the agent reads once Docker has attached.
pub const READY: &str = "ready";

/// What stands last in the lock once the stream has ended with its container.
pub(crate) const END: &str = "end\n";

/// What stands before that when Docker was not there at the end of the stream: nobody has seen how the container ended.
pub(crate) const AWAY: &str = "away\n";

/// What stands behind the pid from the beginning when output may be missing already.
pub(crate) const GAPPED: &str = "gap\n";

/// What stands before the end when the disk was too full for all output, with how many bytes the spool does not tell.
pub(crate) const LOST: &str = "lost ";

/// The line that marks where output may be missing.
pub const GAP: &str = "output may be missing here: the process that read it was gone for a while";

/// How often a silent stream is left to look at the container and the clock.
const GLANCE: Duration = Duration::from_secs(2);

/// How long after the end of its streams Docker may know of a container's end, and how far apart the two may seem.
const END_KNOWN: Duration = Duration::from_secs(10);
/// The same where the first process cannot be seen: it is gone, or in a place of Docker's own.
const END_UNSEEN: Duration = Duration::from_secs(2);
const END_SLACK: SignedDuration = SignedDuration::from_millis(500);
const END_PAUSE: Duration = Duration::from_millis(20);

/// How long a Docker that does not answer at the end of a stream is asked again.
const DOCKER_BACK: Duration = Duration::from_secs(600);

/// An answer that took longer may be another dockerd's than the one that ended the stream.
const PROMPT: Duration = Duration::from_millis(100);

/// How often and how long apart the lock is tried.
const LOCK_TRIES: u32 = 20;
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// Arguments of `pilotlight-agent attach`.
#[derive(Args, Clone, Debug)]
pub struct AttachArgs {
    /// The agent's directory
    #[arg(long)]
    pub dir: PathBuf,
    /// The assignment
    #[arg(long)]
    pub assignment: AssignmentId,
    /// The container's name
    #[arg(long)]
    pub container: String,
    /// Docker's socket
    #[arg(long)]
    pub socket: PathBuf,
    /// Bytes of log kept
    #[arg(long)]
    pub max_log: u64,
    /// Seconds since boot at which the container is killed, whoever else is gone
    #[arg(long)]
    pub kill_at: u64,
    /// An earlier attach process died while the container ran
    #[arg(long)]
    pub resume: bool,
}

/// Why the attach process ended early.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// Another one has this assignment.
    #[error("another attach process holds {}", .0.display())]
    Taken(PathBuf),
    /// A file of the assignment.
    #[error("cannot use {}", .path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Docker.
    #[error("cannot attach to container {container}")]
    Docker {
        /// Which.
        container: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The agent that waits for `ready` is gone.
    #[error("cannot say that it is ready")]
    Ready(#[source] io::Error),
}

/// Holds on to a container's output until it ends.
///
/// # Errors
/// When it cannot begin, or the stream breaks while the container is there.
pub fn run(args: &AttachArgs) -> Result<(), AttachError> {
    // A leader of a group already has what a new session is for.
    let _leads_already = rustix::process::setsid();
    // The kernel should end the job before what keeps its output; only root may ask for that.
    let _not_root = std::fs::write("/proc/self/oom_score_adj", "-1000");
    let dir = AssignmentDir::new(&args.dir, args.assignment);
    let mut lock = lock(&dir.attach_lock())?;
    failpoint!("attach.lock.taken");
    let path = dir.spool();
    let mut spool =
        Spool::open(&path, args.max_log).map_err(|source| AttachError::File { path: path.clone(), source })?;
    if args.resume {
        lock.write_all(GAPPED.as_bytes()).map_err(|source| AttachError::File { path: dir.attach_lock(), source })?;
    }
    let docker = |source| AttachError::Docker { container: args.container.clone(), source };
    let api = Api::new(&args.socket);
    let mut stream = api.attach(&args.container, GLANCE).map_err(docker)?;
    if args.resume {
        spool.notice(GAP);
    }
    failpoint!("attach.ready.unsaid");
    writeln!(io::stdout(), "{READY}").and_then(|()| io::stdout().flush()).map_err(AttachError::Ready)?;

    failpoint!("attach.ready.said");

    let mut frames = Frames::default();
    let mut killed = false;
    let mut glanced = boottime();
    let end = loop {
        let mut silent = false;
        match stream.read(frames.space()) {
            // Measured: a dockerd that is stopped or killed closes the stream like a container that ends.
            Ok(0) => break last_word(&api, &args.container),
            Ok(read) => frames.take_in(read, |bytes| spool.append(bytes)),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => silent = true,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(source) => return Err(docker(source)),
        }
        let now = boottime();
        if now.saturating_sub(glanced) < GLANCE {
            continue;
        }
        glanced = now;
        if !killed && now.as_secs() >= args.kill_at {
            tracing::warn!(container = args.container, "the job outlived its deadline and its agent; killed");
            killed = api.kill(&args.container).is_ok();
        }
        // Measured: an attach to a container that was removed before its start hangs for ever. What a container that
        // was removed later has written is read to its end first.
        if silent && api.is_removed(&args.container) {
            break END.to_owned();
        }
    };
    let lost = spool.finish().map_or_else(String::new, |bytes| format!("{LOST}{bytes}\n"));
    // Tells an end from a death; where it cannot be written, the agent takes the one for the other and says so.
    let _full_disk = lock.write_all(format!("{lost}{end}").as_bytes());
    failpoint!("attach.end.marked");
    Ok(())
}

/// What to write down of a stream that has ended. Docker knows of a container's end only a moment after its streams', so
/// the first process is looked at, where it can be seen: while that lives and is not on its way out, it is the connection
/// that broke. A Docker that does not answer is waited for, and one that answers late may be the next: then the agent
/// finds out how the container ended.
fn last_word(api: &Api, container: &str) -> String {
    let (ended, wall) = (boottime(), Clock::system(Timestamp::MIN).now());
    let (mut missed, mut late) = (false, false);
    let end = loop {
        let asked = boottime();
        let look = api.look(container);
        let answered = boottime();
        late |= answered.saturating_sub(asked) > PROMPT;
        let waited = answered.saturating_sub(ended);
        // One that ran on without a reader may have written more.
        let slack = if missed { SignedDuration::ZERO } else { END_SLACK };
        match look {
            Ok(Look::Absent) => break if missed { "" } else { END },
            Ok(Look::Over { at }) => break if at.is_some_and(|at| at.duration_since(wall) > slack) { "" } else { END },
            Ok(Look::Alive { pid }) if holds_its_streams(pid) => break "",
            Ok(Look::Alive { pid }) if waited >= if is_seen(pid) { END_KNOWN } else { END_UNSEEN } => break "",
            Ok(Look::Alive { .. }) => {}
            Err(_) if waited >= DOCKER_BACK => break "",
            Err(_) => missed = true,
        }
        std::thread::sleep(END_PAUSE);
    };
    format!("{}{end}", if missed || late { AWAY } else { "" })
}

/// Marks that output may be missing at the end of a spool whose attach process is dead.
///
/// # Errors
/// When the spool cannot be written.
pub(crate) fn mark_gap(dir: &AssignmentDir) -> io::Result<()> {
    Spool::open(&dir.spool(), u64::MAX)?.notice_at_once(GAP)
}

/// Says at the end of a spool how many bytes its attach process had no room for.
///
/// # Errors
/// When the spool cannot be written.
pub(crate) fn mark_lost(dir: &AssignmentDir, bytes: u64) -> io::Result<()> {
    Spool::open(&dir.spool(), u64::MAX)?.notice_at_once(&spool::dropped(bytes))
}

/// Holds the lock with our pid inside; the second one of an assignment has no business.
fn lock(path: &Path) -> Result<File, AttachError> {
    let failed = |source| AttachError::File { path: path.to_owned(), source };
    let mut file = File::options().create(true).truncate(false).read(true).write(true).open(path).map_err(failed)?;
    let mut tries = LOCK_TRIES;
    loop {
        match file.try_lock() {
            Ok(()) => break,
            // The agent looks whether we live by trying the lock itself, for a moment.
            Err(TryLockError::WouldBlock) if tries > 0 => std::thread::sleep(LOCK_PAUSE),
            Err(TryLockError::WouldBlock) => return Err(AttachError::Taken(path.to_owned())),
            Err(TryLockError::Error(source)) => return Err(failed(source)),
        }
        tries -= 1;
    }
    file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id())).map_err(failed)?;
    Ok(file)
}

/// Takes Docker's stream apart: frames of a kind, three zeros, a length (big endian) and as many bytes.
struct Frames {
    buffer: Box<[u8]>,
    /// Bytes in the buffer that are not handed on: the beginning of a header.
    held: usize,
    /// Bytes of the present frame that are still to come.
    left: usize,
}

const HEADER: usize = 8;
const BUFFER: usize = 256 * 1024;

impl Default for Frames {
    fn default() -> Self {
        Self { buffer: vec![0; BUFFER].into_boxed_slice(), held: 0, left: 0 }
    }
}

impl Frames {
    fn space(&mut self) -> &mut [u8] {
        &mut self.buffer[self.held..]
    }

    /// Hands on the bytes of every frame in what was read. They are moved together first, so that many small frames
    /// become one write.
    fn take_in(&mut self, read: usize, mut hand_on: impl FnMut(&[u8])) {
        let end = self.held + read;
        let (mut from, mut to) = (0, 0);
        while from < end {
            if self.left == 0 {
                let Some(header) = self.buffer.get(from..from + HEADER).filter(|_| from + HEADER <= end) else { break };
                let len = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
                self.left = usize::try_from(len).unwrap_or(usize::MAX);
                from += HEADER;
                continue;
            }
            let len = self.left.min(end - from);
            self.buffer.copy_within(from..from + len, to);
            (from, to, self.left) = (from + len, to + len, self.left - len);
        }
        if to > 0 {
            hand_on(&self.buffer[..to]);
        }
        self.buffer.copy_within(from..end, 0);
        self.held = end - from;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(bytes: &[u8]) -> Vec<u8> {
        let mut frame = vec![1, 0, 0, 0];
        frame.extend(u32::try_from(bytes.len()).unwrap().to_be_bytes());
        frame.extend(bytes);
        frame
    }

    #[test]
    fn frames_come_out_whole_however_they_are_cut() {
        let parts: Vec<Vec<u8>> =
            (b'a'..=b'z').chain(b'A'..=b'Z').enumerate().map(|(n, byte)| vec![byte; n * 7]).collect();
        let stream: Vec<u8> = parts.iter().flat_map(|part| frame(part)).collect();
        let want: Vec<u8> = parts.concat();
        for cut in [1, 2, 3, 7, 8, 9, 64, 1000, stream.len()] {
            let mut frames = Frames::default();
            let mut got = Vec::new();
            for piece in stream.chunks(cut) {
                frames.space()[..piece.len()].copy_from_slice(piece);
                frames.take_in(piece.len(), |bytes| got.extend_from_slice(bytes));
            }
            assert_eq!(got, want, "cut into pieces of {cut}");
            assert_eq!((frames.held, frames.left), (0, 0));
        }
    }

    #[test]
    fn a_second_attach_of_an_assignment_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("attach.lock");
        let held = lock(&path).unwrap();
        assert!(matches!(lock(&path), Err(AttachError::Taken(_))));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{}\n", std::process::id()));
        drop(held);
        lock(&path).unwrap();
    }
}
