//! One scaler of a test's own: the real programs, real Docker, its own state directory and port.

mod clients;
mod machine;
mod output;
mod tools;

use std::{
    ffi::OsString,
    fs::{self, File},
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
};

use anyhow::{Context, Result, ensure};
use pilotlight_runtime::failpoint;
use tempfile::TempDir;

pub(crate) use self::tools::entries;
use self::tools::{build, remove_cgroups};
pub use self::{
    clients::Submit,
    output::{Peaks, peak_rss},
    tools::{alive, docker, program, signal, wait, wait_within},
};
use crate::{
    disk::{self, Disk},
    dockerd::Dockerd,
    store,
};

/// The labels and pools that most tests use: two jobs at once, gone after a few seconds without work.
pub const ONE_POOL: &str = r#"
[label.cpu]
pool = "here"
[pool.here]
placements = ["here"]
idle_timeout = "30s"
cpu_jobs = 2
[placement.here.local]
gpus = 0
"#;

/// A scaler with all that belongs to it. Ends everything when it is dropped, and shows the logs when a test fails.
#[derive(Debug)]
pub struct Site {
    dir: TempDir,
    host: &'static str,
    port: u16,
    scaler_env: Vec<(&'static str, OsString)>,
    scaler: Option<Child>,
    seen: Vec<String>,
    /// Its own Docker; the machine's without one.
    docker: Option<Dockerd>,
    disks: Vec<Disk>,
}

impl Site {
    /// A site whose config is the text behind the listen address; its scaler is running.
    ///
    /// # Errors
    /// When the programs cannot be built or started.
    pub fn new(config: &str) -> Result<Self> {
        let mut site = Self::prepare(config)?;
        site.start()?;
        Ok(site)
    }

    /// As [`Site::new`], not started.
    ///
    /// # Errors
    /// When the programs cannot be built.
    pub fn prepare(config: &str) -> Result<Self> {
        build();
        let dir = tempfile::Builder::new().prefix(&format!("{}{}-", disk::PREFIX, std::process::id())).tempdir()?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let lease = if config.lines().any(|line| line.starts_with("lease =")) { "" } else { "lease = \"1m\"\n" };
        fs::write(dir.path().join("config.toml"), format!("listen = \"127.0.0.1:{port}\"\n{lease}{config}"))?;
        Ok(Self {
            dir,
            host: "127.0.0.1",
            port,
            scaler_env: Vec::new(),
            scaler: None,
            seen: Vec::new(),
            docker: None,
            disks: Vec::new(),
        })
    }

    /// Lets clients reach the scaler by another address of this box than agents do.
    pub fn clients_dial(&mut self, host: &'static str) {
        self.host = host;
    }

    /// A variable of the environment for every scaler started from now on, and for its agents.
    pub fn scaler_env(&mut self, name: &'static str, value: impl Into<OsString>) {
        self.scaler_env.push((name, value.into()));
    }

    /// Lets the first process that comes by a failpoint die there, from the scaler's next start on. The path that is
    /// returned exists once that has happened.
    pub fn arm(&mut self, failpoint: &str) -> PathBuf {
        let file = self.path(failpoint);
        if let Some(variable) = failpoint::VARIABLES.first() {
            self.scaler_env(variable, &file);
        }
        file
    }

    /// The port that the scaler listens on.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// A path in the site's directory.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The scaler's state directory.
    #[must_use]
    pub fn state(&self) -> PathBuf {
        self.path("state")
    }

    /// The `run` command.
    #[must_use]
    pub fn run_command(&self) -> Command {
        let mut command = program("pilotlight");
        command.arg("run").arg("--config").arg(self.path("config.toml")).arg("--state-dir").arg(self.state());
        command.envs(self.scaler_env.iter().map(|(name, value)| (name, value))).stdin(Stdio::null());
        self.with_host(command)
    }

    /// Starts the scaler and waits until it is ready.
    ///
    /// # Errors
    /// When it does not become ready.
    pub fn start(&mut self) -> Result<()> {
        let log = File::options().create(true).append(true).open(self.path("scaler.log"))?;
        self.scaler = Some(self.run_command().stdout(log.try_clone()?).stderr(log).spawn()?);
        wait("the scaler is ready", || {
            ensure!(!self.scaler_died()?, "the scaler ended while it started");
            Ok(self.get("/readyz", None).is_ok_and(|(status, _)| status == 200))
        })
    }

