//! The calls, and the shape of their answers (spec gitea 2, 3, 5).

use std::{path::PathBuf, sync::Arc, time::Duration};

use jiff::Timestamp;
use reqwest::{Method, RequestBuilder, StatusCode};
use serde::{Deserialize, Deserializer, de::DeserializeOwned};
use serde_json::{Value, json};

use super::ForgeError;
use crate::config::Scope;

/// How long a call may take. A reply to `Register` that is lost costs a sweep, so no call is cut short lightly.
const TIMEOUT: Duration = Duration::from_secs(30);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The most that one page holds (spec gitea 3).
const PAGE: usize = 50;

/// Pages that are read at most: ten thousand jobs are more than any pool serves.
const MOST_PAGES: usize = 200;

/// The largest answer that is read.
const MAX_ANSWER: usize = 16 * 1024 * 1024;

/// A client of one server. Clones share it.
#[derive(Clone, Debug)]
pub struct Api {
    http: reqwest::Client,
    base: Arc<str>,
    token_file: Arc<PathBuf>,
}

/// A repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repository {
    /// Who it belongs to.
    pub owner: String,
    /// Its name.
    pub name: String,
}

/// A job, as the REST API has it.
#[derive(Clone, Debug, Deserialize)]
pub struct Job {
    /// Its number; a re-run has another.
    pub id: i64,
    /// Its URL in the API, the only place where its repository is named.
    pub url: String,
    /// Where a person reads about it.
    #[serde(default)]
    pub html_url: String,
    /// The number of its run.
    pub run_id: i64,
    /// Its name.
    #[serde(default)]
    pub name: String,
    /// `runs-on`, evaluated.
    #[serde(default, deserialize_with = "or_default")]
    pub labels: Vec<String>,
    /// Which attempt, from 1.
    #[serde(default)]
    pub run_attempt: u32,
    /// The runner that took it.
    #[serde(default)]
    pub runner_id: Option<i64>,
    /// Its name, which outlives it.
    #[serde(default)]
    pub runner_name: Option<String>,
    /// When it was made.
    pub created_at: Timestamp,
    /// `queued`, `in_progress`, `waiting` or `completed`.
    #[serde(default)]
    pub status: String,
}

/// A registered runner.
#[derive(Clone, Debug, Deserialize)]
pub struct Runner {
    /// Its number.
    pub id: i64,
    /// Its name, not unique.
    pub name: String,
    /// `online` or `offline`: whether it called in the last minute.
    #[serde(default)]
    pub status: String,
}

/// What `Register` answers. The token is shown only here.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Registered {
    /// Its number, a string in JSON.
    #[serde(deserialize_with = "number")]
    pub(super) id: i64,
    /// What it says who it is.
    pub(super) uuid: String,
    /// What it proves that with.
    pub(super) token: pilotlight_wire::Secret,
}

/// A list may be `null` when it is empty.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(deserializer: D) -> Result<T, D::Error> {
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

/// Numbers of 64 bits are strings in the runner protocol's JSON.
fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i64, D::Error> {
    let value = Value::deserialize(deserializer)?;
    let parsed = value.as_i64().or_else(|| value.as_str()?.parse().ok());
    parsed.ok_or_else(|| serde::de::Error::custom("a number is wanted"))
}

impl Job {
    /// Whose job it is: in the URL, behind `/repos/`.
    #[must_use]
    pub fn repository(&self) -> Option<Repository> {
        let (_, path) = self.url.split_once("/repos/")?;
        let mut parts = path.split('/');
        Some(Repository { owner: parts.next()?.to_owned(), name: parts.next()?.to_owned() })
    }
}

impl std::fmt::Display for Repository {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.owner, self.name)
    }
}

impl Repository {
    /// `owner/name`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (owner, name) = text.split_once('/')?;
        Some(Self { owner: owner.to_owned(), name: name.to_owned() })
    }

    /// What the API has under it.
    #[must_use]
    pub fn actions(&self) -> String {
        format!("/repos/{}/{}/actions", self.owner, self.name)
    }
}

