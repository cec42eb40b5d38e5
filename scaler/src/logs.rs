//! Job logs: one file per job, read while it is written (link 6, design 8).
//!
//! ```text
//! DIR/<job>.log      the job's bytes
//! DIR/<job>.closed   when the log was closed; written after the log's fsync, so a log with this mark is whole
//! ```
//!
//! Open logs are known in memory (size and followers); closed ones are looked up on disk, so that two weeks of
//! finished jobs cost no memory. An append writes at the offset it was checked for and the size moves only after
//! the write, so what a failed append leaves behind is never read and is overwritten by the next.

mod sweep;

use std::{
    collections::HashMap,
    fmt,
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use jiff::Timestamp;
use pilotlight_runtime::{clock::Clock, durable, failpoint};
use pilotlight_wire::{JobId, api::MAX_LOG_ANSWER};
use tokio::{sync::watch, task::spawn_blocking, time::timeout};

/// Why a log cannot be read or closed.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The job has no log: it was never created here, or it was swept.
    #[error("job {0} has no log")]
    Unknown(JobId),
    /// The file system refused.
    #[error("cannot {doing} {}", .path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Why bytes were not appended. The log is as it was.
#[derive(Debug, thiserror::Error)]
pub enum AppendError {
    /// The offset is not the size: the sender goes on from there (409 of link 6).
    #[error("the log has {size} bytes")]
    Offset {
        /// Bytes of the log.
        size: u64,
    },
    /// The log was closed and takes no more.
    #[error("the log is closed with {size} bytes")]
    Closed {
        /// Bytes of the log.
        size: u64,
    },
    /// The log is unknown or its file cannot be written.
    #[error("cannot append")]
    Log(#[from] LogError),
}

/// A piece of a log, and how the log was when it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogSlice {
    /// Bytes from the offset asked for; empty when there are none yet.
    pub bytes: Bytes,
    /// Bytes of the log.
    pub size: u64,
    /// Whether no more will come: offset + bytes = size is then the end.
    pub closed: bool,
}

/// All logs. Cheap to clone.
#[derive(Clone)]
pub struct LogStore(Arc<Shared>);

struct Shared {
    dir: PathBuf,
    clock: Clock,
    free_space: fn(&Path) -> io::Result<u64>,
    open: Mutex<HashMap<JobId, Arc<OpenLog>>>,
}

#[derive(Clone, Copy, Debug)]
struct State {
    size: u64,
    closed: bool,
}

struct OpenLog {
    /// Held over each change of the file.
    writer: Arc<tokio::sync::Mutex<()>>,
    state: watch::Sender<State>,
}

impl OpenLog {
    fn new(size: u64) -> Arc<Self> {
        Arc::new(Self { writer: Arc::default(), state: watch::Sender::new(State { size, closed: false }) })
    }
}

impl fmt::Debug for LogStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LogStore").field("dir", &self.0.dir).finish_non_exhaustive()
    }
}

/// Where a log is.
enum Place {
    Open(Arc<OpenLog>),
    /// Closed, with this many bytes.
    Closed(u64),
}

