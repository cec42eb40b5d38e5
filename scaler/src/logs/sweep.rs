//! Old logs go: those kept long enough, and the oldest while the disk is nearly full. Never an open one.

use std::{fs, io, path::Path, sync::Arc, time::Duration};

use jiff::{SignedDuration, Timestamp};
use pilotlight_runtime::{Report, durable};
use pilotlight_wire::JobId;

use super::{LogError, LogStore, Shared, blocking, io_error};

/// Below this much free space finished logs go before their time, bytes (design 2).
const MIN_FREE: u64 = 1 << 30;

/// What logs leave free for the store, bytes: a scaler that cannot write down what it does can end no machine. On a small
/// disk it is a sixteenth.
const STORE_ROOM: u64 = 64 << 20;

/// Whether a log may take so many bytes more.
pub(super) fn has_room(dir: &Path, bytes: usize) -> io::Result<()> {
    let stat = rustix::fs::statvfs(dir)?;
    let size = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
    let left = size(stat.f_bavail).saturating_sub(bytes as u64);
    if left >= STORE_ROOM.min(size(stat.f_blocks) / 16) { Ok(()) } else { Err(io::ErrorKind::StorageFull.into()) }
}

/// Free bytes for this process on the file system of a path.
pub(super) fn free_space(path: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(path)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

impl LogStore {
    /// Deletes the finished logs that were kept for as long as `keep`, and then the oldest finished ones while less than 1 GiB
    /// is free. Answers how many went. One that cannot be deleted is logged and left for the next time.
    ///
    /// # Errors
    /// When the directory or the free space cannot be read.
    pub async fn sweep(&self, keep: Duration) -> Result<usize, LogError> {
        let shared = Arc::clone(&self.0);
        blocking(move || shared.sweep(keep)).await
    }
}

impl LogStore {
    /// Lets the finished logs be kept for longer: the clock has skipped so much time.
    ///
    /// # Errors
    /// When the directory cannot be read or a mark not be written; the others may be done.
    pub async fn keep_longer(&self, by: SignedDuration) -> Result<(), LogError> {
        let shared = Arc::clone(&self.0);
        blocking(move || {
            for (closed_at, job) in shared.finished()? {
                let mark = shared.closed_path(job);
                let later = closed_at.saturating_add(by).unwrap_or(Timestamp::MAX);
                durable::write(&mark, later.to_string().as_bytes()).map_err(io_error("write", &mark))?;
            }
            Ok(())
        })
        .await
    }
}

impl Shared {
    fn sweep(&self, keep: Duration) -> Result<usize, LogError> {
        let now = self.clock.now();
        let mut removed = 0;
        for (closed_at, job) in self.finished()? {
            let kept_until = closed_at.saturating_add(keep).unwrap_or(Timestamp::MAX);
            if now < kept_until && self.free()? >= MIN_FREE {
                break;
            }
            match self.remove(job) {
                Ok(()) => removed += 1,
                Err(error) => tracing::warn!(%job, error = %Report(&error), "cannot delete a log"),
            }
        }
        Ok(removed)
    }

    fn free(&self) -> Result<u64, LogError> {
        (self.free_space)(&self.dir).map_err(io_error("ask for free space in", &self.dir))
    }

    /// The closed logs, oldest first.
    fn finished(&self) -> Result<Vec<(Timestamp, JobId)>, LogError> {
        let mut finished = Vec::new();
        for entry in fs::read_dir(&self.dir).map_err(io_error("list", &self.dir))? {
            let name = entry.map_err(io_error("list", &self.dir))?.file_name();
            let Some(job) = name.to_str().and_then(|name| name.strip_suffix(".closed")?.parse().ok()) else { continue };
            match self.closed_at(job) {
                Ok(closed_at) => finished.push((closed_at, job)),
                Err(error) => tracing::warn!(%job, error = %Report(&error), "a closed log of unknown age is kept"),
            }
        }
        finished.sort_unstable();
        Ok(finished)
    }

    /// The log first, durably, its mark last: a crash in between must not leave a log that looks open.
    fn remove(&self, job: JobId) -> Result<(), LogError> {
        let (log, mark) = (self.log_path(job), self.closed_path(job));
        durable::remove(&log).map_err(io_error("remove", &log))?;
        fs::remove_file(&mark).map_err(io_error("remove", &mark))
    }
}
