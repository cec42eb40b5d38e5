//! A Docker of a test's own, to be stopped, killed and started again while everybody else's goes on.
//!
//! containerd and dockerd live in namespaces of their own (processes, network, mounts), held by a process that dies
//! with the thread that made it. So nothing of it outlives the test, however that ends, and no two tests share an
//! address, a firewall rule or a mount.

use std::{
    fs::{self, File},
    os::{fd::OwnedFd, unix::net::UnixListener},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::site::{alive, entries, signal, wait};

/// What the directories are called, followed by the test's pid: those of dead tests are removed.
const PREFIX: &str = "pilotlight-dockerd-";

/// What happens to containers while their dockerd is away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restart {
    /// They go on (`live-restore`).
    Keeps,
    /// A dockerd that is stopped stops them; one that comes back after a kill ends them.
    Ends,
}

/// A Docker that answers. Ends with everything in it when it is dropped.
#[derive(Debug)]
pub struct Dockerd {
    dir: TempDir,
    data: PathBuf,
    restart: Restart,
    /// Its socket, when it is somebody else's and waits for the next dockerd, as systemd's does.
    held: Option<UnixListener>,
    /// `unshare`, whose death takes the namespaces along.
    namespaces: Child,
    /// The first process in them, as it is seen from outside.
    first: u32,
    containerd: Option<Child>,
    dockerd: Option<Child>,
}

impl Dockerd {
    /// A Docker that runs.
    ///
    /// # Errors
    /// When it cannot be started; that takes root.
    pub fn new(restart: Restart) -> Result<Self> {
        let mut docker = Self::absent(restart, None)?;
        docker.start()?;
        Ok(docker)
    }

    /// A Docker that runs and keeps its images and containers in a directory.
    ///
    /// # Errors
    /// As [`Dockerd::new`].
    pub fn with_data(restart: Restart, data: &Path) -> Result<Self> {
        let mut docker = Self::absent(restart, Some(data))?;
        docker.start()?;
        Ok(docker)
    }

