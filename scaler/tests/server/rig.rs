//! A scaler in this process, whose machines are scripts that only hold their lock, and the test as their agent.

use std::{collections::BTreeMap, fs, os::unix::fs::PermissionsExt, path::Path, time::Duration};

use jiff::Timestamp;
use pilotlight_scaler::{
    RunError,
    config::{self, Surroundings},
    reload::Reload,
};
use pilotlight_wire::{
    AssignmentId, InstanceId, JobId, Secret, Verdict,
    agent::{
        AssignmentEvent, AssignmentEventKind, AssignmentReport, Bootstrap, Directive, EnrolRequest, EnrolResponse,
        Finished, Health, Inventory, JobRef, Seq, Stage, Start, SyncRequest, SyncResponse,
    },
};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::{sync::mpsc, task::JoinHandle};
use tokio_util::sync::CancellationToken;

const SCRIPT: &str = r#"#!/bin/bash
[ "$1" = run ] || { [ ! -e "$(dirname "$0")/stuck" ]; exit; }
exec 9>>"$3/agent.lock"
flock -n 9 || exit 75
echo "$$ $(cut -d' ' -f22 /proc/$$/stat)" >"$3/agent.lock"
exec sleep 300
"#;

pub(crate) struct Rig {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) url: String,
    pub(crate) token: String,
    shutdown: CancellationToken,
    reloads: Option<mpsc::Sender<Reload>>,
    running: Option<JoinHandle<Result<(), RunError>>>,
    pub(crate) http: reqwest::Client,
}

/// One machine's agent, played by the test.
pub(crate) struct Agent {
    http: reqwest::Client,
    url: String,
    pub(crate) instance: InstanceId,
    pub(crate) bearer: String,
    n: u64,
    pub(crate) listed: Vec<AssignmentId>,
    pub(crate) stage: Stage,
    /// Whose jobs its assignments are.
    jobs: BTreeMap<AssignmentId, JobRef>,
}

impl Rig {
    pub(crate) async fn new() -> Self {
        Self::with(|_, config| config).await
    }

