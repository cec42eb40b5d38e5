//! Small disks of a test's own, to be filled.

use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use crate::site::alive;

/// What the directories are called in which disks are mounted, followed by the test's pid.
pub(crate) const PREFIX: &str = "pilotlight-test-";

/// A file system in memory, mounted at a directory. Unmounted when it is dropped.
#[derive(Debug)]
pub struct Disk {
    path: PathBuf,
}

impl Disk {
    /// Mounts one at a directory beneath a site's, which is made.
    ///
    /// # Errors
    /// When it cannot be mounted; that takes root.
    pub fn mount(path: &Path, size: &str) -> Result<Self> {
        sweep()?;
        fs::create_dir_all(path)?;
        run(Command::new("mount")
            .args(["-t", "tmpfs", "-o"])
            .arg(format!("size={size},mode=700"))
            .arg("tmpfs")
            .arg(path))?;
        Ok(Self { path: path.to_owned() })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes it larger or smaller.
    ///
    /// # Errors
    /// When it is too full for that.
    pub fn resize(&self, size: &str) -> Result<()> {
        run(Command::new("mount").arg("-o").arg(format!("remount,size={size}")).arg(&self.path))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _best_effort = unmount(&self.path);
    }
}

/// Fills a disk of which a directory is given, and leaves so many bytes.
///
/// # Errors
/// When that fails for another reason than a full disk.
pub fn fill(dir: &Path, leave: u64) -> Result<()> {
    let mut file = File::create(filler(dir))?;
    let block = vec![1; 64 * 1024];
    let mut size = 0;
    for len in [block.len(), 4096] {
        loop {
            match file.write(&block[..len]) {
                Ok(written) => size += written as u64,
                Err(error) if error.kind() == std::io::ErrorKind::StorageFull => break,
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(file.set_len(size.saturating_sub(leave))?)
}

/// Takes the filling out again.
///
/// # Errors
/// When there is none.
pub fn free(dir: &Path) -> Result<()> {
    Ok(fs::remove_file(filler(dir))?)
}

fn filler(dir: &Path) -> PathBuf {
    dir.join("filler")
}

/// Unmounts what tests that were killed left mounted.
fn sweep() -> Result<()> {
    for line in fs::read_to_string("/proc/mounts")?.lines() {
        let path = Path::new(line.split(' ').nth(1).unwrap_or_default());
        let mut names = path.components().map(|name| name.as_os_str().to_string_lossy());
        let pid = names.find_map(|name| name.strip_prefix(PREFIX)?.split('-').next()?.parse().ok());
        if pid.is_some_and(|pid| !alive(pid)) {
            unmount(path)?;
        }
    }
    Ok(())
}

/// At once, whoever uses it.
fn unmount(path: &Path) -> Result<()> {
    run(Command::new("umount").arg("--lazy").arg(path))
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
