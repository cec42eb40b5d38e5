//! An instance's directory, and what its files say about the instance.
//!
//! ```text
//! <id>/bootstrap.json   the agent's bootstrap; gone once everything but this directory is cleaned up
//!      placement.json   the arguments of the create call, for later starts and for the clean-up
//!      tags.json        its pool and placement, for a scaler that lost its database
//!      agent.lock       held (flock) by the agent, with `pid starttime` inside
//!      agent.log        what the agent prints; agent.log.1 before that
//!      done             the agent left for good, and why
//!      broken           the agent died too often, and how
//!      destroying       destroy was called: never start an agent here again
//! ```

use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
};

use pilotlight_runtime::{durable, failpoint};
use pilotlight_wire::{InstanceId, agent::Bootstrap};

use crate::{fleet::LocalPlacement, provider::Tags};

/// The most bytes of a mark that are shown.
const MAX_NOTE: u64 = 1024;

/// What there is to say about an instance, by its files alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// No directory.
    Absent,
    /// An agent runs, or is to be started.
    Alive,
    /// No agent will run here again, and why.
    Finished(String),
    /// Being destroyed.
    Leaving,
}

/// The directory of one instance.
#[derive(Clone, Debug)]
pub(super) struct Folder(PathBuf);

impl Folder {
    pub(super) fn new(root: &Path, instance: InstanceId) -> Self {
        Self(root.join(instance.to_string()))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    pub(super) fn bootstrap(&self) -> PathBuf {
        self.0.join("bootstrap.json")
    }

    pub(super) fn lock(&self) -> PathBuf {
        self.0.join("agent.lock")
    }

    pub(super) fn log(&self) -> PathBuf {
        self.0.join("agent.log")
    }

    fn placement_file(&self) -> PathBuf {
        self.0.join("placement.json")
    }

    fn tags_file(&self) -> PathBuf {
        self.0.join("tags.json")
    }

    /// What was written on the instance when it was made. A machine with unreadable tags is listed all the same.
    pub(super) fn tags(&self) -> Option<Tags> {
        serde_json::from_slice(&fs::read(self.tags_file()).ok()?).ok()
    }

    fn broken(&self) -> PathBuf {
        self.0.join("broken")
    }

    fn destroying(&self) -> PathBuf {
        self.0.join("destroying")
    }

    pub(super) fn life(&self) -> io::Result<Life> {
        // Without the bootstrap a destroy has come as far as removing the directory.
        if !exists(&self.bootstrap())? {
            return Ok(if exists(&self.0)? { Life::Leaving } else { Life::Absent });
        }
        if exists(&self.destroying())? {
            return Ok(Life::Leaving);
        }
        for mark in [self.0.join("done"), self.broken()] {
            if let Some(note) = note(&mark)? {
                return Ok(Life::Finished(note));
            }
        }
        Ok(Life::Alive)
    }

    /// Whether everything but the directory itself has been cleaned up.
    pub(super) fn is_cleaned(&self) -> io::Result<bool> {
        Ok(!exists(&self.bootstrap())?)
    }

    pub(super) fn placement(&self) -> io::Result<LocalPlacement> {
        serde_json::from_slice(&fs::read(self.placement_file())?).map_err(io::Error::other)
    }

    /// Writes the files of a new instance into a directory that nobody lists yet.
    pub(super) fn fill(path: &Path, bootstrap: &Bootstrap, placement: &LocalPlacement, tags: &Tags) -> io::Result<()> {
        let folder = Self(path.to_owned());
        durable::write(&folder.bootstrap(), &serde_json::to_vec(bootstrap)?)?;
        failpoint!("scaler.local-create.half-filled");
        durable::write(&folder.placement_file(), &serde_json::to_vec(placement)?)?;
        durable::write(&folder.tags_file(), &serde_json::to_vec(tags)?)
    }

    pub(super) fn mark_broken(&self, note: &str) -> io::Result<()> {
        durable::write(&self.broken(), note.as_bytes())
    }

    /// The mark is empty: it has to fit on a disk that jobs have filled.
    pub(super) fn mark_destroying(&self) -> io::Result<()> {
        durable::write(&self.destroying(), b"")
    }

    /// Removes the directory. The bootstrap is gone by now, durably, so what remains after a crash is still listed
    /// and needs no second clean-up.
    pub(super) fn remove(&self) -> io::Result<()> {
        match fs::remove_dir_all(&self.0) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => durable::sync_parent(&self.0),
        }
    }
}

fn exists(path: &Path) -> io::Result<bool> {
    path.try_exists()
}

/// The first line of a mark; `None` when there is no mark.
fn note(mark: &Path) -> io::Result<Option<String>> {
    let file = match File::open(mark) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mut text = Vec::new();
    file.take(MAX_NOTE).read_to_end(&mut text)?;
    Ok(Some(String::from_utf8_lossy(&text).lines().next().unwrap_or_default().trim().to_owned()))
}