    /// A Docker that was not started yet.
    ///
    /// # Errors
    /// When there is no place for it.
    pub fn absent(restart: Restart, data: Option<&Path>) -> Result<Self> {
        sweep(PREFIX, |dir| drop(fs::remove_dir_all(dir)));
        let dir = tempfile::Builder::new().prefix(&format!("{PREFIX}{}-", std::process::id())).tempdir()?;
        // The kernel kills `unshare` when this thread ends, and all that is inside when `unshare` ends.
        let namespaces = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "unshare", "--pid", "--net", "--mount", "--fork", "--kill-child"])
            .args(["--mount-proc", "sleep", "infinity"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(dir.path().join("unshare.log"))?)
            .spawn()
            .context("setpriv and unshare of util-linux")?;
        let data = data.map_or_else(|| dir.path().join("data"), Path::to_owned);
        let mut docker = Self { dir, data, restart, held: None, namespaces, first: 0, containerd: None, dockerd: None };
        docker.first = docker.child_of(docker.namespaces.id(), "sleep")?;
        Ok(docker)
    }

    /// Holds its socket while it is away, as systemd does: calls wait for the next dockerd. Before its first start.
    ///
    /// # Errors
    /// When the socket cannot be made.
    pub fn hold_socket(&mut self) -> Result<()> {
        self.held = Some(UnixListener::bind(self.socket())?);
        Ok(())
    }

    /// Gives it a disk of its own that nobody else sees, before its first start. The path leads there from outside.
    ///
    /// # Errors
    /// When it cannot be mounted.
    pub fn mount_data(&self, size: &str) -> Result<PathBuf> {
        let made = self.inside("mkdir").arg(&self.data).status()?.success();
        let mut mount = self.inside("mount");
        mount.args(["-t", "tmpfs", "-o"]).arg(format!("size={size}")).arg("tmpfs").arg(&self.data);
        ensure!(made && mount.status()?.success(), "{mount:?}");
        let root = Path::new("/proc").join(self.first.to_string()).join("root");
        Ok(root.join(self.data.strip_prefix("/")?))
    }

    /// What `DOCKER_HOST` is to be.
    #[must_use]
    pub fn host(&self) -> String {
        format!("unix://{}", self.socket().display())
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("docker.sock")
    }

    /// Starts what does not run of it, and waits until it answers.
    ///
    /// # Errors
    /// When it does not; its log is in the error.
    pub fn start(&mut self) -> Result<()> {
        if self.containerd.is_none() {
            self.containerd = Some(self.start_containerd()?);
        }
        let (path, socket) = (self.dir.path(), self.socket());
        // The one before may have died without a word.
        let _stale = fs::remove_file(path.join("docker.pid"));
        if self.held.is_none() {
            let _stale = fs::remove_file(&socket);
        }
        let hosts = if self.held.is_some() { "fd://".to_owned() } else { self.host() };
        let config = serde_json::json!({
            "containerd": path.join("containerd.sock"), "data-root": self.data, "exec-root": path.join("exec"),
            "pidfile": path.join("docker.pid"), "hosts": [hosts], "live-restore": self.restart == Restart::Keeps,
            "bridge": "none", "iptables": false, "ip6tables": false, "userland-proxy": false,
            // Its processes have other pids than systemd knows.
            "exec-opts": ["native.cgroupdriver=cgroupfs"],
            "default-address-pools": [{"base": "10.200.0.0/16", "size": 24}],
        });
        fs::write(path.join("daemon.json"), config.to_string())?;
        let mut dockerd = self.inside("sh");
        // The protocol of socket activation: the third descriptor, and the pid that it is for.
        let activated = "LISTEN_PID=$$ LISTEN_FDS=1 exec dockerd --config-file \"$0\" 3<&0 </dev/null";
        let plain = "exec dockerd --config-file \"$0\"";
        dockerd.arg("-c").arg(if self.held.is_some() { activated } else { plain }).arg(path.join("daemon.json"));
        if let Some(held) = &self.held {
            dockerd.stdin(OwnedFd::from(held.try_clone()?));
        }
        self.dockerd = Some(self.logged(&mut dockerd, "dockerd.log")?);
        let log = path.join("dockerd.log");
        let said = || fs::read_to_string(&log).unwrap_or_default();
        let host = self.host();
        wait("dockerd answers", || {
            let version = Command::new("docker").env("DOCKER_HOST", &host).arg("version").output()?;
            Ok(version.status.success())
        })
        .with_context(said)
    }

    /// Stops dockerd in order, as a package upgrade does.
    ///
    /// # Errors
    /// When it does not end.
    pub fn stop(&mut self) -> Result<()> {
        self.end("TERM")
    }

    /// Kills dockerd and nothing else.
    ///
    /// # Errors
    /// When it does not run.
    pub fn kill(&mut self) -> Result<()> {
        self.end("KILL")
    }

    fn end(&mut self, how: &str) -> Result<()> {
        let mut outer = self.dockerd.take().context("dockerd runs")?;
        let inner = self.child_of(outer.id(), "dockerd")?;
        signal(inner, how)?;
        wait("dockerd has ended", || Ok(outer.try_wait()?.is_some()))
    }

    /// Kills dockerd, containerd and every container at once, as a machine that loses power does.
    ///
    /// # Errors
    /// When they do not end.
    pub fn kill_all(&mut self) -> Result<()> {
        // From inside, so that nobody else is hit; the first process of the namespace is not killed by its children.
        let status = self.inside("sh").args(["-c", "kill -9 -1"]).status()?;
        ensure!(status.success(), "kill -9 -1: {status}");
        for child in [self.dockerd.take(), self.containerd.take()].iter_mut().flatten() {
            wait("it has ended", || Ok(child.try_wait()?.is_some()))?;
        }
        let _stale = fs::remove_file(self.dir.path().join("containerd.sock"));
        Ok(())
    }

    /// Runs Docker's client against it.
    ///
    /// # Errors
    /// When it fails.
    pub fn call(&self, args: &[&str]) -> Result<String> {
        let output = Command::new("docker").env("DOCKER_HOST", self.host()).args(args).output()?;
        ensure!(output.status.success(), "docker {args:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?)
    }

    /// What dockerd logged.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("dockerd.log")).unwrap_or_default()
    }

    fn start_containerd(&self) -> Result<Child> {
        let path = self.dir.path();
        let config = format!(
            "version = 2\nroot = {:?}\nstate = {:?}\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n\
             [grpc]\naddress = {:?}\n",
            path.join("containerd"),
            path.join("containerd-state"),
            path.join("containerd.sock")
        );
        fs::write(path.join("containerd.toml"), config)?;
        let mut command = self.inside("containerd");
        let child = self.logged(command.arg("--config").arg(path.join("containerd.toml")), "containerd.log")?;
        wait("containerd answers", || Ok(path.join("containerd.sock").exists()))?;
        Ok(child)
    }

    /// A program in the namespaces. Its pid there is that of a child of the process that is started.
    fn inside(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--pid", "--net", "--mount", "--target"]).arg(self.first.to_string()).arg(program);
        command.stdin(Stdio::null());
        command
    }

    fn logged(&self, command: &mut Command, name: &str) -> Result<Child> {
        let log = File::options().create(true).append(true).open(self.dir.path().join(name))?;
        Ok(command.stdout(log.try_clone()?).stderr(log).spawn()?)
    }

    /// The child of a process, once it has become the program.
    fn child_of(&self, pid: u32, program: &str) -> Result<u32> {
        let mut found = 0;
        let complaint = || fs::read_to_string(self.dir.path().join("unshare.log")).unwrap_or_default();
        wait(program, || {
            ensure!(alive(pid), "it is dead; this test needs root");
            let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
            let child = children.split_whitespace().next().and_then(|child| child.parse().ok());
            found = child.unwrap_or(0);
            let name = fs::read_to_string(format!("/proc/{found}/comm")).unwrap_or_default();
            Ok(name.trim_end() == program)
        })
        .with_context(complaint)?;
        Ok(found)
    }
}

impl Drop for Dockerd {
    #[expect(clippy::print_stderr, reason = "the log of a failed test")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<_> = log.lines().collect();
            eprintln!("--- dockerd\n{}", lines[lines.len().saturating_sub(40)..].join("\n"));
        }
        let _killed = self.namespaces.kill();
        let _reaped = self.namespaces.wait();
        for child in [self.dockerd.take(), self.containerd.take()].iter_mut().flatten() {
            let _killed = child.kill();
            let _reaped = child.wait();
        }
        let _gone = wait("the namespaces are gone", || Ok(!alive(self.first)));
    }
}

/// Cleans up after tests that were killed: their directories begin with the prefix and the pid.
pub(crate) fn sweep(prefix: &'static str, remove: impl Fn(&Path)) {
    for dir in entries(&std::env::temp_dir()) {
        let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let pid = name.strip_prefix(prefix).and_then(|rest| rest.split('-').next()?.parse().ok());
        if pid.is_some_and(|pid| !alive(pid)) {
            remove(&dir);
        }
    }
}
