//! A Gitea server as far as the scaler sees it: lists with pages, runners, the runner protocol; with answers that get
//! lost. How it behaves is taken from the real one (spec gitea 3, 5).

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard},
};

use axum::{
    Json, Router,
    body::Body,
    extract::{Path, Query, State},
    http::{HeaderMap, Method, StatusCode},
    response::{IntoResponse, Response},
    routing::{any, post},
};
use serde_json::{Value, json};
use tokio::net::TcpListener;

pub(crate) const REGISTRATION_TOKEN: &str = "the-registration-token";

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The call is done and not answered.
    AnswerLost,
}

#[derive(Clone)]
pub(crate) struct Job {
    pub(crate) id: i64,
    pub(crate) run: i64,
    pub(crate) repository: String,
    pub(crate) name: String,
    pub(crate) html_url: String,
    pub(crate) status: String,
    labels: Vec<String>,
    attempt: u32,
    runner: Option<i64>,
}

#[derive(Clone)]
pub(crate) struct Runner {
    pub(crate) id: i64,
    pub(crate) name: String,
    pub(crate) scope: String,
    pub(crate) ephemeral: bool,
    disabled: bool,
}

#[derive(Default)]
struct Inner {
    url: String,
    next: i64,
    jobs: BTreeMap<i64, Job>,
    runners: BTreeMap<i64, Runner>,
    /// Names outlive runners.
    names: BTreeMap<i64, String>,
    logs: BTreeMap<i64, (Vec<String>, bool)>,
    faults: Vec<(String, Fault)>,
    calls: BTreeMap<String, u32>,
    away: bool,
}

#[derive(Clone)]
pub(crate) struct Gitea {
    pub(crate) url: String,
    inner: Arc<Mutex<Inner>>,
}

impl Gitea {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let inner = Inner { url: url.clone(), next: 100, ..Inner::default() };
        let gitea = Self { url, inner: Arc::new(Mutex::new(inner)) };
        let router = Router::new()
            .route("/api/v1/{*path}", any(rest))
            .route("/api/actions/runner.v1.RunnerService/{method}", post(protocol))
            .with_state(gitea.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        gitea
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap()
    }

    pub(crate) fn queue(&self, repository: &str, name: &str, labels: &[&str]) -> i64 {
        let mut inner = self.lock();
        inner.next += 1;
        let id = inner.next;
        let job = Job {
            id,
            run: id + 5000,
            repository: repository.to_owned(),
            name: name.to_owned(),
            html_url: format!("{}/{repository}/actions/runs/{}/jobs/{id}", inner.url, id + 5000),
            status: "queued".to_owned(),
            labels: labels.iter().map(|label| (*label).to_owned()).collect(),
            attempt: 1,
            runner: None,
        };
        inner.jobs.insert(id, job);
        id
    }

    /// A runner takes a job.
    pub(crate) fn take(&self, id: i64, runner: i64) -> Job {
        let mut inner = self.lock();
        let job = inner.jobs.get_mut(&id).unwrap();
        (job.status, job.runner) = ("in_progress".to_owned(), Some(runner));
        job.clone()
    }

    pub(crate) fn complete(&self, id: i64, _conclusion: &str) {
        let mut inner = self.lock();
        let job = inner.jobs.get_mut(&id).unwrap();
        job.status = "completed".to_owned();
        if let Some(runner) = job.runner {
            inner.runners.remove(&runner);
        }
    }

    pub(crate) fn job(&self, id: i64) -> Option<Job> {
        self.lock().jobs.get(&id).cloned()
    }

    pub(crate) fn queued(&self) -> Vec<i64> {
        self.lock().jobs.values().filter(|job| job.status == "queued").map(|job| job.id).collect()
    }

    pub(crate) fn empty_queue(&self) {
        self.lock().jobs.retain(|_, job| job.status != "queued");
    }

    pub(crate) fn runners(&self) -> Vec<Runner> {
        self.lock().runners.values().cloned().collect()
    }

    pub(crate) fn register(&self, name: &str) -> i64 {
        self.lock().register(name, "/orgs/acme/actions", true)
    }

