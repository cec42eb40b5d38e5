//! The real `pilotlight run`, on a directory of its own and on one core.

use std::{
    fs,
    io::{self, Write},
    mem::MaybeUninit,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use anyhow::{Context, bail};
use pilotlight_wire::{JobId, agent::Bootstrap, api::JobView};
use reqwest::StatusCode;
use rustix::fs::inotify;
use serde_json::json;
use tokio::time::{Instant, sleep};

/// How long anything may take that normally takes a moment.
const PATIENCE: Duration = Duration::from_secs(60);

/// Clock ticks per second in `/proc/<pid>/stat`; the same on every Linux that we run on.
const TICKS: f64 = 100.0;

/// A scaler, and how to reach it. Dropped, it takes the machines along.
#[derive(Debug)]
pub struct Scaler {
    process: Child,
    dir: tempfile::TempDir,
    /// Its base URL.
    pub url: String,
    token: String,
    http: reqwest::Client,
}

impl Scaler {
    /// Starts the program beside our own with these labels, each with a pool of its own of so many machines.
    ///
    /// # Errors
    /// When it does not start.
    pub async fn start(program: &Path, labels: &[&str], machines: usize) -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new().prefix("pilotlight-agents.").tempdir()?;
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let state = dir.path().join("state");
        // Made beforehand so that it can be watched; the scaler uses what is there.
        fs::DirBuilder::new().recursive(true).mode(0o700).create(state.join("local"))?;
        let agent = std::env::current_exe()?;
        let mut config = format!("listen = \"127.0.0.1:{port}\"\n");
        for name in labels {
            config += &format!(
                "[label.{name}]\npool = \"{name}\"\ngpus = 0\n[pool.{name}]\nplacements = [\"{name}\"]\ncpu_jobs = 1\n\
                 max_instances = {machines}\nidle_timeout = \"2h\"\nboot_timeout = \"2h\"\n[placement.{name}.local]\n\
                 gpus = 0\nmax_instances = {machines}\nagent = {agent:?}\n",
            );
        }
        let file = dir.path().join("config.toml");
        fs::write(&file, config)?;
        let log = fs::File::create(dir.path().join("scaler.log"))?;
        let process = Command::new("taskset")
            .args(["-c", "0"])
            .arg(program)
            .args(["run", "--config"])
            .arg(&file)
            .arg("--state-dir")
            .arg(&state)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("taskset, of util-linux, cannot be started")?;
        let url = format!("http://127.0.0.1:{port}");
        let mut scaler = Self { process, dir, url, token: String::new(), http: client()? };
        let begun = Instant::now();
        while !scaler.is_ready().await {
            if begun.elapsed() > PATIENCE || scaler.process.try_wait()?.is_some() {
                bail!("the scaler does not start: {}", fs::read_to_string(scaler.dir.path().join("scaler.log"))?);
            }
            sleep(Duration::from_millis(50)).await;
        }
        scaler.token = fs::read_to_string(state.join("admin.token"))?.trim().to_owned();
        Ok(scaler)
    }

    async fn is_ready(&self) -> bool {
        let answer = self.http.get(format!("{}/readyz", self.url)).send().await;
        answer.is_ok_and(|answer| answer.status() == StatusCode::OK)
    }

    fn local(&self) -> PathBuf {
        self.dir.path().join("state/local")
    }

    /// Submits a job.
    ///
    /// # Errors
    /// When it is not taken.
    pub async fn submit(&self, label: &str) -> anyhow::Result<JobId> {
        let id = JobId::random();
        let body = json!({"label": label, "spec": {"image": "none", "command": ["true"]}});
        let call = self.http.put(format!("{}/api/v1/jobs/{id}", self.url)).bearer_auth(&self.token).json(&body);
        call.send().await?.error_for_status()?;
        Ok(id)
    }

    /// Looks at a job.
    ///
    /// # Errors
    /// When it is not known.
    pub async fn job(&self, id: JobId) -> anyhow::Result<JobView> {
        let call = self.http.get(format!("{}/api/v1/jobs/{id}", self.url)).bearer_auth(&self.token);
        Ok(call.send().await?.error_for_status()?.json().await?)
    }

    /// The bootstraps of all machines.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn bootstraps(&self) -> io::Result<Vec<Bootstrap>> {
        let dirs = fs::read_dir(self.local())?;
        let read = |dir: fs::DirEntry| {
            // One that is being made has another name.
            let text = fs::read(dir.path().join("bootstrap.json")).ok()?;
            serde_json::from_slice(&text).ok()
        };
        Ok(dirs.flatten().filter(|dir| !dir.file_name().to_string_lossy().contains('.')).filter_map(read).collect())
    }

    /// When each create call begins to make its machine, from now on.
    ///
    /// # Errors
    /// When the kernel does not watch.
    pub fn creates(&self) -> anyhow::Result<mpsc::Receiver<Instant>> {
        let watch = inotify::init(inotify::CreateFlags::CLOEXEC)?;
        inotify::add_watch(&watch, self.local(), inotify::WatchFlags::CREATE)?;
        let (sender, creates) = mpsc::channel();
        thread::spawn(move || {
            let mut buffer = [MaybeUninit::uninit(); 8192];
            let mut events = inotify::Reader::new(watch, &mut buffer);
            // Ends with the process, or at the first event that nobody waits for.
            while events.next().is_ok() && sender.send(Instant::now()).is_ok() {}
        });
        Ok(creates)
    }

    /// How long the disk of its store takes for a few bytes: no commit is faster.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn disk(&self) -> io::Result<Duration> {
        let begun = Instant::now();
        let mut file = fs::OpenOptions::new().append(true).create(true).open(self.dir.path().join("disk"))?;
        file.write_all(&[0; 4096])?;
        file.sync_data()?;
        Ok(begun.elapsed())
    }

    /// Memory that it has resident, in MB.
    ///
    /// # Errors
    /// When it runs no more.
    pub fn resident(&self) -> anyhow::Result<f64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        Ok(line.trim().trim_end_matches(" kB").parse::<f64>()? / 1000.0)
    }

    /// Processor time that it has used, in seconds.
    ///
    /// # Errors
    /// When it runs no more.
    pub fn processor(&self) -> anyhow::Result<f64> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.process.id()))?;
        let (_, fields) = stat.rsplit_once(')').context("no name")?;
        let ticks: Result<Vec<f64>, _> = fields.split_ascii_whitespace().skip(11).take(2).map(str::parse).collect();
        Ok(ticks?.iter().sum::<f64>() / TICKS)
    }
}

impl Drop for Scaler {
    fn drop(&mut self) {
        // The scaler first, or it would start the machines again.
        let _gone = self.process.kill();
        let _reaped = self.process.wait();
        let ours = std::env::current_exe().ok();
        for dir in fs::read_dir(self.local()).into_iter().flatten().flatten() {
            let lock = fs::read_to_string(dir.path().join("agent.lock")).unwrap_or_default();
            let pid = lock.split_whitespace().next().and_then(|pid| pid.parse().ok());
            let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) else { continue };
            if fs::read_link(format!("/proc/{}/exe", pid.as_raw_nonzero())).ok() == ours {
                let _gone = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
    }
}

/// An HTTP client that keeps as many connections as are used.
///
/// # Errors
/// When it cannot be set up.
pub fn client() -> reqwest::Result<reqwest::Client> {
    reqwest::Client::builder().no_proxy().tcp_nodelay(true).build()
}