impl Scope {
    /// What the API has under it.
    #[must_use]
    pub fn actions(&self) -> String {
        match self {
            Self::Site => "/admin/actions".to_owned(),
            Self::Organisation(name) => format!("/orgs/{name}/actions"),
            Self::Repository { owner, name } => format!("/repos/{owner}/{name}/actions"),
        }
    }
}

impl Api {
    /// A client; the token is read anew at each call.
    ///
    /// # Errors
    /// When TLS cannot be set up.
    pub fn new(base: &str, token_file: &std::path::Path) -> Result<Self, reqwest::Error> {
        let http = reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(TIMEOUT)
            .user_agent(concat!("pilotlight/", env!("CARGO_PKG_VERSION")))
            .build()?;
        Ok(Self { http, base: base.into(), token_file: Arc::new(token_file.to_owned()) })
    }

    /// All jobs of a scope in a state, page by page.
    ///
    /// # Errors
    /// When a page cannot be read: half a list says nothing.
    pub async fn jobs(&self, actions: &str, status: &str) -> Result<Vec<Job>, ForgeError> {
        #[derive(Deserialize)]
        struct Page {
            #[serde(default, deserialize_with = "or_default")]
            jobs: Vec<Job>,
            #[serde(default)]
            total_count: usize,
        }
        let mut all: Vec<Job> = Vec::new();
        for page in 1..=MOST_PAGES {
            // Newest first: what is added while we read moves jobs to later pages, where they are seen twice and not
            // missed.
            let path = format!("{actions}/jobs?status={status}&sort=id&order=desc&limit={PAGE}&page={page}");
            let Page { jobs, total_count } = self.call(Method::GET, &path, None).await?;
            let last = jobs.is_empty() || jobs.len() + (page - 1) * PAGE >= total_count;
            all.extend(jobs);
            if last {
                break;
            }
        }
        all.sort_by_key(|job| job.id);
        all.dedup_by_key(|job| job.id);
        Ok(all)
    }

    /// All runners that are registered in a scope.
    ///
    /// # Errors
    /// As [`Api::jobs`].
    pub async fn runners(&self, actions: &str) -> Result<Vec<Runner>, ForgeError> {
        #[derive(Deserialize)]
        struct Page {
            #[serde(default, deserialize_with = "or_default")]
            runners: Vec<Runner>,
            #[serde(default)]
            total_count: usize,
        }
        let mut all = Vec::new();
        for page in 1..=MOST_PAGES {
            let path = format!("{actions}/runners?limit={PAGE}&page={page}");
            let Page { runners, total_count } = self.call(Method::GET, &path, None).await?;
            let last = runners.is_empty() || runners.len() + (page - 1) * PAGE >= total_count;
            all.extend(runners);
            if last {
                break;
            }
        }
        Ok(all)
    }

