//! A played runner: the runner's protocol by hand, for what the official runner cannot be made to do.
//!
//! Connect, unary, as JSON: 64-bit integers are texts, bytes are base64, fields that are zero are left out.

use anyhow::{Context, Result, bail, ensure};
use base64::{Engine, prelude::BASE64_STANDARD};
use jiff::Timestamp;
use pilotlight_runtime::clock::Clock;
use serde::Deserialize;
use serde_json::{Value, json};
use ureq::Agent;

use super::{Answer, api};

/// A registered runner that does only what it is told.
#[derive(Clone, Debug)]
pub struct PlayedRunner {
    agent: Agent,
    clock: Clock,
    url: String,
    /// Its id in the API.
    pub id: u64,
    /// By which it is known to the protocol.
    pub uuid: String,
    /// Its secret.
    pub token: String,
}

/// What a runner gets of a job.
#[derive(Clone, Debug)]
pub struct Task {
    /// Its id.
    pub id: u64,
    /// The workflow, cut down to this job.
    pub workflow: String,
    /// The `github` context.
    pub context: Value,
    /// Secrets by name.
    pub secrets: Value,
}

/// How a runner says that a task ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Well.
    Success,
    /// Not well.
    Failure,
    /// Somebody ended it. A heartbeat that is answered with this asks for it.
    Cancelled,
    /// Its condition did not hold.
    Skipped,
}

impl Outcome {
    const ALL: [(Self, &str); 4] = [
        (Self::Success, "RESULT_SUCCESS"),
        (Self::Failure, "RESULT_FAILURE"),
        (Self::Cancelled, "RESULT_CANCELLED"),
        (Self::Skipped, "RESULT_SKIPPED"),
    ];

    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(outcome, _)| *outcome == self).map_or("RESULT_UNSPECIFIED", |(_, name)| name)
    }

    fn parse(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, known)| *known == name).map(|(outcome, _)| *outcome)
    }
}

#[derive(Deserialize)]
struct Registered {
    id: String,
    uuid: String,
    token: String,
}

impl PlayedRunner {
    /// Registers a runner.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn register(url: &str, registration: &str, name: &str, labels: &[&str], ephemeral: bool) -> Result<Self> {
        let mut runner = Self::known(url, "", "");
        let body = json!({
            "name": name, "token": registration, "version": "v1.0.8", "labels": labels, "ephemeral": ephemeral,
        });
        let mut answer = runner.call("Register", &body)?;
        let registered: Registered = serde_json::from_value(answer["runner"].take())?;
        runner.id = registered.id.parse()?;
        runner.uuid = registered.uuid;
        runner.token = registered.token;
        Ok(runner)
    }

    /// A runner that was registered by somebody else. Its id in the API is not known.
    #[must_use]
    pub fn known(url: &str, uuid: &str, token: &str) -> Self {
        let (uuid, token) = (uuid.to_owned(), token.to_owned());
        Self { agent: api::agent(), clock: Clock::system(Timestamp::MIN), url: url.to_owned(), id: 0, uuid, token }
    }

    /// Tells what it serves and understands, as `cancelling`.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn declare(&self, labels: &[&str], capabilities: &[&str]) -> Result<()> {
        let body = json!({"version": "v1.0.8", "labels": labels, "capabilities": capabilities});
        self.call("Declare", &body).map(drop)
    }

    /// Takes the oldest job that fits, if there is one.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn fetch(&self) -> Result<Option<Task>> {
        let answer = self.call("FetchTask", &json!({}))?;
        let task = &answer["task"];
        if task.is_null() {
            return Ok(None);
        }
        let workflow = BASE64_STANDARD.decode(task["workflowPayload"].as_str().unwrap_or_default())?;
        Ok(Some(Task {
            id: number(&task["id"])?,
            workflow: String::from_utf8(workflow)?,
            context: task["context"].clone(),
            secrets: task["secrets"].clone(),
        }))
    }

    /// Says that a task goes on. Answers what the server wants to have become of it.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn heartbeat(&self, task: u64) -> Result<Option<Outcome>> {
        let answer = self.call("UpdateTask", &json!({"state": {"id": task.to_string()}}))?;
        Ok(answer["state"]["result"].as_str().and_then(Outcome::parse))
    }

    /// Sends lines of a task's log, of which the first has this number. Answers how many the server has.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn log(&self, task: u64, index: u64, lines: &[&str]) -> Result<u64> {
        self.update_log(task, index, lines, false)
    }

    /// As [`PlayedRunner::log`], and no more will come.
    ///
    /// # Errors
    /// As [`PlayedRunner::log`].
    pub fn seal_log(&self, task: u64, index: u64, lines: &[&str]) -> Result<u64> {
        self.update_log(task, index, lines, true)
    }

    fn update_log(&self, task: u64, index: u64, lines: &[&str], no_more: bool) -> Result<u64> {
        let time = self.clock.now().to_string();
        let rows: Vec<_> = lines.iter().map(|line| json!({"time": time, "content": line})).collect();
        let body = json!({"taskId": task.to_string(), "index": index.to_string(), "rows": rows, "noMore": no_more});
        let answer = self.call("UpdateLog", &body)?;
        if answer["ackIndex"].is_null() { Ok(0) } else { number(&answer["ackIndex"]) }
    }

    /// Says how a task ended; an ephemeral runner is gone after that.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn finish(&self, task: u64, outcome: Outcome) -> Result<()> {
        let now = self.clock.now().to_string();
        let state = json!({"id": task.to_string(), "result": outcome.name(), "startedAt": now, "stoppedAt": now});
        self.call("UpdateTask", &json!({"state": state})).map(drop)
    }

    /// Calls a method of the protocol.
    ///
    /// # Errors
    /// When nobody answers, or with an error: its code and message are in the text.
    pub fn call(&self, method: &str, body: &Value) -> Result<Value> {
        let mut request = self.agent.post(format!("{}/api/actions/runner.v1.RunnerService/{method}", self.url));
        request = request.header("connect-protocol-version", "1");
        if !self.uuid.is_empty() {
            request = request.header("x-runner-uuid", &self.uuid).header("x-runner-token", &self.token);
        }
        let answer = Answer::read(request.send_json(body).with_context(|| method.to_owned())?)?;
        if !answer.is_good() {
            bail!("{method}: {} {}", answer.status, answer.body);
        }
        answer.json()
    }
}

/// A 64-bit integer as the protocol writes it.
fn number(value: &Value) -> Result<u64> {
    let text = value.as_str().with_context(|| format!("a number as text, not {value}"))?;
    ensure!(!text.is_empty(), "an empty number");
    Ok(text.parse()?)
}