    /// Starts the scaler again if it has died, as its supervisor would.
    ///
    /// # Errors
    /// When it does not become ready.
    pub fn revive(&mut self) -> Result<()> {
        if self.scaler_died()? { self.start() } else { Ok(()) }
    }

    fn scaler_died(&mut self) -> Result<bool> {
        Ok(match &mut self.scaler {
            Some(scaler) => scaler.try_wait()?.is_some(),
            None => false,
        })
    }

    /// Kills the scaler with -9.
    ///
    /// # Errors
    /// When it was not running.
    pub fn kill_scaler(&mut self) -> Result<()> {
        let mut scaler = self.scaler.take().context("the scaler runs")?;
        scaler.kill()?;
        scaler.wait()?;
        Ok(())
    }

    /// Stops the scaler with SIGTERM, and says how it ended.
    ///
    /// # Errors
    /// When it was not running, or does not end.
    pub fn stop_scaler(&mut self) -> Result<ExitStatus> {
        let mut scaler = self.scaler.take().context("the scaler runs")?;
        signal(scaler.id(), "TERM")?;
        let mut status = None;
        wait("the scaler has ended", || {
            status = scaler.try_wait()?;
            Ok(status.is_some())
        })?;
        status.context("it has ended")
    }

    /// Waits until the scaler has ended by itself, and says how.
    ///
    /// # Errors
    /// When it was not running, or does not end.
    pub fn scaler_ended(&mut self) -> Result<ExitStatus> {
        let mut scaler = self.scaler.take().context("the scaler runs")?;
        let mut status = None;
        wait("the scaler has ended by itself", || {
            status = scaler.try_wait()?;
            Ok(status.is_some())
        })
        .inspect_err(|_| drop(scaler.kill()))?;
        status.context("it has ended")
    }

    /// The directories of the instances.
    #[must_use]
    pub fn instance_dirs(&self) -> Vec<PathBuf> {
        entries(&self.state().join("local"))
    }

    /// The pid of the one agent.
    ///
    /// # Errors
    /// When there is none within the patience.
    pub fn agent_pid(&self) -> Result<u32> {
        self.pid_in("agent.lock", "")
    }

    /// The pid of the one attach process.
    ///
    /// # Errors
    /// When there is none within the patience.
    pub fn attach_pid(&self) -> Result<u32> {
        self.pid_in("attach.lock", "assignments")
    }

    fn pid_in(&self, name: &str, folder: &str) -> Result<u32> {
        let mut pid = None;
        wait(name, || {
            let dirs = self.instance_dirs();
            let places = dirs.iter().flat_map(|dir| match folder {
                "" => vec![dir.clone()],
                folder => entries(&dir.join(folder)),
            });
            let text = places.filter_map(|place| fs::read_to_string(place.join(name)).ok()).next();
            pid = text.and_then(|text| text.split_whitespace().next()?.parse().ok());
            Ok(pid.is_some_and(alive))
        })?;
        pid.with_context(|| format!("a pid in {name}"))
    }

    /// The ids of all containers of this site.
    ///
    /// # Errors
    /// When Docker does not answer.
    pub fn containers(&self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        for dir in self.instance_dirs() {
            let id = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
            found.extend(self.list(&["ps", "-aq"], &id)?);
        }
        Ok(found)
    }

