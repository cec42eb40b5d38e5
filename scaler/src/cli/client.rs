//! The HTTP client of the scaler's API.

use std::{error::Error as _, time::Duration};

use bytes::Bytes;
use pilotlight_runtime::Report;
use pilotlight_wire::{
    ErrorBody, JobId,
    api::{FOLLOW_HOLD_SECONDS, LOG_SIZE_HEADER, LOG_STATE_HEADER},
};
use reqwest::{Method, StatusCode, redirect};
use serde::{Serialize, de::DeserializeOwned};
use tokio::time::timeout;

use super::{
    access::Access,
    exit::{BAD_INPUT, Failure, NO_PERMISSION, UNREACHABLE},
    screen::escape,
};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// For a whole call that is not held.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// For the next sign of life of a log answer, beyond the time it may be held.
const LOG_TIMEOUT: Duration = Duration::from_secs(FOLLOW_HOLD_SECONDS + 10);

/// Why a call brought nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CallError {
    /// Nobody answered, or not the scaler, or it is in trouble itself. It may be well later.
    #[error("cannot reach the scaler at {url}: {why}")]
    NoAnswer { url: String, why: String },
    /// The token is not good enough.
    #[error("the scaler at {url} refused the token ({token_from}): {why}")]
    Denied { url: String, token_from: String, why: String },
    /// The scaler understood and said no.
    #[error("{}", body.message)]
    Refused { status: u16, body: ErrorBody },
}

impl From<CallError> for Failure {
    fn from(error: CallError) -> Self {
        // It may be the scaler's text, and a failure's own lines are told apart by newlines.
        let text = escape(&error.to_string()).into_owned();
        match error {
            CallError::NoAnswer { .. } => {
                let hint = "is it running? start it with `pilotlight run --config FILE`, or name another with --url";
                Self::new(UNREACHABLE, format!("{text}; {hint}"))
            }
            CallError::Denied { .. } => Self::new(NO_PERMISSION, text),
            CallError::Refused { .. } => Self::new(BAD_INPUT, text),
        }
    }
}

/// Talks to one scaler.
#[derive(Debug)]
pub(crate) struct Client {
    http: reqwest::Client,
    access: Access,
}

/// A part of a job's log, still arriving.
#[derive(Debug)]
pub(crate) struct LogAnswer {
    response: reqwest::Response,
    url: String,
    /// Bytes that the scaler has.
    pub(crate) size: u64,
    /// Whether there will be no more.
    pub(crate) closed: bool,
}

impl LogAnswer {
    /// The next bytes; `None` at the end of the answer.
    pub(crate) async fn chunk(&mut self) -> Result<Option<Bytes>, CallError> {
        match timeout(LOG_TIMEOUT, self.response.chunk()).await {
            Ok(Ok(chunk)) => Ok(chunk),
            Ok(Err(error)) => Err(CallError::NoAnswer { url: self.url.clone(), why: reason(&error) }),
            Err(_) => Err(CallError::NoAnswer { url: self.url.clone(), why: "the log stopped midway".to_owned() }),
        }
    }
}

impl Client {
    pub(crate) fn new(access: Access) -> Result<Self, Failure> {
        let mut builder = reqwest::Client::builder()
            // A redirect is somebody else's answer, and must not get the token.
            .redirect(redirect::Policy::none())
            .connect_timeout(CONNECT_TIMEOUT);
        if access.loopback {
            builder = builder.no_proxy();
        }
        if access.url.starts_with("http://") {
            // Certificates are not needed, may be missing on a small box, and take time to load.
            builder = builder.tls_certs_only([]);
        }
        let http = builder
            .build()
            .map_err(|error| Failure::new(UNREACHABLE, format!("cannot set up HTTP: {}", Report(&error))))?;
        Ok(Self { http, access })
    }

    pub(crate) fn url(&self) -> &str {
        &self.access.url
    }

    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, CallError> {
        self.json(self.request(Method::GET, path)).await
    }

    pub(crate) async fn post<T: DeserializeOwned>(&self, path: &str) -> Result<T, CallError> {
        self.json(self.request(Method::POST, path)).await
    }

