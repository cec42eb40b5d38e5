//! The data of a server that was set up once, to be copied: a server of a test's own then starts within a second.

use std::{
    fs::{self, File},
    hash::{DefaultHasher, Hash, Hasher},
    io::Write,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use super::{
    ADMIN, Api, LOG, ORG, PASSWORD, PID, Peers, REPO, address, command, free_port, healthy, launch, remove_leftover,
    url,
};
use crate::site::{signal, wait};

/// The name of Gitea's config file, in its directory.
pub(super) const INI: &str = "app.ini";

/// Where the admin's token is, in the template's directory.
const TOKEN: &str = "admin.token";

/// A server's directory, kept beside the programs for all tests of this machine.
#[derive(Debug)]
pub(super) struct Template {
    dir: PathBuf,
}

impl Template {
    /// Makes it if it is not there yet.
    pub(super) fn get(peers: &Peers) -> Result<Self> {
        let mut hash = DefaultHasher::new();
        include_str!("template.rs").hash(&mut hash);
        let dir = peers.dir().join(format!("template-{:016x}", hash.finish()));
        if dir.exists() {
            return Ok(Self { dir });
        }
        let lock = File::create(peers.dir().join("template.lock"))?;
        lock.lock()?;
        if !dir.exists() {
            let unfinished = peers.dir().join("template.unfinished");
            // Of a test that was killed.
            remove_leftover(&unfinished);
            make(peers, &unfinished)?;
            fs::rename(&unfinished, &dir)?;
        }
        Ok(Self { dir })
    }

    /// Copies it into a directory that exists.
    pub(super) fn copy_to(&self, dir: &Path) -> Result<()> {
        copy(&self.dir, dir).with_context(|| format!("copying {}", self.dir.display()))
    }

    /// The site admin's token, with all scopes.
    pub(super) fn admin_token(&self) -> Result<String> {
        Ok(fs::read_to_string(self.dir.join(TOKEN))?)
    }
}

fn make(peers: &Peers, dir: &Path) -> Result<()> {
    fs::create_dir_all(dir)?;
    fs::write(dir.join(INI), ini(peers)?)?;
    run(peers, dir, &["migrate"])?;
    let email = format!("{ADMIN}@example.com");
    let create = ["admin", "user", "create", "--username", ADMIN, "--password", PASSWORD, "--email", &email, "--admin"];
    run(peers, dir, &[&create[..], &["--must-change-password=false"]].concat())?;
    let generate = ["admin", "user", "generate-access-token", "--username", ADMIN, "--token-name", "tests"];
    let token = run(peers, dir, &[&generate[..], &["--scopes", "all", "--raw"]].concat())?;
    fs::write(dir.join(TOKEN), token.trim())?;
    // Its first start takes longest, and so does a repository.
    let (host, port) = (Ipv4Addr::LOCALHOST.into(), free_port(Ipv4Addr::LOCALHOST.into())?);
    File::options().append(true).open(dir.join(INI))?.write_all(address(host, port).as_bytes())?;
    let url = url(host, port);
    let mut server = launch(peers, dir)?;
    let filled = wait("Gitea answers", || healthy(&mut server, &url)).and_then(|()| {
        let admin = Api::with_token(&url, token.trim());
        admin.create_org(ORG)?;
        admin.create_repo(ORG, REPO)
    });
    signal(server.id(), "TERM")?;
    wait("Gitea has ended", || Ok(server.try_wait()?.is_some())).inspect_err(|_| drop(server.kill()))?;
    filled.with_context(|| fs::read_to_string(dir.join(LOG)).unwrap_or_default())?;
    for leftover in [LOG, PID] {
        fs::remove_file(dir.join(leftover))?;
    }
    // It has noted where it is.
    let noted = fs::read_to_string(dir.join(INI))?;
    let lines = noted.lines().filter(|line| !line.starts_with("WORK_PATH"));
    fs::write(dir.join(INI), lines.map(|line| format!("{line}\n")).collect::<String>())?;
    Ok(())
}

/// Settings that suit every test. Gitea adds secrets to the file.
fn ini(peers: &Peers) -> Result<String> {
    let user = String::from_utf8(Command::new("id").arg("-un").output()?.stdout)?;
    Ok(format!(
        "APP_NAME = Gitea for tests
RUN_USER = {user}
; Refused otherwise.
I_AM_BEING_UNSAFE_RUNNING_AS_ROOT = true

[server]
STATIC_ROOT_PATH = {root}
DISABLE_SSH = true
OFFLINE_MODE = true

[database]
DB_TYPE = sqlite3

[security]
INSTALL_LOCK = true
SECRET_KEY = for-tests
; Webhooks go to this box.
ALLOWED_HOST_LIST = loopback,private
; One round: users are made often.
PASSWORD_HASH_ALGO = pbkdf2$1$50

[service]
DISABLE_REGISTRATION = true

[indexer]
; The other kind takes long to open.
ISSUE_INDEXER_TYPE = db

[queue]
; Events within 0.3 s instead of up to 4.
TYPE = channel

[log]
MODE = console
LEVEL = info
",
        root = peers.static_root().display()
    ))
}

/// Runs one of Gitea's commands to its end.
fn run(peers: &Peers, dir: &Path, args: &[&str]) -> Result<String> {
    let output = command(peers, dir, args).output().context("gitea")?;
    ensure!(
        output.status.success(),
        "gitea {}: {}{}",
        args.join(" "),
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8(output.stdout)?)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            fs::create_dir_all(&target)?;
            copy(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), &target)?;
        }
    }
    Ok(())
}