    /// Whether the machines have nothing of a job: no assignment, no container, no network but the one kept ready.
    ///
    /// # Errors
    /// When Docker does not answer.
    pub fn is_at_rest(&self) -> Result<bool> {
        for dir in self.instance_dirs() {
            let id = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if !entries(&dir.join("assignments")).is_empty()
                || !self.list(&["ps", "-aq"], &id)?.is_empty()
                || self.list(&["network", "ls", "-q"], &id)?.len() > 1
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn list(&self, args: &[&str], instance: &str) -> Result<Vec<String>> {
        let filter = format!("label=pilotlight.instance={instance}");
        let list = self.docker(&[args, &["--filter", &filter]].concat())?;
        Ok(list.lines().map(str::to_owned).collect())
    }

    fn note_instances(&mut self) -> Result<()> {
        for instance in self.json(&["instances", "--all"])?.as_array().into_iter().flatten() {
            let id = instance["id"].as_str().unwrap_or_default().to_owned();
            if !self.seen.contains(&id) {
                self.seen.push(id);
            }
        }
        Ok(())
    }

    /// Drains everything, stops the scaler, and checks from the outside that nothing is left.
    ///
    /// # Errors
    /// When something is left.
    pub fn finish(mut self) -> Result<()> {
        self.leave_nothing().with_context(|| self.logs())
    }

    fn leave_nothing(&mut self) -> Result<()> {
        if self.scaler.is_none() {
            self.start()?;
        }
        let drain = self.call(&["drain", "--all", "--now"])?;
        ensure!(drain.status.success(), "drain: {}", String::from_utf8_lossy(&drain.stderr));
        self.note_instances()?;
        let status = self.json(&["status"])?;
        ensure!(status["instances"] == 0, "{status}");
        ensure!(self.instance_dirs().is_empty(), "directories are left: {:?}", self.instance_dirs());
        self.stop_scaler()?;
        store::check(&self.state().join("pilotlight.db"))?;
        for id in &self.seen {
            for what in [&["ps", "-aq"][..], &["network", "ls", "-q"], &["volume", "ls", "-q"]] {
                let left = self.list(what, id)?;
                ensure!(left.is_empty(), "docker {what:?} shows {left:?} of instance {id}");
            }
            // Version 1 has a hierarchy per controller, version 2 only the root.
            let root = PathBuf::from("/sys/fs/cgroup");
            for hierarchy in entries(&root).into_iter().chain([root]) {
                let cgroup = hierarchy.join("pilotlight").join(id);
                ensure!(!cgroup.exists(), "{} is left", cgroup.display());
            }
        }
        let left = self.processes();
        ensure!(left.is_empty(), "processes are left: {left:?}");
        Ok(())
    }

    /// Command lines of living processes that name this site.
    #[must_use]
    pub fn processes(&self) -> Vec<String> {
        let name = self.dir.path().to_string_lossy().into_owned();
        let own = std::process::id().to_string();
        entries(Path::new("/proc"))
            .into_iter()
            .filter(|dir| dir.file_name().is_some_and(|pid| pid.to_string_lossy() != own))
            .filter_map(|dir| fs::read(dir.join("cmdline")).ok())
            .map(|line| String::from_utf8_lossy(&line).replace('\0', " "))
            .filter(|line| line.contains(&name))
            .collect()
    }

    /// What the scaler and its agents logged.
    #[must_use]
    pub fn logs(&self) -> String {
        let mut text = fs::read_to_string(self.path("scaler.log")).unwrap_or_default();
        for dir in self.instance_dirs() {
            text += &format!("--- {}\n", dir.display());
            text += &fs::read_to_string(dir.join("agent.log")).unwrap_or_default();
        }
        text
    }
}

impl Drop for Site {
    #[expect(clippy::print_stderr, reason = "the logs of a failed test")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.logs());
        }
        if let Some(scaler) = &mut self.scaler {
            // A failed test must not leave agents behind: they are told, and cleaned up after.
            let _told = self.dir.path().exists();
            let _killed = scaler.kill();
            let _reaped = scaler.wait();
        }
        for dir in self.instance_dirs() {
            let _stay_down = fs::write(dir.join("destroying"), "");
            let lock = fs::read_to_string(dir.join("agent.lock")).unwrap_or_default();
            if let Some(pid) = lock.split_whitespace().next().and_then(|pid| pid.parse().ok())
                && alive(pid)
            {
                let _killed = signal(pid, "KILL");
            }
            let _cleaned = self.with_host(program("pilotlight-agent")).arg("clean").arg("--dir").arg(&dir).output();
        }
        if self.docker.take().is_some() {
            // Its containers died with it, and left their cgroups.
            for dir in self.instance_dirs() {
                remove_cgroups(dir.file_name().unwrap_or_default().as_ref());
            }
        }
        // The last one may lie in an earlier one.
        while self.disks.pop().is_some() {}
    }
}
