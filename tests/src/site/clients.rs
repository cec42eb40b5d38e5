//! Clients of a site: commands, submits that run, plain HTTP.

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{Site, program, tools::PATIENCE, wait};

/// A `submit` that runs.
#[derive(Debug)]
pub struct Submit {
    child: Child,
    stdout: PathBuf,
    stderr: PathBuf,
}

impl Site {
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
