//! The agent's HTTP: four calls, and one rule on what their answers mean (link 2).
//!
//! Only two answers say something: a success in our shape, and an error in our shape that its route defines. All else
//! (401, 403, 404, 5xx, redirects, another service's 200, a captive proxy's page) is *no answer*: the lease runs on
//! and the call is made again.

use std::{fmt, sync::Arc, time::Duration};

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use bytes::Bytes;
use pilotlight_runtime::Report;
use pilotlight_wire::{
    AssignmentId, ErrorBody, Secret,
    agent::{
        AssignmentEvent, EnrolRequest, EnrolResponse, EventAck, LogSize, SYNC_HOLD_SECONDS, SyncRequest, SyncResponse,
    },
};
use reqwest::{Method, RequestBuilder, StatusCode, header::CONTENT_TYPE, redirect::Policy};
use serde::de::DeserializeOwned;

/// The longest pause between two tries of a call.
pub const MAX_BACKOFF: Duration = Duration::from_secs(15);

/// The largest answer that is read: a sync may carry jobs with large environments.
const MAX_ANSWER: usize = 16 * 1024 * 1024;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
const SYNC_TIMEOUT: Duration = Duration::from_secs(SYNC_HOLD_SECONDS + 10);

/// Pauses between tries: 100 ms, doubling to [`MAX_BACKOFF`], with jitter, without end.
#[must_use]
pub fn backoff() -> ExponentialBackoff {
    ExponentialBuilder::default()
        .with_min_delay(Duration::from_millis(100))
        .with_max_delay(MAX_BACKOFF)
        .without_max_times()
        .with_jitter()
        .build()
}

/// What an answer means.
#[derive(Debug)]
pub enum Answer<T> {
    /// Yes.
    Ok(T),
    /// 410 `instance_gone`: end everything and leave.
    Gone,
    /// 409 on enrolment: another nonce was first.
    Refused(String),
    /// 409 on events or log: the event number or the offset that the scaler expects.
    Expected(u64),
    /// None.
    None(NoAnswer),
}

impl<T> fmt::Display for Answer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ok(_) => f.write_str("ok"),
            Self::Gone => f.write_str("the instance is gone"),
            Self::Refused(message) => write!(f, "refused: {message}"),
            Self::Expected(expected) => write!(f, "expected {expected}"),
            Self::None(why) => write!(f, "{}", Report(why)),
        }
    }
}

