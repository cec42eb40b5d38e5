//! Writing down what happened when the disk is full.
//!
//! Jobs fill disks. An agent that could not write a job's last event then could never delete that job's spool either,
//! and the disk would stay full for ever. So a small file holds room for a few hundred events, and goes when they need
//! it.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use pilotlight_runtime::Report;
use tokio::task::spawn_blocking;
use tracing::warn;

const RESERVE: usize = 2 * 1024 * 1024;

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

/// Does file work off the calling task's thread and to its end. When the disk is full it is done once more in the room
/// that was kept, so it must be fit to be repeated.
///
/// # Errors
/// Those of the work.
pub(crate) async fn blocking<T: Send + 'static>(
    agent_dir: &Path,
    work: impl Fn() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let reserve = reserve_file(agent_dir);
    spawn_blocking(move || match work() {
        Err(error) if error.kind() == io::ErrorKind::StorageFull && fs::remove_file(&reserve).is_ok() => {
            warn!("the disk is full; using the room that was kept");
            work()
        }
        result => result,
    })
    .await?
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
        let still_full = blocking(dir.path(), || Err::<(), _>(io::ErrorKind::StorageFull.into())).await;
        assert_eq!(still_full.unwrap_err().kind(), io::ErrorKind::StorageFull, "and then it is an error");
        reserve(dir.path()).await;
        assert!(file.exists(), "kept again once there is room");
    }
}
