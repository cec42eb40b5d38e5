//! One scaler of a test's own: the real programs, real Docker, its own state directory and port.

mod machine;
mod output;

use std::{
    ffi::OsString,
    fs::{self, File},
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
    sync::Once,
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use pilotlight_runtime::failpoint;
use serde_json::Value;
use tempfile::TempDir;

use crate::{
    disk::{self, Disk},
    dockerd::Dockerd,
    store,
};
pub use output::{Peaks, peak_rss};

/// How long anything may take before the test gives up.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often a state is looked at.
const LOOK: Duration = Duration::from_millis(50);

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

/// A `submit` that runs.
#[derive(Debug)]
pub struct Submit {
    child: Child,
    stdout: PathBuf,
    stderr: PathBuf,
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

    /// A client command.
    #[must_use]
    pub fn client(&self, args: &[&str]) -> Command {
        let mut command = program("pilotlight");
        command
            .args(args)
            .env("PILOTLIGHT_URL", format!("http://{}:{}", self.host, self.port))
            .env("PILOTLIGHT_STATE_DIR", self.state())
            .env_remove("PILOTLIGHT_TOKEN")
            .stdin(Stdio::null());
        command
    }

    /// Runs a client command to its end.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn call(&self, args: &[&str]) -> Result<Output> {
        Ok(self.client(args).output()?)
    }

    /// What a listing says as JSON.
    ///
    /// # Errors
    /// When the command fails or prints something else.
    pub fn json(&self, args: &[&str]) -> Result<Value> {
        let output = self.client(args).arg("--json").output()?;
        ensure!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// Submits a job on label `cpu` with the built-in image and waits for its end. `args` may hold options and, behind
    /// `--`, the command.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn submit(&self, args: &[&str]) -> Result<Output> {
        Ok(self.client(&["submit", "--label", "cpu", "--image", "pilotlight/host"]).args(args).output()?)
    }

    /// As [`Site::submit`], without waiting.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn begin(&self, args: &[&str]) -> Result<Submit> {
        self.begin_with(&[], args)
    }

    /// As [`Site::begin`], in an environment of its own.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn begin_with(&self, env: &[(&str, String)], args: &[&str]) -> Result<Submit> {
        let (out, stdout) = tempfile::NamedTempFile::new_in(self.dir.path())?.keep()?;
        let (err, stderr) = tempfile::NamedTempFile::new_in(self.dir.path())?.keep()?;
        let child = self
            .client(&["submit", "--label", "cpu", "--image", "pilotlight/host"])
            .args(args)
            .envs(env.iter().map(|(name, value)| (name, value)))
            .stdout(out)
            .stderr(err)
            .spawn()?;
        Ok(Submit { child, stdout, stderr })
    }

    /// A plain GET.
    ///
    /// # Errors
    /// When nobody answers.
    pub fn get(&self, path: &str, token: Option<&str>) -> Result<(u16, String)> {
        self.http("GET", path, token)
    }

    /// A plain request without a body.
    ///
    /// # Errors
    /// When nobody answers.
    pub fn http(&self, method: &str, path: &str, token: Option<&str>) -> Result<(u16, String)> {
        let mut stream = TcpStream::connect((self.host, self.port))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let token = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
        write!(stream, "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n{token}\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
        Ok((status.context("an HTTP status")?, answer))
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

impl Submit {
    /// Whether it has ended.
    ///
    /// # Errors
    /// When it cannot be asked.
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// When it does not end within the patience.
    pub fn end(mut self) -> Result<Output> {
        let mut status = None;
        wait("submit has ended", || {
            status = self.child.try_wait()?;
            Ok(status.is_some())
        })
        .with_context(|| self.stderr())?;
        let status = status.context("it has ended")?;
        Ok(Output { status, stdout: fs::read(&self.stdout)?, stderr: fs::read(&self.stderr)? })
    }

    /// Its pid.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has written to stdout so far.
    #[must_use]
    pub fn stdout(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.stdout).unwrap_or_default()).into_owned()
    }

    /// What it has written to stderr so far.
    #[must_use]
    pub fn stderr(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.stderr).unwrap_or_default()).into_owned()
    }

    /// Waits until stdout holds a text.
    ///
    /// # Errors
    /// When it does not within the patience.
    pub fn until(&self, text: &str) -> Result<()> {
        wait(text, || Ok(self.stdout().contains(text))).with_context(|| self.stderr())
    }
}

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

fn remove_cgroups(instance: &Path) {
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
fn build() {
    static BUILT: Once = Once::new();
    BUILT.call_once(|| {
        let release = bin_dir().ends_with("release");
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--bins", "-p", "pilotlight-scaler", "-p", "pilotlight-agent"]);
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