/// Why an answer counts as none.
#[derive(Debug, thiserror::Error)]
pub enum NoAnswer {
    /// Nothing came, or not all of it.
    #[error("the scaler did not answer")]
    Transport(#[source] reqwest::Error),
    /// A status that says nothing on this route.
    #[error("the answer was {0}")]
    Status(StatusCode),
    /// A success that is not ours.
    #[error("the answer was not in our format")]
    Foreign(#[source] serde_json::Error),
    /// More than any answer of ours.
    #[error("the answer was longer than {MAX_ANSWER} bytes")]
    TooLong,
}

/// A scaler, by its URL.
#[derive(Clone, Debug)]
pub struct Client {
    http: reqwest::Client,
    base: Arc<str>,
}

impl Client {
    /// A client of the scaler at `base` (the bootstrap's URL). It follows no redirects and no proxy of the
    /// environment.
    ///
    /// # Errors
    /// When TLS cannot be set up.
    pub fn new(base: &str) -> Result<Self, reqwest::Error> {
        let http = reqwest::Client::builder()
            .redirect(Policy::none())
            .no_proxy()
            .connect_timeout(CONNECT_TIMEOUT)
            .user_agent(concat!("pilotlight-agent/", env!("CARGO_PKG_VERSION")))
            .build()?;
        Ok(Self { http, base: base.trim_end_matches('/').into() })
    }

    /// Exchanges the secret for a bearer.
    pub async fn enrol(&self, request: &EnrolRequest) -> Answer<EnrolResponse> {
        let call = self.http.post(format!("{}/agent/v1/enrol", self.base)).timeout(CALL_TIMEOUT).json(request);
        answer(call, |error| Some(Answer::Refused(error.message))).await
    }

    /// A client with the bearer that enrolment gave.
    #[must_use]
    pub fn session(&self, bearer: Secret) -> Session {
        Session { client: self.clone(), bearer }
    }
}

/// A scaler that has taken this agent in.
#[derive(Clone, Debug)]
pub struct Session {
    client: Client,
    bearer: Secret,
}

impl Session {
    /// Says how things are and hears what to do; the scaler holds it while there is nothing to say.
    pub async fn sync(&self, request: &SyncRequest) -> Answer<SyncResponse> {
        answer(self.call(Method::POST, "sync").timeout(SYNC_TIMEOUT).json(request), |_| None).await
    }

    /// Says what happened to an assignment. Both answers carry the number of the event that is expected next.
    pub async fn event(&self, id: AssignmentId, event: &AssignmentEvent) -> Answer<u64> {
        let call = self.call(Method::POST, &format!("assignments/{id}/events")).json(event);
        answer(call, |error| error.expected.map(Answer::Expected)).await.map(|ack: EventAck| ack.expected)
    }

    /// Appends job bytes at `offset`. Both answers carry the size of the scaler's log.
    pub async fn log(&self, id: AssignmentId, offset: u64, bytes: Bytes) -> Answer<u64> {
        let call = self
            .call(Method::PUT, &format!("assignments/{id}/log"))
            .query(&[("offset", offset)])
            .header(CONTENT_TYPE, "application/octet-stream")
            .body(bytes);
        answer(call, |error| error.size.map(Answer::Expected)).await.map(|log: LogSize| log.size)
    }

    fn call(&self, method: Method, route: &str) -> RequestBuilder {
        self.client
            .http
            .request(method, format!("{}/agent/v1/{route}", self.client.base))
            // The one use of the bearer: the header that it is for.
            .bearer_auth(self.bearer.expose())
            .timeout(CALL_TIMEOUT)
    }
}

impl<T> Answer<T> {
    fn map<U>(self, f: impl FnOnce(T) -> U) -> Answer<U> {
        match self {
            Self::Ok(value) => Answer::Ok(f(value)),
            Self::Gone => Answer::Gone,
            Self::Refused(message) => Answer::Refused(message),
            Self::Expected(expected) => Answer::Expected(expected),
            Self::None(why) => Answer::None(why),
        }
    }
}

/// Makes a call and judges its answer. `conflict` says what a 409 in our shape means on this route, if anything.
async fn answer<T: DeserializeOwned>(
    call: RequestBuilder,
    conflict: impl FnOnce(ErrorBody) -> Option<Answer<T>>,
) -> Answer<T> {
    let (status, body) = match exchange(call).await {
        Ok(answer) => answer,
        Err(why) => return Answer::None(why),
    };
    match status {
        StatusCode::OK => serde_json::from_slice(&body).map_or_else(|e| Answer::None(NoAnswer::Foreign(e)), Answer::Ok),
        StatusCode::GONE => match serde_json::from_slice::<ErrorBody>(&body) {
            Ok(error) if error.code == ErrorBody::INSTANCE_GONE => Answer::Gone,
            _ => Answer::None(NoAnswer::Status(status)),
        },
        StatusCode::CONFLICT => {
            serde_json::from_slice(&body).ok().and_then(conflict).unwrap_or(Answer::None(NoAnswer::Status(status)))
        }
        _ => Answer::None(NoAnswer::Status(status)),
    }
}

async fn exchange(call: RequestBuilder) -> Result<(StatusCode, Vec<u8>), NoAnswer> {
    let mut response = call.send().await.map_err(NoAnswer::Transport)?;
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(NoAnswer::Transport)? {
        if body.len() + chunk.len() > MAX_ANSWER {
            return Err(NoAnswer::TooLong);
        }
        body.extend_from_slice(&chunk);
    }
    Ok((response.status(), body))
}

#[cfg(test)]
mod tests {
    use axum::{Router, http::HeaderMap, response::Redirect, routing::post};
    use tokio::net::TcpListener;

    use super::*;

    async fn client(router: Router) -> Session {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        // With a slash too many, as people write URLs.
        let url = format!("http://{}/", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, router).await });
        Client::new(&url).unwrap().session(Secret::new("the-bearer"))
    }

    fn request() -> SyncRequest {
        SyncRequest { seq: pilotlight_wire::agent::Seq { run: 1, n: 1 }, assignments: vec![], sample: None, note: None }
    }

    #[tokio::test]
    async fn an_endless_answer_is_cut_off() {
        let endless =
            || futures_util::stream::repeat(Ok::<_, std::convert::Infallible>(Bytes::from_static(&[b' '; 65536])));
        let router =
            Router::new().route("/agent/v1/sync", post(async move || axum::body::Body::from_stream(endless())));
        let answer = client(router).await.sync(&request()).await;
        assert!(matches!(answer, Answer::None(NoAnswer::TooLong)), "{answer}");
    }

    #[tokio::test]
    async fn the_bearer_goes_to_the_scaler_and_a_redirect_is_not_followed() {
        let router = Router::new()
            .route(
                "/agent/v1/sync",
                post(|headers: HeaderMap| async move {
                    assert_eq!(headers["authorization"], "Bearer the-bearer");
                    Redirect::temporary("/elsewhere")
                }),
            )
            .route(
                "/elsewhere",
                post(|| async { r#"{"directives":[],"lease_seconds":1,"server_time":"2026-01-01T00:00:00Z"}"# }),
            );
        let answer = client(router).await.sync(&request()).await;
        assert!(matches!(answer, Answer::None(NoAnswer::Status(StatusCode::TEMPORARY_REDIRECT))), "{answer}");
    }

    #[tokio::test]
    async fn a_scaler_that_is_not_there_is_no_answer() {
        let session = Client::new("http://127.0.0.1:1").unwrap().session(Secret::new("the-bearer"));
        let answer = session.sync(&request()).await;
        assert!(matches!(answer, Answer::None(NoAnswer::Transport(_))), "{answer}");
        assert!(answer.to_string().starts_with("the scaler did not answer: "), "{answer}");
    }
}
