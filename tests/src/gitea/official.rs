//! The official runner, started by hand.

use std::{
    fs::{self, File},
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::Gitea;
use crate::site::wait;

/// How it is started.
#[derive(Clone, Debug)]
pub struct Official<'a> {
    /// Its name.
    pub name: &'a str,
    /// What it serves and how, as `gpu:host` or `gpu:docker://IMAGE`.
    pub labels: &'a [&'a str],
    /// Whether it ends after one job.
    pub ephemeral: bool,
    /// Its config file; what is not in it is as the runner ships it.
    pub config: Value,
}

impl Default for Official<'_> {
    /// One job at a time on this very box, asked for every second.
    fn default() -> Self {
        let runner = json!({"fetch_interval": "1s", "fetch_interval_max": "1s"});
        Self {
            name: "by-hand",
            labels: &["by-hand:host"],
            ephemeral: false,
            config: json!({"runner": runner, "cache": {"enabled": false}}),
        }
    }
}

/// A runner that runs, with a directory that is its home. Killed with what it started on this box when it is dropped.
#[derive(Debug)]
pub struct OfficialRunner {
    dir: TempDir,
    daemon: Child,
}

impl OfficialRunner {
    /// Registers it with a registration token and starts its daemon.
    ///
    /// # Errors
    /// When it cannot be registered or started.
    pub fn start(gitea: &Gitea, registration: &str, how: &Official<'_>) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("pilotlight-runner-").tempdir()?;
        // JSON is YAML.
        fs::write(dir.path().join("config.yaml"), how.config.to_string())?;
        let command = |subcommand: &str| {
            let mut command = Command::new(gitea.peers().runner());
            command.args([subcommand, "--config", "config.yaml"]).current_dir(dir.path()).stdin(Stdio::null());
            // A job on this box inherits what the runner has.
            command.env_clear().env("HOME", dir.path()).env("PATH", std::env::var_os("PATH").unwrap_or_default());
            command
        };
        let mut register = command("register");
        register.args(["--no-interactive", "--instance", gitea.url(), "--token", registration, "--name", how.name]);
        register.args(["--labels", &how.labels.join(",")]).args(how.ephemeral.then_some("--ephemeral"));
        let registered = register.output().context("the official runner")?;
        ensure!(registered.status.success(), "register: {}", String::from_utf8_lossy(&registered.stderr));
        let log = File::create(dir.path().join("daemon.log"))?;
        // A group of its own, so that the job's processes can be ended with it.
        let daemon = command("daemon").process_group(0).stdout(log.try_clone()?).stderr(log).spawn()?;
        Ok(Self { dir, daemon })
    }

    /// Its pid, which is that of its process group.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.daemon.id()
    }

    /// Its home, in which `.runner` lies.
    #[must_use]
    pub fn home(&self) -> PathBuf {
        self.dir.path().to_owned()
    }

    /// What it logged.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("daemon.log")).unwrap_or_default()
    }

    /// Waits until it has ended by itself.
    ///
    /// # Errors
    /// When it does not.
    pub fn ended(&mut self) -> Result<ExitStatus> {
        let mut status = None;
        let daemon = &mut self.daemon;
        let ended = wait("the official runner has ended", || {
            status = daemon.try_wait()?;
            Ok(status.is_some())
        });
        ended.with_context(|| self.log())?;
        status.context("it has ended")
    }
}

impl Drop for OfficialRunner {
    #[expect(clippy::print_stderr, reason = "the log of a failed test")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- official runner\n{}", self.log());
        }
        if let Some(group) = i32::try_from(self.daemon.id()).ok().and_then(Pid::from_raw) {
            let _killed = kill_process_group(group, Signal::KILL);
        }
        let _reaped = self.daemon.wait();
    }
}
