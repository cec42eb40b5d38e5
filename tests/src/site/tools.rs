//! Waiting, signals, Docker's client, and where the programs are.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::Once,
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail, ensure};

/// How long anything may take before the test gives up.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// How often a state is looked at.
const LOOK: Duration = Duration::from_millis(50);

/// Waits for a state, with a bound.
///
/// # Errors
/// When it does not come, or looking fails.
pub fn wait(what: &str, look: impl FnMut() -> Result<bool>) -> Result<()> {
    wait_within(PATIENCE, what, look)
}

/// As [`wait`], for what takes longer by its nature.
///
/// # Errors
/// When it does not come, or looking fails.
pub fn wait_within(patience: Duration, what: &str, mut look: impl FnMut() -> Result<bool>) -> Result<()> {
    let mut left = patience;
    while !look()? {
        if left.is_zero() {
            bail!("not within {} s: {what}", patience.as_secs());
        }
        std::thread::sleep(LOOK);
        left = left.saturating_sub(LOOK);
    }
    Ok(())
}

/// Sends a signal.
///
/// # Errors
/// When the process is not there.
pub fn signal(pid: u32, name: &str) -> Result<()> {
    let status = Command::new("kill").arg(format!("-{name}")).arg(pid.to_string()).status()?;
    ensure!(status.success(), "kill -{name} {pid}");
    Ok(())
}

/// Whether a process lives; a zombie does not.
#[must_use]
pub fn alive(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(')').next().unwrap_or_default().trim_start().starts_with('Z'))
}

/// Runs Docker's client.
///
/// # Errors
/// When it fails: these tests need Docker and do not skip.
pub fn docker(args: &[&str]) -> Result<String> {
    let output = Command::new("docker").args(args).output().context("the docker client")?;
    ensure!(output.status.success(), "docker {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

pub(crate) fn entries(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

pub(super) fn remove_cgroups(instance: &Path) {
    fn remove(dir: &Path) {
        entries(dir).iter().filter(|entry| entry.is_dir()).for_each(|child| remove(child));
        let _busy = fs::remove_dir(dir);
    }
    let root = Path::new("/sys/fs/cgroup");
    for hierarchy in entries(root).into_iter().chain([root.to_owned()]) {
        remove(&hierarchy.join("pilotlight").join(instance));
    }
}

fn bin_dir() -> PathBuf {
    let test = std::env::current_exe().unwrap_or_default();
    test.ancestors().nth(2).unwrap_or(Path::new(".")).to_owned()
}

/// One of our programs, as this build has it.
#[must_use]
pub fn program(name: &str) -> Command {
    Command::new(bin_dir().join(name))
}

/// Cargo builds no binary of another package for a test, so it is asked.
pub(super) fn build() {
    static BUILT: Once = Once::new();
    BUILT.call_once(|| {
        let release = bin_dir().ends_with("release");
        let mut cargo = Command::new(env!("CARGO"));
        // The whole workspace, as CI builds it: a build of some packages has other features, and begins from nothing.
        cargo.args(["build", "--quiet", "--bins", "--workspace"]);
        cargo.current_dir(env!("CARGO_MANIFEST_DIR")).args(release.then_some("--release"));
        if cfg!(feature = "failpoints") {
            cargo.args(["--features", "failpoints"]);
        }
        if let Some(target) = bin_dir().parent() {
            cargo.env("CARGO_TARGET_DIR", target);
        }
        let status = cargo.status().map_err(|error| anyhow!(error));
        assert!(status.is_ok_and(|status| status.success()), "the programs must build");
    });
}