    pub(crate) fn log(&self, task: i64, lines: &[&str]) {
        let lines = lines.iter().map(|line| (*line).to_owned()).collect();
        self.lock().logs.insert(task, (lines, false));
    }

    pub(crate) fn log_of(&self, task: i64) -> Vec<String> {
        self.lock().logs.get(&task).map(|(lines, _)| lines.clone()).unwrap_or_default()
    }

    /// What happens to the next call of a name.
    pub(crate) fn next(&self, call: &str, fault: Fault) {
        self.lock().faults.push((call.to_owned(), fault));
    }

    pub(crate) fn calls(&self, name: &str) -> u32 {
        self.lock().calls.get(name).copied().unwrap_or(0)
    }

    pub(crate) fn away(&self, away: bool) {
        self.lock().away = away;
    }
}

impl Inner {
    fn register(&mut self, name: &str, scope: &str, ephemeral: bool) -> i64 {
        self.next += 1;
        let (id, name) = (self.next, name.to_owned());
        self.names.insert(id, name.clone());
        self.runners.insert(id, Runner { id, name, scope: scope.to_owned(), ephemeral, disabled: false });
        id
    }

    /// Counts a call; true when its answer is to be lost.
    fn called(&mut self, name: &str) -> bool {
        *self.calls.entry(name.to_owned()).or_default() += 1;
        let at = self.faults.iter().position(|(of, _)| of == name);
        at.map(|at| self.faults.remove(at)).is_some_and(|(_, fault)| fault == Fault::AnswerLost)
    }

    fn shown(&self, job: &Job) -> Value {
        let Job { id, run, repository, .. } = job;
        json!({
            "id": id, "run_id": run, "name": job.name, "labels": job.labels, "run_attempt": job.attempt,
            "url": format!("{}/api/v1/repos/{repository}/actions/jobs/{id}", self.url), "html_url": job.html_url,
            "status": job.status, "runner_id": job.runner,
            "runner_name": job.runner.and_then(|runner| self.names.get(&runner)),
            "created_at": "2026-01-01T00:00:00Z", "started_at": "1970-01-01T00:00:00Z",
        })
    }
}

fn error(status: StatusCode, message: &str) -> Response {
    (status, Json(json!({"message": message}))).into_response()
}

/// An answer that breaks off.
fn lost() -> Response {
    let broken = futures_util::stream::iter([Err::<bytes::Bytes, _>(std::io::Error::other("the connection is cut"))]);
    Body::from_stream(broken).into_response()
}