    /// One with another config.
    pub(crate) async fn with(edit: impl FnOnce(&Path, String) -> String) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let agent = dir.path().join("agent");
        fs::write(&agent, SCRIPT).unwrap();
        fs::set_permissions(&agent, fs::Permissions::from_mode(0o755)).unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let config = format!(
            "listen = \"127.0.0.1:{port}\"\nlease = \"1m\"\n[label.cpu]\npool = \"here\"\n[pool.here]\nplacements = [\"here\"]\n\
             cpu_jobs = 2\nmax_instances = 2\n[placement.here.local]\ngpus = 0\nmax_instances = 2\nprice_per_hour = 3.6\nagent = {agent:?}\n"
        );
        fs::write(dir.path().join("config.toml"), edit(dir.path(), config)).unwrap();
        let mut rig = Self {
            url: format!("http://127.0.0.1:{port}"),
            token: String::new(),
            shutdown: CancellationToken::new(),
            reloads: None,
            running: None,
            http: reqwest::Client::new(),
            dir,
        };
        rig.start().await;
        rig
    }

    pub(crate) fn state(&self) -> std::path::PathBuf {
        self.dir.path().join("state")
    }

    pub(crate) async fn start(&mut self) {
        let around = Surroundings { state_dir: Some(self.state()), ..Surroundings::of_this_box() };
        let valid = config::load(&self.dir.path().join("config.toml"), &around).unwrap();
        self.shutdown = CancellationToken::new();
        let (reloads, receiver) = mpsc::channel(1);
        self.reloads = Some(reloads);
        self.running = Some(tokio::spawn(pilotlight_scaler::run(valid.config, receiver, self.shutdown.clone())));
        until("ready", async || {
            self.http.get(format!("{}/readyz", self.url)).send().await.is_ok_and(|answer| answer.status() == 200)
        })
        .await;
        self.token = fs::read_to_string(self.state().join("admin.token")).unwrap().trim().to_owned();
    }

    /// Writes another config for the next start.
    pub(crate) fn edit(&self, edit: impl FnOnce(String) -> String) {
        let path = self.dir.path().join("config.toml");
        fs::write(&path, edit(fs::read_to_string(&path).unwrap())).unwrap();
    }

    /// Ends a machine for good: its processes, and its agent's directory says that it is done.
    pub(crate) fn kill_machine(&self, instance: InstanceId) {
        let dir = self.state().join("local").join(instance.to_string());
        fs::write(dir.join("done"), "died").unwrap();
        let lock = fs::read_to_string(dir.join("agent.lock")).unwrap();
        // Ours: a script that sleeps.
        let killed = std::process::Command::new("kill").args(["-9", lock.split_whitespace().next().unwrap()]).status();
        assert!(killed.unwrap().success());
    }

    /// Writes another config and reads it, as SIGHUP does.
    pub(crate) async fn reload(&self, edit: impl FnOnce(String) -> String) {
        let path = self.dir.path().join("config.toml");
        fs::write(&path, edit(fs::read_to_string(&path).unwrap())).unwrap();
        let around = Surroundings { state_dir: Some(self.state()), ..Surroundings::of_this_box() };
        let loaded = config::load(&path, &around).map(Box::new);
        self.reloads.as_ref().unwrap().send(loaded).await.unwrap();
    }

    /// Loses the database, and nothing else.
    pub(crate) async fn lose_database(&mut self) {
        self.stop().await.unwrap();
        for name in ["pilotlight.db", "pilotlight.db-wal", "pilotlight.db-shm"] {
            let _absent = fs::remove_file(self.state().join(name));
        }
        self.start().await;
    }

    pub(crate) async fn stop(&mut self) -> Result<(), RunError> {
        self.shutdown.cancel();
        self.ended().await
    }

    /// Waits for the scaler to end by itself.
    pub(crate) async fn ended(&mut self) -> Result<(), RunError> {
        tokio::time::timeout(Duration::from_secs(20), self.running.take().unwrap()).await.unwrap().unwrap()
    }

    pub(crate) async fn call(&self, method: Method, path: &str, body: Option<Value>) -> (StatusCode, Value) {
        let mut request = self.http.request(method, format!("{}{path}", self.url)).bearer_auth(&self.token);
        if let Some(body) = body {
            request = request.json(&body);
        }
        let answer = request.send().await.unwrap();
        (answer.status(), answer.json().await.unwrap_or(Value::Null))
    }

    /// An instance as clients see it, gone ones included.
    pub(crate) async fn instance(&self, id: InstanceId) -> Value {
        let all = self.get("/api/v1/instances?all=1").await;
        all.as_array().unwrap().iter().find(|one| one["id"] == json!(id)).cloned().unwrap_or(Value::Null)
    }

    pub(crate) async fn get(&self, path: &str) -> Value {
        self.call(Method::GET, path, None).await.1
    }

    /// A part of the log, and whether it is closed.
    pub(crate) async fn log(&self, job: JobId, query: &str) -> (Vec<u8>, String) {
        let url = format!("{}/api/v1/jobs/{job}/log?{query}", self.url);
        let answer = self.http.get(url).bearer_auth(&self.token).send().await.unwrap();
        let state = answer.headers()["pilotlight-log-state"].to_str().unwrap().to_owned();
        (answer.bytes().await.unwrap().to_vec(), state)
    }

    pub(crate) async fn submit(&self) -> JobId {
        let id = JobId::random();
        let (status, body) = self.call(Method::PUT, &format!("/api/v1/jobs/{id}"), Some(job())).await;
        assert_eq!(status, 201, "{body}");
        id
    }

    pub(crate) async fn job(&self, id: JobId) -> Value {
        self.get(&format!("/api/v1/jobs/{id}")).await
    }

    /// The bootstrap of the one machine, once it is there.
    pub(crate) async fn bootstrap(&self) -> Bootstrap {
        self.bootstraps(1).await.remove(0)
    }

    /// The bootstraps of so many machines, once they are there.
    pub(crate) async fn bootstraps(&self, count: usize) -> Vec<Bootstrap> {
        let mut found = Vec::new();
        until("machines", async || {
            let dirs = fs::read_dir(self.state().join("local")).into_iter().flatten().flatten();
            found = dirs.filter_map(|dir| read_bootstrap(&dir.path())).collect();
            found.len() >= count
        })
        .await;
        found
    }

    pub(crate) async fn enrol(&self) -> Agent {
        self.enrol_as(&self.bootstrap().await).await
    }

    pub(crate) async fn enrol_as(&self, bootstrap: &Bootstrap) -> Agent {
        let answer = self.enrol_with(bootstrap, &"ab".repeat(32)).await;
        let answer: EnrolResponse = answer.error_for_status().unwrap().json().await.unwrap();
        let bearer = answer.bearer.expose().to_owned();
        Agent {
            http: self.http.clone(),
            url: self.url.clone(),
            instance: bootstrap.instance,
            bearer,
            n: 0,
            listed: Vec::new(),
            stage: Stage::Accepted,
            jobs: BTreeMap::new(),
        }
    }

    pub(crate) async fn enrol_with(&self, bootstrap: &Bootstrap, nonce: &str) -> reqwest::Response {
        self.enrol_again(bootstrap, nonce, None).await
    }

    /// Enrols, showing the bearer of an earlier enrolment.
    pub(crate) async fn enrol_again(
        &self,
        bootstrap: &Bootstrap,
        nonce: &str,
        bearer: Option<&str>,
    ) -> reqwest::Response {
        let request = EnrolRequest {
            instance: bootstrap.instance,
            secret: bootstrap.secret.clone(),
            nonce: nonce.to_owned(),
            agent_version: "0".to_owned(),
            agent_started_at: Timestamp::UNIX_EPOCH,
            inventory: Inventory::default(),
            health: Health::default(),
            bearer: bearer.map(Secret::new),
        };
        self.http.post(format!("{}/agent/v1/enrol", self.url)).json(&request).send().await.unwrap()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.shutdown.cancel();
        for dir in fs::read_dir(self.state().join("local")).into_iter().flatten().flatten() {
            let lock = fs::read_to_string(dir.path().join("agent.lock")).unwrap_or_default();
            if let Some(pid) = lock.split_whitespace().next() {
                // Ours: a script that sleeps.
                let _gone = std::process::Command::new("kill").arg(pid).status();
            }
        }
    }
}

