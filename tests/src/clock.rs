//! A clock that a test sets, for the programs that it chooses: libfaketime, preloaded.
//!
//! Only the wall clock moves: what counts on the monotonic or the boot clock is not told, as when somebody sets a
//! machine's clock.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use tempfile::TempDir;

/// A wall clock, offset from the real one. Programs follow it at once.
#[derive(Debug)]
pub struct FakeClock {
    dir: TempDir,
    library: PathBuf,
}

impl FakeClock {
    /// A clock that is right.
    ///
    /// # Errors
    /// When libfaketime is missing: these tests need it and do not skip.
    pub fn new() -> Result<Self> {
        let clock = Self { dir: tempfile::Builder::new().prefix("plt-clock-").tempdir()?, library: library()? };
        clock.set(0)?;
        Ok(clock)
    }

    /// Sets it so many seconds before or after the right time.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn set(&self, seconds: i64) -> Result<()> {
        self.write(&format!("{seconds:+}"))
    }

    fn write(&self, text: &str) -> Result<()> {
        // Renamed into its place: a program that looks in between sees the one or the other.
        let new = self.dir.path().join("offset.new");
        fs::write(&new, text)?;
        Ok(fs::rename(new, self.offset())?)
    }

    /// Lets all clocks of a program that runs in [`FakeClock::env_of_all`], and what it waits for, go so many times as
    /// fast.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn hurry(&self, times: u32) -> Result<()> {
        self.write(&format!("+0 x{times}"))
    }

    /// The environment of a program that goes by this clock with all its clocks.
    pub fn env_of_all(&self) -> impl Iterator<Item = (&'static str, String)> {
        self.env().into_iter().filter(|(name, _)| *name != "FAKETIME_DONT_FAKE_MONOTONIC")
    }

    /// The environment of a program that goes by this clock.
    #[must_use]
    pub fn env(&self) -> [(&'static str, String); 5] {
        [
            ("LD_PRELOAD", self.library.display().to_string()),
            ("FAKETIME_TIMESTAMP_FILE", self.offset().display().to_string()),
            ("FAKETIME_NO_CACHE", "1".to_owned()),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
            ("NO_FAKE_STAT", "1".to_owned()),
        ]
    }

    /// A script that runs `program` by this clock.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn wrap(&self, program: &Path) -> Result<PathBuf> {
        let env: Vec<String> = self.env().iter().map(|(name, value)| format!("{name}='{value}'")).collect();
        script(&self.dir.path().join("wrapped"), &format!("exec env {} {:?} \"$@\"", env.join(" "), program))
    }

    fn offset(&self) -> PathBuf {
        self.dir.path().join("offset")
    }
}

/// Writes a shell script.
///
/// # Errors
/// When it cannot be written.
pub fn script(path: &Path, text: &str) -> Result<PathBuf> {
    fs::write(path, format!("#!/bin/sh\n{text}\n"))?;
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    Ok(path.to_owned())
}

/// Where the distributions have it.
fn library() -> Result<PathBuf> {
    let name = "faketime/libfaketimeMT.so.1";
    let mut places = vec![PathBuf::from("/usr/lib"), PathBuf::from("/usr/lib64")];
    places.extend(fs::read_dir("/usr/lib")?.flatten().map(|entry| entry.path()));
    let found = places.into_iter().map(|place| place.join(name)).find(|path| path.exists());
    found.context("libfaketime: packaging/scripts/tools.sh installs what these tests need")
}

/// A program that is killed leaves what libfaketime shared in its name.
fn sweep() {
    for entry in fs::read_dir("/dev/shm").into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid = ["faketime_shm_", "sem.faketime_sem_"].iter().find_map(|prefix| name.strip_prefix(prefix));
        if pid.and_then(|pid| pid.parse().ok()).is_some_and(|pid| !crate::site::alive(pid)) {
            let _gone_already = fs::remove_file(entry.path());
        }
    }
}

impl Drop for FakeClock {
    fn drop(&mut self) {
        sweep();
    }
}