async fn rest(
    State(gitea): State<Gitea>,
    method: Method,
    Path(path): Path<String>,
    Query(query): Query<BTreeMap<String, String>>,
    headers: HeaderMap,
    body: String,
) -> Response {
    let mut inner = gitea.lock();
    if inner.away {
        return error(StatusCode::BAD_GATEWAY, "away");
    }
    if headers.get("authorization").is_none_or(|value| value != "token the-token") {
        return error(StatusCode::UNAUTHORIZED, "token is required");
    }
    let parts: Vec<&str> = path.split('/').collect();
    let at = parts.iter().position(|part| *part == "actions").unwrap_or(parts.len() - 1);
    let (scope, rest) = (format!("/{}", parts[..=at].join("/")), &parts[at + 1..]);
    let page = |all: Vec<Value>, key: &str| {
        let number = |key: &str, default: usize| query.get(key).and_then(|text| text.parse().ok()).unwrap_or(default);
        let (page, limit) = (number("page", 1), number("limit", 30).min(50));
        let some: Vec<Value> = all.iter().skip((page - 1) * limit).take(limit).cloned().collect();
        Json(json!({key: some, "total_count": all.len()})).into_response()
    };
    match (&method, rest) {
        (&Method::GET, ["jobs"]) => {
            inner.called("jobs");
            let status = query.get("status").cloned().unwrap_or_default();
            let jobs = inner.jobs.values().rev().filter(|job| job.status == status);
            let shown = jobs.map(|job| inner.shown(job)).collect();
            page(shown, "jobs")
        }
        (&Method::GET, ["runners"]) => {
            let runners = inner.runners.values().filter(|runner| runner.scope == scope);
            let shown = runners
                .map(|runner| json!({"id": runner.id, "name": runner.name, "status": "offline", "busy": false}))
                .collect();
            page(shown, "runners")
        }
        (&Method::POST, ["runners", "registration-token"]) => {
            Json(json!({"token": format!("{REGISTRATION_TOKEN} {scope}")})).into_response()
        }
        (_, ["runners", id]) => {
            let id: i64 = id.parse().unwrap();
            if !inner.runners.contains_key(&id) {
                return error(StatusCode::NOT_FOUND, "runner not found");
            }
            match method {
                Method::DELETE => drop(inner.runners.remove(&id)),
                Method::PATCH => {
                    let body: Value = serde_json::from_str(&body).unwrap();
                    inner.runners.get_mut(&id).unwrap().disabled = body["disabled"] == true;
                }
                _ => return Json(json!({"id": id})).into_response(),
            }
            StatusCode::NO_CONTENT.into_response()
        }
        (&Method::GET, ["runs", run]) => {
            let attempt = inner.jobs.values().filter(|job| job.run.to_string() == *run).map(|job| job.attempt).max();
            Json(json!({"run_attempt": attempt.unwrap_or(1)})).into_response()
        }
        (&Method::POST, ["runs", _, "jobs", id, "rerun"]) => {
            inner.called("rerun");
            let old = inner.jobs[&id.parse::<i64>().unwrap()].clone();
            assert_eq!(old.status, "completed", "only what is over runs again");
            inner.next += 1;
            let id = inner.next;
            let job = Job { id, attempt: old.attempt + 1, status: "queued".to_owned(), runner: None, ..old };
            inner.jobs.insert(id, job);
            (StatusCode::CREATED, Json(json!({}))).into_response()
        }
        other => panic!("not played: {other:?} {path}"),
    }
}

async fn protocol(
    State(gitea): State<Gitea>,
    Path(method): Path<String>,
    headers: HeaderMap,
    Json(body): Json<Value>,
) -> Response {
    let mut inner = gitea.lock();
    if inner.away {
        return error(StatusCode::BAD_GATEWAY, "away");
    }
    let cut = inner.called(&method);
    let answer = if method == "Register" {
        let Some(scope) = body["token"].as_str().and_then(|token| token.strip_prefix(REGISTRATION_TOKEN)) else {
            return error(StatusCode::INTERNAL_SERVER_ERROR, "runner registration token has been invalidated");
        };
        let (name, ephemeral) = (body["name"].as_str().unwrap().to_owned(), body["ephemeral"] == true);
        let id = inner.register(&name, scope.trim(), ephemeral);
        json!({"runner": {"id": id.to_string(), "uuid": format!("uuid-{id}"), "token": format!("secret-{id}")}})
    } else {
        let id: i64 = headers["x-runner-uuid"].to_str().unwrap().strip_prefix("uuid-").unwrap().parse().unwrap();
        if !inner.runners.contains_key(&id) || headers["x-runner-token"] != format!("secret-{id}").as_str() {
            return error(StatusCode::INTERNAL_SERVER_ERROR, "unregistered runner");
        }
        match method.as_str() {
            "UpdateLog" => {
                let task: i64 = body["taskId"].as_str().unwrap().parse().unwrap();
                let (lines, sealed) = inner.logs.entry(task).or_default();
                let index: usize = body["index"].as_str().unwrap_or("0").parse().unwrap();
                let rows = body["rows"].as_array().cloned().unwrap_or_default();
                if !*sealed && index <= lines.len() {
                    let known = lines.len() - index;
                    lines.extend(rows.iter().skip(known).map(|row| row["content"].as_str().unwrap().to_owned()));
                    *sealed |= body["noMore"] == true;
                }
                json!({"ackIndex": lines.len().to_string()})
            }
            "UpdateTask" => {
                if body["state"]["result"].is_string() {
                    inner.runners.remove(&id);
                    for job in inner.jobs.values_mut().filter(|job| job.runner == Some(id)) {
                        job.status = "completed".to_owned();
                    }
                }
                json!({"state": {}})
            }
            other => panic!("not played: {other}"),
        }
    };
    if cut { lost() } else { Json(answer).into_response() }
}