impl Agent {
    fn post(&self, path: &str) -> reqwest::RequestBuilder {
        self.http.post(format!("{}/agent/v1/{path}", self.url)).bearer_auth(&self.bearer)
    }

    /// A sync as the next one in order.
    pub(crate) fn next_sync(&mut self) -> reqwest::RequestBuilder {
        self.n += 1;
        self.sync_as(Seq { run: 1, n: self.n })
    }

    pub(crate) fn sync_as(&self, seq: Seq) -> reqwest::RequestBuilder {
        let report = |id: &AssignmentId| AssignmentReport {
            id: *id,
            job: self.jobs.get(id).cloned(),
            gpus: Vec::new(),
            remaining_seconds: None,
            stage: self.stage,
            detail: Some("pulling x: 45%".to_owned()),
        };
        let assignments = self.listed.iter().map(report).collect();
        self.post("sync").json(&SyncRequest { seq, assignments, sample: None, note: None })
    }

    pub(crate) async fn directives(&mut self) -> Vec<Directive> {
        let answer = self.next_sync().send().await.unwrap().error_for_status().unwrap();
        answer.json::<SyncResponse>().await.unwrap().directives
    }

    /// Syncs until told to start something.
    pub(crate) async fn start(&mut self) -> Start {
        match self.directives().await.as_slice() {
            [Directive::Start(start)] => {
                self.jobs.insert(start.assignment, start.job.clone());
                (**start).clone()
            }
            other => panic!("one start is wanted: {other:?}"),
        }
    }

    pub(crate) async fn event(&self, id: AssignmentId, n: u64, event: AssignmentEventKind) -> (StatusCode, Value) {
        let event = AssignmentEvent { n, at: Timestamp::UNIX_EPOCH, event };
        let answer = self.post(&format!("assignments/{id}/events")).json(&event).send().await.unwrap();
        (answer.status(), answer.json().await.unwrap())
    }

    pub(crate) async fn log(&self, id: AssignmentId, offset: u64, bytes: &[u8]) -> (StatusCode, Value) {
        let url = format!("{}/agent/v1/assignments/{id}/log?offset={offset}", self.url);
        let request = self.http.put(url).bearer_auth(&self.bearer).body(bytes.to_vec());
        let answer = request.send().await.unwrap();
        (answer.status(), answer.json().await.unwrap())
    }
}

pub(crate) fn started() -> AssignmentEventKind {
    AssignmentEventKind::Started { image_ready_at: Timestamp::UNIX_EPOCH, image_id: None }
}

pub(crate) fn finished(verdict: Verdict, exit_code: Option<i32>, log_bytes: u64) -> AssignmentEventKind {
    let usage = Some(pilotlight_wire::Usage { wall_seconds: 1000.0, ..pilotlight_wire::Usage::default() });
    AssignmentEventKind::Finished(Finished { verdict, exit_code, reason: None, log_bytes, log_gap: false, usage })
}

pub(crate) fn job() -> Value {
    json!({"label": "cpu", "spec": {"image": "x", "command": ["a", "b"], "env": {"K": "v\n\"'"}}})
}

fn read_bootstrap(dir: &Path) -> Option<Bootstrap> {
    serde_json::from_slice(&fs::read(dir.join("bootstrap.json")).ok()?).ok()
}

pub(crate) async fn until(what: &str, mut look: impl AsyncFnMut() -> bool) {
    for _ in 0..1600 {
        if look().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    panic!("not within forty seconds: {what}");
}
