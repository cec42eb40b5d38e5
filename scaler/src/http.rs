//! The HTTP side: agents, clients, metrics, health (design 7). Without TLS it listens on loopback only.

mod agent;
mod client;
mod error;
mod webhook;

use std::{collections::BTreeMap, io, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{DefaultBodyLimit, Request, State},
    http::{HeaderMap, StatusCode, header::AUTHORIZATION},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post, put},
    serve::ListenerExt,
};
use pilotlight_runtime::clock::Clock;
use pilotlight_wire::ForgeName;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
};
use tokio_util::sync::CancellationToken;
use tower_http::timeout::TimeoutLayer;

use self::error::ApiError;
use crate::{
    config::Rules,
    control::Handle,
    forge::Gitea,
    keys::{AdminToken, Keys},
    logs::LogStore,
    metrics::Metrics,
    store::Store,
};

/// The longest that any request may take; held ones answer after 25 s.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// A silent connection whose other end does not answer probes is given up after 45 s.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(10);
const KEEPALIVE_PROBES: u32 = 3;

/// The largest job that may be submitted, bytes.
const MAX_SUBMIT: usize = 8 * 1024 * 1024;

/// The largest body of an agent's call other than a log upload, bytes.
const MAX_AGENT_BODY: usize = 4 * 1024 * 1024;

/// The largest webhook, bytes: it carries a job and its repository.
const MAX_WEBHOOK: usize = 1024 * 1024;

/// What handlers need. Clones share it.
#[derive(Clone, Debug)]
pub struct App(Arc<Inner>);

impl App {
    /// Takes what handlers need.
    #[must_use]
    pub fn new(inner: Inner) -> Self {
        Self(Arc::new(inner))
    }
}

impl std::ops::Deref for App {
    type Target = Inner;
    fn deref(&self) -> &Inner {
        &self.0
    }
}

/// What handlers need.
#[derive(Debug)]
pub struct Inner {
    /// The world.
    pub control: Handle,
    /// Payloads and settled jobs.
    pub store: Store,
    /// Job logs.
    pub logs: LogStore,
    /// Verifies agents.
    pub keys: Arc<Keys>,
    /// Verifies clients.
    pub admin: AdminToken,
    /// Numbers.
    pub metrics: Metrics,
    /// Time.
    pub clock: Clock,
    /// What may change while the scaler runs.
    pub rules: watch::Receiver<Rules>,
    /// Forges, whose webhooks come here.
    pub forges: Arc<BTreeMap<ForgeName, Gitea>>,
    /// The order of syncs per instance.
    pub syncs: agent::Syncs,
    /// Held requests answer at once when the scaler stops.
    pub shutdown: CancellationToken,
}

pub use agent::Syncs;

/// All routes.
pub fn router(app: App) -> Router {
    let agents = Router::new()
        .route("/agent/v1/sync", post(agent::sync))
        .route("/agent/v1/assignments/{id}/events", post(agent::event))
        .layer(DefaultBodyLimit::max(MAX_AGENT_BODY))
        .route(
            "/agent/v1/assignments/{id}/log",
            put(agent::log).layer(DefaultBodyLimit::max(pilotlight_wire::agent::MAX_LOG_CHUNK)),
        )
        .route_layer(middleware::from_fn_with_state(app.clone(), agent::authenticate));
    let clients = Router::new()
        .route("/api/v1/jobs", get(client::jobs))
        .route("/api/v1/jobs/{id}", get(client::job).put(client::submit))
        .route("/api/v1/jobs/{id}/log", get(client::log))
        .route("/api/v1/jobs/{id}/cancel", post(client::cancel))
        .route("/api/v1/instances", get(client::instances))
        .route("/api/v1/pools", get(client::pools))
        .route("/api/v1/status", get(client::status))
        .route("/api/v1/plan", get(client::plan))
        .route("/api/v1/drain", post(client::drain))
        .route("/api/v1/resume", post(client::resume))
        .route("/api/v1/hold", post(client::hold))
        .route("/api/v1/release", post(client::release))
        .route("/api/v1/orphans", get(client::orphans))
        .route("/api/v1/reap", post(client::reap))
        .route("/metrics", get(metrics))
        .layer(DefaultBodyLimit::max(MAX_SUBMIT))
        .route_layer(middleware::from_fn_with_state(app.clone(), authenticate_client));
    Router::new()
        .route("/agent/v1/enrol", post(agent::enrol).layer(DefaultBodyLimit::max(MAX_AGENT_BODY)))
        .merge(agents)
        .merge(clients)
        .route("/webhooks/gitea/{forge}", post(webhook::gitea).layer(DefaultBodyLimit::max(MAX_WEBHOOK)))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .method_not_allowed_fallback(|| async { ApiError::method_not_allowed() })
        .fallback(|| async { ApiError::not_found("no such path; the API lives under /api/v1") })
        .layer(TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, REQUEST_TIMEOUT))
        .with_state(app)
}

/// Serves until `shutdown`, then lets requests in flight end.
///
/// # Errors
/// When the listener fails.
pub async fn serve(listener: TcpListener, app: App, shutdown: CancellationToken) -> io::Result<()> {
    let listener = listener.tap_io(|stream| {
        if let Err(error) = expect_life(stream) {
            tracing::warn!(%error, "a connection whose other end vanishes will stay");
        }
    });
    axum::serve(listener, router(app).into_make_service()).with_graceful_shutdown(shutdown.cancelled_owned()).await
}

/// A machine or network that vanishes says no goodbye, and a connection on which nothing is sent would stay for ever.
fn expect_life(stream: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_EVERY)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES)?;
    // No TCP_USER_TIMEOUT for data that nobody acknowledges: it would also end the log of a reader who only pauses. The
    // kernel's own bound (tcp_retries2, a quarter of an hour) does.
    Ok(sockopt::set_socket_keepalive(stream, true)?)
}

async fn authenticate_client(State(app): State<App>, request: Request, next: Next) -> Response {
    match bearer(request.headers()) {
        Some(token) if app.admin.verify(token) => next.run(request).await,
        Some(_) => ApiError::unauthorized("the token is not this scaler's admin token").into_response(),
        None => {
            ApiError::unauthorized("send `Authorization: Bearer TOKEN` with the scaler's admin token").into_response()
        }
    }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    headers.get(AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer ")
}

async fn metrics(State(app): State<App>) -> Result<Response, ApiError> {
    let metrics = app.metrics.clone();
    let text = app.control.read(move |world, plan, now| metrics.render(world, plan, now)).await??;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(axum::http::header::CONTENT_TYPE, kind)], text).into_response())
}

/// Ready once the provider's list was read: before that nothing is launched.
async fn ready(State(app): State<App>) -> Result<&'static str, ApiError> {
    let read = app.control.read(|world, _, _| world.list_state().read_at.is_some()).await?;
    if read { Ok("ready\n") } else { Err(ApiError::unavailable("the provider's list was not read yet")) }
}
