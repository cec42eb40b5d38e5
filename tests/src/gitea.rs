//! A real Gitea of a test's own: the server that `tests/peers` builds, on a port and data of its own.
//!
//! Everything here blocks and needs no runtime, so that it can be called from any test. Facts about Gitea: it is
//! version 1.27.3 (`tests/peers/go.mod`).

mod api;
mod official;
mod peers;
mod protocol;
mod repo;
mod scope;
mod settings;
mod template;
mod types;
mod until;
mod web;

use std::{
    fs::{self, File},
    io::Write,
    net::{IpAddr, TcpListener},
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;
use uuid::Uuid;

use self::{api::Credentials, template::Template};
pub use self::{
    api::{Answer, Api},
    official::{Official, OfficialRunner},
    peers::Peers,
    protocol::{Outcome, PlayedRunner, Task},
    repo::Repo,
    scope::{Hook, Scope},
    settings::Settings,
    types::{Conclusion, Job, LabelView, Run, RunnerView, Status, Step, TaskView},
    until::{until, until_within},
    web::Web,
};
use crate::{
    dockerd::sweep,
    site::{alive, signal, wait},
};

/// The site admin that every server has.
pub const ADMIN: &str = "root-of-all";

/// The password of every user.
pub const PASSWORD: &str = "a-password-for-tests";

/// The organisation that every server has; the admin owns it.
pub const ORG: &str = "acme";

/// The repository in it, with a branch `main`.
pub const REPO: &str = "app";

/// What the directories are called, followed by the test's pid: those of dead tests are removed.
const PREFIX: &str = "pilotlight-gitea-";

/// A server with all that belongs to it. Ends when it is dropped, and shows the end of its log when a test fails.
#[derive(Debug)]
pub struct Gitea {
    dir: TempDir,
    peers: Peers,
    url: String,
    admin: Api,
    server: Option<Child>,
}

impl Gitea {
    /// A server that answers on loopback.
    ///
    /// # Errors
    /// When the peers cannot be built or the server does not start.
    pub fn new() -> Result<Self> {
        Self::with(&Settings::default())
    }

    /// As [`Gitea::new`], with other settings.
    ///
    /// # Errors
    /// As [`Gitea::new`].
    pub fn with(settings: &Settings) -> Result<Self> {
        sweep(PREFIX, remove_leftover);
        let peers = Peers::get()?;
        let template = Template::get(&peers)?;
        let dir = tempfile::Builder::new().prefix(&format!("{PREFIX}{}-", std::process::id())).tempdir()?;
        template.copy_to(dir.path())?;
        let host = settings.host()?;
        let port = free_port(host)?;
        let url = url(host, port);
        // What comes later wins.
        let ini = address(host, port) + &settings.ini();
        File::options().append(true).open(dir.path().join(template::INI))?.write_all(ini.as_bytes())?;
        let admin = Api::new(&url, Credentials::Token(template.admin_token()?));
        let mut gitea = Self { dir, peers, url, admin, server: None };
        gitea.start()?;
        Ok(gitea)
    }

    /// Where it is reached, without a slash at the end.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The programs that it comes from.
    #[must_use]
    pub fn peers(&self) -> &Peers {
        &self.peers
    }

    /// The site admin's API, with all scopes.
    #[must_use]
    pub fn admin(&self) -> &Api {
        &self.admin
    }

    /// The pid of the server.
    ///
    /// # Errors
    /// When it is stopped.
    pub fn pid(&self) -> Result<u32> {
        Ok(self.server.as_ref().context("Gitea runs")?.id())
    }

    /// Starts it again on the same data and port, and waits until it answers.
    ///
    /// # Errors
    /// When it does not; its log is in the error.
    pub fn start(&mut self) -> Result<()> {
        ensure!(self.server.is_none(), "Gitea runs already");
        self.server = Some(launch(&self.peers, self.dir.path())?);
        let (server, url) = (&mut self.server, &self.url);
        let answer = wait("Gitea answers", || healthy(server.as_mut().context("Gitea runs")?, url));
        answer.with_context(|| self.log())
    }

    /// Stops it in order, with SIGTERM.
    ///
    /// # Errors
    /// When it was not running, or does not end.
    pub fn stop(&mut self) -> Result<()> {
        signal(self.pid()?, "TERM")?;
        let server = self.server.as_mut().context("Gitea runs")?;
        wait("Gitea has ended", || Ok(server.try_wait()?.is_some()))?;
        self.server = None;
        Ok(())
    }

    /// Kills it with -9.
    ///
    /// # Errors
    /// When it was not running.
    pub fn kill(&mut self) -> Result<()> {
        let mut server = self.server.take().context("Gitea runs")?;
        server.kill()?;
        server.wait()?;
        Ok(())
    }

    /// Stops it, stays away for a while, and starts it again.
    ///
    /// # Errors
    /// As [`Gitea::stop`] and [`Gitea::start`].
    pub fn restart_after(&mut self, away: Duration) -> Result<()> {
        self.stop()?;
        std::thread::sleep(away);
        self.start()
    }

    /// What it logged.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join(LOG)).unwrap_or_default()
    }

    /// The organisation that is there from the start.
    #[must_use]
    pub fn org(&self) -> Scope {
        Scope::Org(ORG.to_owned())
    }

    /// The repository that is there from the start, with the admin's rights.
    #[must_use]
    pub fn repo(&self) -> Repo {
        Repo::new(&self.admin, ORG, REPO)
    }

    /// Makes a user who is nobody's admin.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn add_user(&self, name: &str) -> Result<()> {
        let user = json!({
            "username": name, "email": format!("{name}@example.com"), "password": PASSWORD,
            "must_change_password": false,
        });
        self.admin.post::<Value>("/admin/users", &user).map(drop)
    }

    /// The API with a new token of a user, as `read:organization` or `write:repository`; `all` for everything.
    ///
    /// # Errors
    /// When there is no such user or scope.
    pub fn token(&self, user: &str, scopes: &[&str]) -> Result<Api> {
        let owner = Api::new(&self.url, Credentials::Password(user.to_owned(), PASSWORD.to_owned()));
        let name = Uuid::new_v4().to_string();
        let made: Value = owner.post(&format!("/users/{user}/tokens"), &json!({"name": name, "scopes": scopes}))?;
        let token = made["sha1"].as_str().with_context(|| format!("a token: {made}"))?;
        Ok(Api::new(&self.url, Credentials::Token(token.to_owned())))
    }

    /// The API without any token.
    #[must_use]
    pub fn anonymous(&self) -> Api {
        Api::new(&self.url, Credentials::Nobody)
    }

    /// A browser's session, for what has no API.
    ///
    /// # Errors
    /// When the user cannot log in.
    pub fn web(&self, user: &str) -> Result<Web> {
        Web::login(&self.url, user)
    }

    /// Cancels a run as the site admin does in the browser.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn cancel(&self, repo: &Repo, run: u64) -> Result<()> {
        self.web(ADMIN)?.cancel(repo, run)
    }

    /// Runs a scheduled task now, as `stop_zombie_tasks`. Returns once it was started.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn cron(&self, task: &str) -> Result<()> {
        self.admin.send("POST", &format!("/admin/cron/{task}"), None).map(drop)
    }
}

