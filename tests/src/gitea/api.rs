//! The REST API with one user's rights.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use base64::{Engine, prelude::BASE64_STANDARD};
use serde::de::DeserializeOwned;
use serde_json::Value;
use ureq::{Agent, Body, http};

/// The longest that a single answer may take.
const ANSWER: Duration = Duration::from_secs(30);

/// A client of `/api/v1`.
#[derive(Clone, Debug)]
pub struct Api {
    agent: Agent,
    url: String,
    credentials: Credentials,
}

/// Who asks.
#[derive(Clone, Debug)]
pub(super) enum Credentials {
    Nobody,
    Token(String),
    /// User and password; enough to make a token.
    Password(String, String),
}

/// An answer, whatever its status.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The HTTP status.
    pub status: u16,
    /// `X-Total-Count`, where a list sends it.
    pub total: Option<u64>,
    /// The body as text.
    pub body: String,
}

impl Api {
    pub(super) fn new(url: &str, credentials: Credentials) -> Self {
        Self { agent: agent(), url: url.to_owned(), credentials }
    }

    /// A client of a server at this URL, with a token.
    #[must_use]
    pub fn with_token(url: &str, token: &str) -> Self {
        Self::new(url, Credentials::Token(token.to_owned()))
    }

    /// The server's URL, without a slash at the end.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The token, to be written into a config; empty for a client without one.
    #[must_use]
    pub fn secret(&self) -> &str {
        match &self.credentials {
            Credentials::Token(token) => token,
            Credentials::Nobody | Credentials::Password(..) => "",
        }
    }

    /// Sends a request to a path beneath `/api/v1`. Every status is an answer.
    ///
    /// # Errors
    /// When nobody answers.
    pub fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Answer> {
        let mut request = http::Request::builder().method(method).uri(format!("{}/api/v1{path}", self.url));
        match &self.credentials {
            Credentials::Nobody => {}
            Credentials::Token(token) => request = request.header("authorization", format!("token {token}")),
            Credentials::Password(user, password) => {
                let pair = BASE64_STANDARD.encode(format!("{user}:{password}"));
                request = request.header("authorization", format!("Basic {pair}"));
            }
        }
        let answer = match body {
            Some(body) => self.agent.run(request.header("content-type", "application/json").body(body.to_string())?),
            None => self.agent.run(request.body(())?),
        };
        Answer::read(answer.with_context(|| format!("{method} {path}"))?)
    }

    /// As [`Api::ask`], and the answer must be a good one.
    ///
    /// # Errors
    /// When nobody answers, or with another status than 2xx; the error holds the answer.
    pub fn send(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Answer> {
        let answer = self.ask(method, path, body)?;
        ensure!(answer.is_good(), "{method} {path}: {} {}", answer.status, answer.body);
        Ok(answer)
    }

    /// GETs JSON.
    ///
    /// # Errors
    /// As [`Api::send`], or when the answer is something else.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        self.send("GET", path, None)?.json()
    }

    /// POSTs JSON.
    ///
    /// # Errors
    /// As [`Api::get`].
    pub fn post<T: DeserializeOwned>(&self, path: &str, body: &Value) -> Result<T> {
        self.send("POST", path, Some(body))?.json()
    }

    /// All pages of a list, whose entries lie in the answer's `field`.
    ///
    /// # Errors
    /// As [`Api::get`].
    pub(super) fn pages<T: DeserializeOwned>(&self, path: &str, field: &str) -> Result<Vec<T>> {
        let separator = if path.contains('?') { '&' } else { '?' };
        let mut found = Vec::new();
        for page in 1.. {
            let mut answer: Value = self.get(&format!("{path}{separator}page={page}&limit={PAGE}"))?;
            let entries: Vec<T> = serde_json::from_value(answer[field].take())
                .with_context(|| format!("{field} of {path}, page {page}"))?;
            let last = entries.len() < PAGE;
            found.extend(entries);
            if last {
                break;
            }
        }
        Ok(found)
    }
}

/// As many entries as Gitea gives at once.
const PAGE: usize = 50;

impl Answer {
    pub(super) fn read(answer: http::Response<Body>) -> Result<Self> {
        let total = answer.headers().get("x-total-count").and_then(|total| total.to_str().ok()?.parse().ok());
        let status = answer.status().as_u16();
        Ok(Self { status, total, body: answer.into_body().read_to_string()? })
    }

    /// Whether the status is 2xx.
    #[must_use]
    pub fn is_good(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// The body as JSON.
    ///
    /// # Errors
    /// When it is something else.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_str(&self.body).with_context(|| format!("unexpected answer: {}", self.body))
    }
}

/// A client for which every status is an answer, redirects too.
pub(super) fn agent() -> Agent {
    let config = Agent::config_builder();
    config.http_status_as_error(false).max_redirects(0).timeout_global(Some(ANSWER)).proxy(None).build().into()
}
