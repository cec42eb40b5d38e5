//! Assignments on disk: the one small file that makes an assignment exist on this machine (link 3).

use std::{fs, io, path::Path, time::Duration};

use jiff::{SignedDuration, Timestamp};
use pilotlight_runtime::{durable, failpoint};
use pilotlight_wire::{
    AssignmentId,
    agent::{AssignmentEvent, Start},
};
use serde::{Deserialize, Serialize};

use crate::{job::AssignmentDir, outbox};

/// A moment on both clocks. Only the dispatcher reads clocks; everything else is given one of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// Since boot, suspend included (`CLOCK_BOOTTIME`).
    pub boot: Duration,
    /// Wall time.
    pub wall: Timestamp,
}

/// When a job must be over. Kept on the boot clock, which nobody can step, with the boot that it counts in; after a
/// reboot wall time is the best that is left (link 3).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deadline {
    /// The kernel's id of the boot that `boot_ms` counts from.
    pub boot_id: String,
    /// Milliseconds since that boot.
    pub boot_ms: u64,
    /// The same moment in wall time.
    pub wall: Timestamp,
}

impl Deadline {
    /// The deadline of a job that has `remaining` left.
    #[must_use]
    pub fn after(now: Moment, boot_id: &str, remaining: Duration) -> Self {
        let boot = now.boot.saturating_add(remaining);
        Self {
            boot_id: boot_id.to_owned(),
            boot_ms: u64::try_from(boot.as_millis()).unwrap_or(u64::MAX),
            wall: now
                .wall
                .saturating_add(SignedDuration::try_from(remaining).unwrap_or(SignedDuration::MAX))
                .unwrap_or(Timestamp::MAX),
        }
    }

    /// What is left of it; zero when it has passed.
    #[must_use]
    pub fn remaining(&self, now: Moment, boot_id: &str) -> Duration {
        if self.boot_id == boot_id {
            Duration::from_millis(self.boot_ms).saturating_sub(now.boot)
        } else {
            Duration::try_from(self.wall.duration_since(now.wall)).unwrap_or(Duration::ZERO)
        }
    }
}

/// What `assignment.json` holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Record {
    /// A job was handed to this machine.
    Started {
        /// What to run, as it came.
        start: Box<Start>,
        /// When it must be over.
        deadline: Deadline,
    },
    /// It was cancelled before it arrived; a later `Start` is ignored (link 3).
    NeverArrived,
}

/// One assignment as a starting agent finds it.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// The assignment.
    pub id: AssignmentId,
    /// Its file.
    pub record: Record,
    /// Every event that it ever had, by number from 1.
    pub events: Vec<AssignmentEvent>,
    /// How many of them the scaler has acknowledged.
    pub acked: u64,
}

/// Makes an assignment exist: its directories and its file, durable when this returns.
///
/// # Errors
/// When any of it cannot be written; the assignment then does not exist.
pub fn create(agent_dir: &Path, id: AssignmentId, record: &Record) -> io::Result<()> {
    let dir = AssignmentDir::new(agent_dir, id);
    fs::create_dir_all(dir.events())?;
    // The names of all three levels; `durable::write` does the last.
    durable::sync_parent(dir.path())?;
    durable::sync_parent(&agent_dir.join("assignments"))?;
    failpoint!("agent.assignment.half-filed");
    durable::write(&dir.file(), &serde_json::to_vec(record)?)?;
    failpoint!("agent.assignment.filed");
    Ok(())
}

/// Ends an assignment's existence: the file first, so that a crash in between leaves only rubbish, then the rest.
///
/// # Errors
/// When something cannot be removed.
pub fn remove(agent_dir: &Path, id: AssignmentId) -> io::Result<()> {
    let dir = AssignmentDir::new(agent_dir, id);
    failpoint!("agent.assignment.over");
    durable::remove(&dir.file())?;
    failpoint!("agent.assignment.half-removed");
    match fs::remove_dir_all(dir.path()) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    failpoint!("agent.assignment.removed");
    Ok(())
}

/// Finds every assignment of an agent's directory, and removes what [`create`] or [`remove`] left half done.
///
/// # Errors
/// When a directory or file cannot be read or understood: an assignment that is not understood must not be taken for
/// one that is not there.
pub fn load(agent_dir: &Path) -> io::Result<Vec<Found>> {
    let entries = match fs::read_dir(agent_dir.join("assignments")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let dir = AssignmentDir::new(agent_dir, id);
        let record = match fs::read(dir.file()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                fs::remove_dir_all(dir.path())?;
                continue;
            }
            bytes => serde_json::from_slice(&bytes?).map_err(|error| unreadable(&dir.file(), &error))?,
        };
        let (events, acked) = outbox::load(&dir)?;
        found.push(Found { id, record, events, acked });
    }
    Ok(found)
}

pub(crate) fn unreadable(path: &Path, error: &dyn std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(boot: u64, wall: i64) -> Moment {
        Moment { boot: Duration::from_secs(boot), wall: Timestamp::from_second(wall).unwrap() }
    }

    #[test]
    fn a_deadline_follows_the_boot_clock_and_after_a_reboot_wall_time() {
        let deadline = Deadline::after(at(100, 5000), "a", Duration::from_secs(60));
        assert_eq!(
            deadline.remaining(at(110, 999_999), "a"),
            Duration::from_secs(50),
            "a stepped clock changes nothing"
        );
        assert_eq!(deadline.remaining(at(160, 5000), "a"), Duration::ZERO);
        assert_eq!(deadline.remaining(at(3, 5020), "b"), Duration::from_secs(40), "another boot: wall time");
        assert_eq!(deadline.remaining(at(3, 6000), "b"), Duration::ZERO);
    }

    #[test]
    fn half_made_and_half_removed_directories_are_no_assignments() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(load(dir.path()).unwrap(), []);
        let id = "018f0000-0000-7000-8000-000000000001".parse().unwrap();
        create(dir.path(), id, &Record::NeverArrived).unwrap();
        let found = load(dir.path()).unwrap();
        assert_eq!(found, [Found { id, record: Record::NeverArrived, events: vec![], acked: 0 }]);
        let place = AssignmentDir::new(dir.path(), id);
        fs::remove_file(place.file()).unwrap();
        assert_eq!(load(dir.path()).unwrap(), []);
        assert!(!place.path().exists());
    }

    #[test]
    fn a_file_that_is_not_understood_stops_the_agent() {
        let dir = tempfile::tempdir().unwrap();
        let id = "018f0000-0000-7000-8000-000000000001".parse().unwrap();
        create(dir.path(), id, &Record::NeverArrived).unwrap();
        fs::write(AssignmentDir::new(dir.path(), id).file(), "{").unwrap();
        assert_eq!(load(dir.path()).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