impl Drop for Gitea {
    #[expect(clippy::print_stderr, reason = "the log of a failed test")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<_> = log.lines().collect();
            eprintln!("--- gitea\n{}", lines[lines.len().saturating_sub(40)..].join("\n"));
        }
        if self.server.is_some() {
            let _killed = self.kill();
        }
    }
}

/// Where the server's output goes, in its directory.
const LOG: &str = "gitea.log";

/// Where the server's pid is written, in its directory.
const PID: &str = "gitea.pid";

fn free_port(host: IpAddr) -> Result<u16> {
    Ok(TcpListener::bind((host, 0)).with_context(|| format!("a port at {host}"))?.local_addr()?.port())
}

fn url(host: IpAddr, port: u16) -> String {
    format!("http://{host}:{port}")
}

/// The part of `app.ini` that differs from server to server.
fn address(host: IpAddr, port: u16) -> String {
    format!("\n[server]\nHTTP_ADDR = {host}\nHTTP_PORT = {port}\nROOT_URL = {}/\n", url(host, port))
}

/// Starts the server on a directory that holds an `app.ini`.
fn launch(peers: &Peers, dir: &Path) -> Result<Child> {
    let log = File::options().create(true).append(true).open(dir.join(LOG))?;
    let mut command = command(peers, dir, &["web"]);
    command.arg("--pid").arg(dir.join(PID)).stdout(log.try_clone()?).stderr(log);
    command.spawn().with_context(|| format!("{command:?}"))
}

/// One of Gitea's commands on a directory, in an environment of its own.
fn command(peers: &Peers, dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(peers.gitea());
    command.args(args).arg("--config").arg(dir.join(template::INI)).arg("--work-path").arg(dir);
    command.env_clear().env("HOME", dir).env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command.current_dir(dir).stdin(Stdio::null());
    command
}

/// Whether a server that was started answers yet.
fn healthy(server: &mut Child, url: &str) -> Result<bool> {
    if let Some(status) = server.try_wait()? {
        anyhow::bail!("Gitea ended while it started: {status}");
    }
    // Refused until it listens.
    Ok(api::agent().get(format!("{url}/api/healthz")).call().is_ok_and(|answer| answer.status() == 200))
}

/// Ends a server whose test was killed, and removes its directory. Its command line names that directory.
fn remove_leftover(dir: &Path) {
    let pid = fs::read_to_string(dir.join(PID)).ok().and_then(|pid| pid.trim().parse().ok());
    if let Some(pid) = pid.filter(|pid| alive(*pid)) {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        if String::from_utf8_lossy(&line).contains(&*dir.to_string_lossy()) {
            let _killed = signal(pid, "KILL");
        }
    }
    let _best_effort = fs::remove_dir_all(dir);
}