impl LogStore {
    /// The logs in a directory, which is made when it is missing.
    ///
    /// # Errors
    /// When the directory cannot be made.
    pub fn open(dir: &Path, clock: Clock) -> Result<Self, LogError> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(|source| LogError::Io {
            doing: "make the directory",
            path: dir.to_owned(),
            source,
        })?;
        let free_space = sweep::free_space;
        Ok(Self(Arc::new(Shared { dir: dir.to_owned(), clock, free_space, open: Mutex::default() })))
    }

    /// Makes a job's log known, empty unless it has bytes already. Idempotent; called when a job is accepted and, at
    /// start, for every job that is not finished. Nothing is written before the first append.
    ///
    /// # Errors
    /// When the disk cannot be asked.
    pub async fn create(&self, job: JobId) -> Result<(), LogError> {
        let shared = Arc::clone(&self.0);
        blocking(move || shared.find_or(job, || Ok(Place::Open(OpenLog::new(0))))).await.map(drop)
    }

    /// Appends at `offset`, which has to be the log's size; answers with the new size. The bytes are with the kernel
    /// by then, fsynced before the log is closed. Appends of one job follow one another.
    ///
    /// # Errors
    /// Another offset than the size, a closed or unknown log, and a failed write. The log is as before then.
    pub async fn append(&self, job: JobId, offset: u64, bytes: Bytes) -> Result<u64, AppendError> {
        let log = match self.find(job).await? {
            Place::Open(log) => log,
            Place::Closed(size) => return refuse_closed(size, offset, &bytes),
        };
        let guard = Arc::clone(&log.writer).lock_owned().await;
        let (dir, path) = (self.0.dir.clone(), self.0.log_path(job));
        // The guard moves along: a caller that goes away must not let the next append in while this one writes.
        blocking(move || {
            let _guard = guard;
            let State { size, closed } = *log.state.borrow();
            if closed {
                return refuse_closed(size, offset, &bytes);
            }
            if offset != size {
                return Err(AppendError::Offset { size });
            }
            if !bytes.is_empty() {
                sweep::has_room(&dir, bytes.len()).map_err(io_error("make room for", &path))?;
            }
            write_at(&path, size, &bytes)?;
            let size = size + bytes.len() as u64;
            log.state.send_modify(|state| state.size = size);
            Ok(size)
        })
        .await
    }

    /// Closes a job's log: fsync, then the durable mark; every follower is told. Idempotent. A log that may lack
    /// bytes gets a last line `[pilotlight] notice` that says so. Answers with the final size.
    ///
    /// # Errors
    /// An unknown log; a failed write or fsync, and the log is then still open.
    pub async fn close(&self, job: JobId, notice: Option<&str>) -> Result<u64, LogError> {
        let log = match self.find(job).await? {
            Place::Open(log) => log,
            Place::Closed(size) => return Ok(size),
        };
        let guard = Arc::clone(&log.writer).lock_owned().await;
        let notice = notice.map(|text| format!("[pilotlight] {text}\n"));
        let shared = Arc::clone(&self.0);
        blocking(move || {
            let _guard = guard;
            let State { mut size, closed } = *log.state.borrow();
            if closed {
                return Ok(size);
            }
            let path = shared.log_path(job);
            if let Some(line) = notice {
                size += append_line(&path, size, &line)?;
            }
            let file = open_for_write(&path)?;
            // What a failed append may have left behind the end is not part of the log.
            file.set_len(size).and_then(|()| file.sync_all()).map_err(io_error("sync", &path))?;
            failpoint!("scaler.log-close.unmarked");
            let mark = shared.closed_path(job);
            durable::write(&mark, shared.clock.now().to_string().as_bytes()).map_err(io_error("write", &mark))?;
            log.state.send_replace(State { size, closed: true });
            shared.open().remove(&job);
            Ok(size)
        })
        .await
    }

    /// Reads at most `max` bytes (never more than [`MAX_LOG_ANSWER`]) from `offset`. Where there are none yet, waits up to
    /// `hold` for bytes or for the close; zero does not wait.
    ///
    /// # Errors
    /// An unknown log, and failures to read.
    pub async fn read(&self, job: JobId, offset: u64, max: usize, hold: Duration) -> Result<LogSlice, LogError> {
        let state = match self.find(job).await? {
            Place::Closed(size) => State { size, closed: true },
            Place::Open(log) => {
                let mut news = log.state.subscribe();
                let wanted = news.wait_for(|state| state.closed || state.size > offset);
                let seen = timeout(hold, wanted).await.ok().and_then(Result::ok).map(|state| *state);
                seen.unwrap_or_else(|| *log.state.borrow())
            }
        };
        let len = usize::try_from(state.size.saturating_sub(offset)).unwrap_or(usize::MAX).min(max).min(MAX_LOG_ANSWER);
        let bytes = if len == 0 { Bytes::new() } else { self.read_exact(job, offset, len).await? };
        Ok(LogSlice { bytes, size: state.size, closed: state.closed })
    }

    /// How many bytes a log has, and whether it is closed.
    ///
    /// # Errors
    /// An unknown log, and failures to ask the disk.
    pub async fn size(&self, job: JobId) -> Result<(u64, bool), LogError> {
        Ok(match self.find(job).await? {
            Place::Closed(size) => (size, true),
            Place::Open(log) => {
                let state = *log.state.borrow();
                (state.size, state.closed)
            }
        })
    }

    async fn read_exact(&self, job: JobId, offset: u64, len: usize) -> Result<Bytes, LogError> {
        let path = self.0.log_path(job);
        blocking(move || {
            let file = match File::open(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(LogError::Unknown(job)),
                file => file.map_err(io_error("open", &path))?,
            };
            let mut bytes = vec![0; len];
            file.read_exact_at(&mut bytes, offset).map_err(io_error("read", &path))?;
            Ok(Bytes::from(bytes))
        })
        .await
    }

    async fn find(&self, job: JobId) -> Result<Place, LogError> {
        if let Some(log) = self.0.open().get(&job) {
            return Ok(Place::Open(Arc::clone(log)));
        }
        let shared = Arc::clone(&self.0);
        blocking(move || shared.find_or(job, || Err(LogError::Unknown(job)))).await
    }
}