    pub(crate) async fn send<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, CallError> {
        self.json(self.request(method, path).json(body)).await
    }

    /// A call whose answer has nothing that we need.
    pub(crate) async fn command(&self, path: &str) -> Result<(), CallError> {
        let response = self.answer(self.request(Method::POST, path).timeout(CALL_TIMEOUT)).await?;
        self.accepted(response).await.map(drop)
    }

    /// Asks for a job's log from `offset` on; with `follow` the scaler holds the call until there is news.
    pub(crate) async fn log(&self, id: JobId, offset: u64, follow: bool) -> Result<LogAnswer, CallError> {
        let mut request = self.request(Method::GET, &format!("jobs/{id}/log")).query(&[("offset", offset)]);
        if follow {
            request = request.query(&[("follow", 1)]);
        }
        let response = match timeout(LOG_TIMEOUT, self.answer(request)).await {
            Ok(response) => self.accepted(response?).await?,
            Err(_) => return Err(self.no_answer("it took too long")),
        };
        let header = |name| response.headers().get(name).and_then(|value| value.to_str().ok());
        let size = header(LOG_SIZE_HEADER).and_then(|text| text.parse().ok());
        let closed = match header(LOG_STATE_HEADER) {
            Some("open") => Some(false),
            Some("closed") => Some(true),
            _ => None,
        };
        // Without them these are not a job's bytes, and must not come to its reader.
        let (Some(size), Some(closed)) = (size, closed) else { return Err(self.foreign(response.status())) };
        Ok(LogAnswer { url: self.access.url.clone(), response, size, closed })
    }

    fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        let request = self.http.request(method, format!("{}/api/v1/{path}", self.access.url));
        match &self.access.token {
            Some(token) => request.bearer_auth(token.expose()),
            None => request,
        }
    }

    async fn json<T: DeserializeOwned>(&self, request: reqwest::RequestBuilder) -> Result<T, CallError> {
        let response = self.answer(request.timeout(CALL_TIMEOUT)).await?;
        let response = self.accepted(response).await?;
        let status = response.status();
        let bytes = response.bytes().await.map_err(|error| self.no_answer(&reason(&error)))?;
        serde_json::from_slice(&bytes).map_err(|_| self.foreign(status))
    }

    async fn answer(&self, request: reqwest::RequestBuilder) -> Result<reqwest::Response, CallError> {
        request.send().await.map_err(|error| self.no_answer(&reason(&error)))
    }

    async fn accepted(&self, response: reqwest::Response) -> Result<reqwest::Response, CallError> {
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let body: Option<ErrorBody> = match timeout(CALL_TIMEOUT, response.bytes()).await {
            Ok(Ok(bytes)) => serde_json::from_slice(&bytes).ok(),
            _ => None,
        };
        let message = body.as_ref().map_or_else(|| status.to_string(), |body| body.message.clone());
        if matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
            let (url, token_from) = (self.access.url.clone(), self.access.token_from.clone());
            return Err(CallError::Denied { url, token_from, why: message });
        }
        let passing = matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS);
        match body {
            Some(body) if status.is_client_error() && !passing => {
                Err(CallError::Refused { status: status.as_u16(), body })
            }
            Some(_) => Err(self.no_answer(&message)),
            None => Err(self.foreign(status)),
        }
    }

    fn no_answer(&self, why: &str) -> CallError {
        CallError::NoAnswer { url: self.access.url.clone(), why: why.to_owned() }
    }

    fn foreign(&self, status: StatusCode) -> CallError {
        self.no_answer(&format!("what answers there is not a Pilotlight scaler ({status})"))
    }
}

/// The innermost cause, which is the one that people understand (`Connection refused`).
fn reason(error: &reqwest::Error) -> String {
    if error.is_timeout() {
        return "it took too long".to_owned();
    }
    let mut cause = error.source();
    while let Some(deeper) = cause.and_then(|cause| cause.source()) {
        cause = Some(deeper);
    }
    cause.map_or_else(|| error.to_string(), ToString::to_string)
}