    /// Whether a runner is registered.
    ///
    /// # Errors
    /// When that is not known.
    pub async fn has_runner(&self, actions: &str, id: i64) -> Result<bool, ForgeError> {
        match self.call::<Value>(Method::GET, &format!("{actions}/runners/{id}"), None).await {
            Ok(_) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Gives a runner no more jobs. One that is not there needs none.
    ///
    /// # Errors
    /// When the server refuses or does not answer.
    pub async fn disable_runner(&self, actions: &str, id: i64) -> Result<(), ForgeError> {
        let body = json!({"disabled": true});
        gone_is_well(self.call::<Value>(Method::PATCH, &format!("{actions}/runners/{id}"), Some(body)).await)
    }

    /// Removes a registration. The server does so even while a job runs on it, which then hangs (spec gitea 3).
    ///
    /// # Errors
    /// When the server refuses or does not answer.
    pub async fn delete_runner(&self, actions: &str, id: i64) -> Result<(), ForgeError> {
        gone_is_well(self.call::<Value>(Method::DELETE, &format!("{actions}/runners/{id}"), None).await)
    }

    /// The token that registers runners in a scope. Fetched before each registration: it may be reset.
    ///
    /// # Errors
    /// When the server refuses or does not answer.
    pub async fn registration_token(&self, actions: &str) -> Result<pilotlight_wire::Secret, ForgeError> {
        #[derive(Deserialize)]
        struct Answer {
            token: pilotlight_wire::Secret,
        }
        let path = format!("{actions}/runners/registration-token");
        Ok(self.call::<Answer>(Method::POST, &path, None).await?.token)
    }

    /// Makes a call of the REST API.
    ///
    /// # Errors
    /// When the server refuses, does not answer, or answers something else.
    pub async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<Value>,
    ) -> Result<T, ForgeError> {
        let token = tokio::fs::read_to_string(&*self.token_file)
            .await
            .map_err(|source| ForgeError::Token { path: self.token_file.display().to_string(), source })?;
        let call = format!("{method} {path}");
        let mut request = self
            .http
            .request(method, format!("{}/api/v1{path}", self.base))
            .header("authorization", format!("token {}", token.trim()));
        if let Some(body) = body {
            request = request.json(&body);
        }
        exchange(request, call).await
    }

    /// Makes a call of the runner protocol: Connect, unary, JSON (spec gitea 5).
    ///
    /// # Errors
    /// As [`Api::call`].
    pub async fn runner_call<T: DeserializeOwned>(
        &self,
        name: &str,
        body: &Value,
        identity: Option<(&str, &pilotlight_wire::Secret)>,
    ) -> Result<T, ForgeError> {
        let url = format!("{}/api/actions/runner.v1.RunnerService/{name}", self.base);
        let mut request = self.http.post(url).header("connect-protocol-version", "1").json(body);
        if let Some((uuid, token)) = identity {
            // The one use of the runner's token here: the header that it is for.
            request = request.header("x-runner-uuid", uuid).header("x-runner-token", token.expose());
        }
        exchange(request, name.to_owned()).await
    }
}

fn gone_is_well(answer: Result<Value, ForgeError>) -> Result<(), ForgeError> {
    match answer {
        Err(error) if !error.is_not_found() => Err(error),
        _ => Ok(()),
    }
}

async fn exchange<T: DeserializeOwned>(request: RequestBuilder, call: String) -> Result<T, ForgeError> {
    let transport = |source| ForgeError::Transport { call: call.clone(), source };
    let mut response = request.send().await.map_err(transport)?;
    let status = response.status();
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(transport)? {
        if body.len() + chunk.len() > MAX_ANSWER {
            let message = format!(": the answer is longer than {MAX_ANSWER} bytes");
            return Err(ForgeError::Status { call, status, message });
        }
        body.extend_from_slice(&chunk);
    }
    if !status.is_success() {
        return Err(ForgeError::Status { call, status, message: said(status, &body) });
    }
    let body = if body.is_empty() { &b"null"[..] } else { &body };
    serde_json::from_slice(body).map_err(|source| ForgeError::Body { call, source })
}

/// What the server said, with what that usually means.
fn said(status: StatusCode, body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Said {
        #[serde(default)]
        message: String,
    }
    let said = serde_json::from_slice::<Said>(body).map(|said| said.message).unwrap_or_default();
    let said: String = said.chars().filter(|c| !c.is_control()).take(300).collect();
    let said = if said.is_empty() { String::new() } else { format!(": {said}") };
    let hint = match status {
        StatusCode::UNAUTHORIZED => "; the token is not valid (any more)",
        StatusCode::FORBIDDEN => "; the token lacks a scope, or its user a right: see `pilotlight doctor gitea`",
        _ => "",
    };
    format!("{said}{hint}")
}
