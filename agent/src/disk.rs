//! Writing down what happened when the disk is full.
//!
//! Jobs fill disks. An agent that could not write a job's last event then could never delete that job's spool either,
//! and the disk would stay full for ever. So a small file holds room for a few hundred events, and goes when they need
//! it.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use pilotlight_runtime::Report;
use tokio::task::spawn_blocking;
use tracing::warn;

const RESERVE: usize = 2 * 1024 * 1024;

/// How long a full disk is waited for, by the job's output and by the agent itself: a job must not die of a disk that
/// somebody is about to clean.
const FULL_DISK: Duration = Duration::from_secs(600);

/// How often a full disk is tried again.
pub(crate) const FULL_DISK_RETRY: Duration = Duration::from_millis(500);

/// The one variable that shortens the wait, in seconds. For tests: nobody who runs jobs wants it shorter.
const PATIENCE_VARIABLE: &str = "PILOTLIGHT_FULL_DISK_SECONDS";

/// How long a full disk is waited for.
pub(crate) fn full_disk_patience() -> Duration {
    let seconds = std::env::var(PATIENCE_VARIABLE).ok().and_then(|text| text.parse().ok());
    seconds.map_or(FULL_DISK, Duration::from_secs)
}

/// Keeps room in the agent's directory. On a disk that is full already there is none to keep.
pub(crate) async fn reserve(agent_dir: &Path) {
    let path = reserve_file(agent_dir);
    let kept = spawn_blocking(move || {
        if path.exists() {
            return Ok(());
        }
        let written = File::create(&path).and_then(|mut file| {
            // Real blocks: a sparse file keeps nothing.
            file.write_all(&vec![0; RESERVE])?;
            file.sync_all()
        });
        written.inspect_err(|_| drop(fs::remove_file(&path)))
    });
    if let Ok(Err(error)) = kept.await {
        warn!(error = %Report(&error), "no room kept on the disk");
    }
}

/// Does file work off the calling task's thread and to its end. When the disk is full it is done again in the room that
/// was kept, and when that is used up until there is room, so it must be fit to be repeated.
///
/// # Errors
/// Those of the work.
pub(crate) async fn blocking<T: Send + 'static>(
    agent_dir: &Path,
    work: impl Fn() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let agent_dir = agent_dir.to_owned();
    spawn_blocking(move || patiently(&agent_dir, full_disk_patience(), work)).await?
}

/// Does file work; see [`blocking`].
///
/// # Errors
/// Those of the work; that the disk is full only after the patience.
pub(crate) fn patiently<T>(
    agent_dir: &Path,
    patience: Duration,
    mut work: impl FnMut() -> io::Result<T>,
) -> io::Result<T> {
    let reserve = reserve_file(agent_dir);
    let mut waited = Duration::ZERO;
    loop {
        match work() {
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                if fs::remove_file(&reserve).is_ok() {
                    warn!("the disk is full; using the room that was kept");
                } else if waited < patience {
                    if waited.is_zero() {
                        warn!("the disk is full; waiting for room");
                    }
                    std::thread::sleep(FULL_DISK_RETRY);
                    waited += FULL_DISK_RETRY;
                } else {
                    return Err(error);
                }
            }
            result => return result,
        }
    }
}

fn reserve_file(agent_dir: &Path) -> PathBuf {
    agent_dir.join("reserve")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test]
    async fn a_full_disk_has_room_for_what_happened() {
        let dir = tempfile::tempdir().unwrap();
        reserve(dir.path()).await;
        let file = reserve_file(dir.path());
        assert_eq!(fs::metadata(&file).unwrap().len(), RESERVE as u64);

        static TRIES: AtomicUsize = AtomicUsize::new(0);
        let full = {
            let file = file.clone();
            move || {
                TRIES.fetch_add(1, Ordering::Relaxed);
                if file.exists() { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
            }
        };
        blocking(dir.path(), full).await.unwrap();
        assert_eq!(TRIES.load(Ordering::Relaxed), 2);
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        let mut tries = 0;
        let freed = patiently(dir.path(), FULL_DISK_RETRY * 2, || {
            tries += 1;
            if tries < 3 { Err(full()) } else { Ok(tries) }
        });
        assert_eq!(freed.unwrap(), 3, "it is waited for");
        let still_full = patiently(dir.path(), FULL_DISK_RETRY, || Err::<(), _>(full()));
        assert_eq!(still_full.unwrap_err().kind(), io::ErrorKind::StorageFull, "and then it is an error");
        reserve(dir.path()).await;
        assert!(file.exists(), "kept again once there is room");
    }
}