impl Shared {
    /// Looks in memory, then on disk. The lock is held over both: a log leaves the memory only after its mark is
    /// written, so one that is in neither place is unknown.
    fn find_or(&self, job: JobId, absent: impl FnOnce() -> Result<Place, LogError>) -> Result<Place, LogError> {
        let mut open = self.open();
        if let Some(log) = open.get(&job) {
            return Ok(Place::Open(Arc::clone(log)));
        }
        let (path, mark) = (self.log_path(job), self.closed_path(job));
        let place = match (file_size(&path)?, file_size(&mark)?) {
            (Some(size), Some(_)) => Place::Closed(size),
            (Some(size), None) => Place::Open(OpenLog::new(size)),
            (None, _) => absent()?,
        };
        if let Place::Open(log) = &place {
            open.insert(job, Arc::clone(log));
        }
        Ok(place)
    }

    fn open(&self) -> MutexGuard<'_, HashMap<JobId, Arc<OpenLog>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn log_path(&self, job: JobId) -> PathBuf {
        self.dir.join(format!("{job}.log"))
    }

    fn closed_path(&self, job: JobId) -> PathBuf {
        self.dir.join(format!("{job}.closed"))
    }

    /// When a log was closed.
    fn closed_at(&self, job: JobId) -> Result<Timestamp, LogError> {
        let path = self.closed_path(job);
        let text = fs::read_to_string(&path).map_err(io_error("read", &path))?;
        let parsed = text.trim().parse().map_err(io::Error::other);
        parsed.map_err(io_error("understand the time in", &path))
    }
}

fn refuse_closed(size: u64, offset: u64, bytes: &Bytes) -> Result<u64, AppendError> {
    match (offset == size, bytes.is_empty()) {
        (true, true) => Ok(size),
        (true, false) => Err(AppendError::Closed { size }),
        (false, _) => Err(AppendError::Offset { size }),
    }
}

/// Writes all bytes at the end, or none: a partial write (a full disk) is cut off again.
fn write_at(path: &Path, end: u64, bytes: &[u8]) -> Result<(), LogError> {
    if bytes.is_empty() {
        return Ok(());
    }
    let file = open_for_write(path)?;
    file.write_all_at(bytes, end).map_err(|error| {
        if let Err(error) = file.set_len(end) {
            tracing::warn!(path = %path.display(), %error, "cannot cut off a partial write; the next one covers it");
        }
        io_error("write", path)(error)
    })
}

/// Appends a line of its own: after a newline where the last line has none, and not twice. Answers how much longer
/// the file is.
fn append_line(path: &Path, end: u64, line: &str) -> Result<u64, LogError> {
    let wanted = format!("\n{line}");
    let mut tail = vec![0; usize::try_from(end).unwrap_or(usize::MAX).min(wanted.len())];
    if !tail.is_empty() {
        let file = File::open(path).map_err(io_error("open", path))?;
        let start = end - tail.len() as u64;
        file.read_exact_at(&mut tail, start).map_err(io_error("read", path))?;
    }
    // A close that failed after this point, or a scaler that died there, has left the line already.
    if tail == wanted.as_bytes() || tail == line.as_bytes() {
        return Ok(0);
    }
    let text = if matches!(tail.last(), None | Some(b'\n')) { line } else { &wanted };
    write_at(path, end, text.as_bytes())?;
    Ok(text.len() as u64)
}

fn open_for_write(path: &Path) -> Result<File, LogError> {
    let opened = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path);
    opened.map_err(io_error("open", path))
}

fn file_size(path: &Path) -> Result<Option<u64>, LogError> {
    match fs::metadata(path) {
        Ok(metadata) => Ok(Some(metadata.len())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(io_error("look at", path)(error)),
    }
}

fn io_error<'a>(doing: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> LogError + 'a {
    move |source| LogError::Io { doing, path: path.to_owned(), source }
}

/// Runs on a thread that may block. A panic in there goes on in the caller.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match spawn_blocking(work).await {
        Ok(value) => value,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // A blocking task is cancelled only when the runtime ends, and then nobody waits for this.
            Err(_cancelled) => std::future::pending().await,
        },
    }
}

#[cfg(test)]
mod tests;
