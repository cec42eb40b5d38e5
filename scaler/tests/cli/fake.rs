//! A scaler with one job and one machine, played from an [`Order`] that tests read and change.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    body::Body,
    extract::{Path, Query, Request, State},
    http::{HeaderMap, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post, put},
};
use bytes::Bytes;
use pilotlight_wire::{
    ErrorBody, Usage, Verdict,
    api::{DrainRequest, HoldRequest, JobState, LOG_SIZE_HEADER, LOG_STATE_HEADER, MAX_LOG_ANSWER, ReleaseRequest},
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{net::TcpListener, runtime::Runtime, sync::watch, time::timeout};

/// The token that is accepted.
pub(crate) const TOKEN: &str = "the-token";
const INSTANCE: &str = "0193d5a0-0000-7000-8000-00000000000a";
const NOW: &str = "2026-01-01T00:00:00Z";
/// No test waits longer for a level.
const BOUND: Duration = Duration::from_secs(60);

/// What there is, what is to happen, and what was seen.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) state: JobState,
    pub(crate) verdict: Option<Verdict>,
    pub(crate) exit_code: Option<i32>,
    pub(crate) reason: Option<String>,
    pub(crate) detail: Option<String>,
    pub(crate) usage: Option<Usage>,
    pub(crate) log: Vec<u8>,
    pub(crate) log_gap: bool,
    pub(crate) machine_gone: bool,
    /// The next log answers break off after so many bytes.
    pub(crate) breaks: Vec<usize>,
    /// So many log calls are answered by a web page.
    pub(crate) strangers: u32,
    /// So many cancels are answered 503.
    pub(crate) refuse_cancels: u32,
    /// Status, code and message for a submit.
    pub(crate) refusal: Option<(u16, String, String)>,
    pub(crate) body: Value,
    pub(crate) puts: u32,
    pub(crate) offsets: Vec<u64>,
    pub(crate) cancelled: bool,
    pub(crate) drain: Option<DrainRequest>,
    pub(crate) resumed: bool,
    /// Seconds of the hold of the one machine.
    pub(crate) held: Option<u64>,
    pub(crate) reaped: bool,
}

impl Order {
    pub(crate) fn finish(&mut self, verdict: Verdict, exit_code: Option<i32>) {
        self.state = JobState::Finished;
        self.verdict = Some(verdict);
        self.exit_code = exit_code;
    }

    fn view(&self) -> Value {
        let started = matches!(self.state, JobState::Running | JobState::Finished).then_some(NOW);
        json!({
            "id": self.id, "forge": "direct", "name": self.name, "label": "cpu-small", "state": self.state,
            "verdict": self.verdict, "exit_code": self.exit_code, "reason": self.reason, "instance": INSTANCE,
            "gpus": 0, "queued_at": NOW, "started_at": started, "finished_at": null,
            "phases": {"queued": NOW, "image_ready": NOW, "started": started},
            "detail": self.detail, "usage": self.usage, "cost": null, "log_gap": self.log_gap,
        })
    }

    fn instance(&self) -> Value {
        let phase = if self.machine_gone { "gone" } else { "draining" };
        json!({
            "id": INSTANCE, "pool": "here", "placement": "here", "provider": "local", "phase": phase, "gpus": 0,
            "assignments": [], "created_at": NOW, "ready_at": null, "expires_at": NOW, "held_until": self.held.map(|_| NOW),
            "cause": null,
            "last_sync_at": null,
        })
    }
}

/// A played scaler.
pub(crate) struct Fake {
    order: Arc<watch::Sender<Order>>,
    address: SocketAddr,
    server: Option<Runtime>,
    waiting: Runtime,
}

impl Fake {
    pub(crate) fn start() -> Self {
        let order = Order {
            id: "0193d5a0-0000-7000-8000-000000000001".to_owned(),
            name: "n".to_owned(),
            state: JobState::Queued,
            verdict: None,
            exit_code: None,
            reason: None,
            detail: None,
            usage: None,
            log: Vec::new(),
            log_gap: false,
            machine_gone: false,
            breaks: Vec::new(),
            strangers: 0,
            refuse_cancels: 0,
            refusal: None,
            body: Value::Null,
            puts: 0,
            offsets: Vec::new(),
            cancelled: false,
            drain: None,
            resumed: false,
            held: None,
            reaped: false,
        };
        let waiting = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let (order, _) = watch::channel(order);
        let mut fake = Self { order: Arc::new(order), address: ([127, 0, 0, 1], 0).into(), server: None, waiting };
        fake.restart();
        fake
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Goes away with every connection.
    pub(crate) fn stop(&mut self) {
        self.server.take().unwrap().shutdown_timeout(BOUND);
    }

    /// Comes (back) on the same port.
    pub(crate) fn restart(&mut self) {
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(TcpListener::bind(self.address)).unwrap();
        self.address = listener.local_addr().unwrap();
        let router = router(Arc::clone(&self.order));
        runtime.spawn(async move { axum::serve(listener, router).await });
        self.server = Some(runtime);
    }

    /// Changes the order.
    pub(crate) fn order<R>(&self, change: impl FnOnce(&mut Order) -> R) -> R {
        let mut result = None;
        self.order.send_modify(|order| result = Some(change(order)));
        result.unwrap()
    }

    /// Reads the order.
    pub(crate) fn look<R>(&self, read: impl FnOnce(&Order) -> R) -> R {
        read(&self.order.borrow())
    }

    /// Waits until something is so.
    pub(crate) fn wait(&self, so: impl FnMut(&Order) -> bool) {
        let mut order = self.order.subscribe();
        self.waiting.block_on(async { timeout(BOUND, order.wait_for(so)).await.unwrap().unwrap() });
    }
}

type Shared = State<Arc<watch::Sender<Order>>>;

fn router(order: Arc<watch::Sender<Order>>) -> Router {
    let api = Router::new()
        .route("/jobs", get(async |State(order): Shared| Json(json!([order.borrow().view()]))))
        .route("/jobs/{id}", put(submit).get(job))
        .route("/jobs/{id}/log", get(log))
        .route("/jobs/{id}/cancel", post(cancel))
        .route("/instances", get(instances))
        .route("/pools", get(async || Json(pools())))
        .route("/status", get(status))
        .route("/plan", get(plan))
        .route("/drain", post(drain))
        .route("/resume", post(async |State(order): Shared| order.send_modify(|order| order.resumed = true)))
        .route("/hold", post(hold))
        .route("/release", post(release))
        .route("/orphans", get(async || Json(orphans())))
        .route("/reap", post(reap));
    Router::new().nest("/api/v1", api).layer(middleware::from_fn(authorised)).with_state(order)
}

async fn authorised(request: Request, next: Next) -> Response {
    let given = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    if given == Some(&format!("Bearer {TOKEN}")) {
        next.run(request).await
    } else {
        refuse(StatusCode::UNAUTHORIZED, "unauthorised", "not a good token")
    }
}

fn refuse(status: StatusCode, code: &str, message: &str) -> Response {
    (status, Json(ErrorBody::new(code, message))).into_response()
}

fn unknown() -> Response {
    refuse(StatusCode::NOT_FOUND, "unknown_job", "there is no such job")
}

async fn submit(State(order): Shared, Path(id): Path<String>, Json(body): Json<Value>) -> Response {
    let mut answer = None;
    order.send_modify(|order| {
        order.puts += 1;
        if let Some((status, code, message)) = &order.refusal {
            answer = Some(refuse(StatusCode::from_u16(*status).unwrap(), code, message));
            return;
        }
        order.id = id;
        body["name"].as_str().unwrap_or_default().clone_into(&mut order.name);
        order.body = body;
        answer = Some(Json(order.view()).into_response());
    });
    answer.unwrap()
}

async fn job(State(order): Shared, Path(id): Path<String>) -> Response {
    let order = order.borrow();
    if id == order.id { Json(order.view()).into_response() } else { unknown() }
}

#[derive(Deserialize)]
struct LogQuery {
    offset: u64,
    #[serde(default)]
    follow: u8,
}

async fn log(State(shared): Shared, Path(id): Path<String>, Query(query): Query<LogQuery>) -> Response {
    let offset = usize::try_from(query.offset).unwrap();
    if id != shared.borrow().id {
        return unknown();
    }
    shared.send_modify(|order| order.offsets.push(query.offset));
    if query.follow == 1 {
        let news = |order: &Order| order.log.len() > offset || order.state == JobState::Finished;
        // No news is an answer too.
        let mut order = shared.subscribe();
        drop(timeout(Duration::from_secs(25), order.wait_for(news)).await);
    }
    let (mut stranger, mut break_at) = (false, None);
    shared.send_modify(|order| {
        stranger = order.strangers > 0;
        order.strangers = order.strangers.saturating_sub(1);
        if !stranger && !order.breaks.is_empty() {
            break_at = Some(order.breaks.remove(0));
        }
    });
    if stranger {
        return "<html>Welcome to the hotel's network</html>".into_response();
    }
    let order = shared.borrow().clone();
    let state = if order.state == JobState::Finished { "closed" } else { "open" };
    let mut headers = HeaderMap::new();
    headers.insert(LOG_SIZE_HEADER, order.log.len().to_string().parse().unwrap());
    headers.insert(LOG_STATE_HEADER, state.parse().unwrap());
    let end = order.log.len().min(offset + MAX_LOG_ANSWER);
    let bytes = Bytes::from(order.log).slice(offset..end);
    let body = match break_at {
        None => Body::from(bytes),
        Some(at) => {
            let part = bytes.slice(..at.min(bytes.len()));
            let broken = std::io::Error::other("broken on purpose");
            Body::from_stream(futures_util::stream::iter([Ok(part), Err(broken)]))
        }
    };
    (headers, body).into_response()
}

async fn cancel(State(order): Shared, Path(id): Path<String>) -> Response {
    let mut answer = unknown();
    order.send_modify(|order| {
        if order.refuse_cancels > 0 {
            order.refuse_cancels -= 1;
            answer = refuse(StatusCode::SERVICE_UNAVAILABLE, "busy", "not now");
        } else if id == order.id {
            order.cancelled = true;
            answer = Json(order.view()).into_response();
        }
    });
    answer
}

#[derive(Deserialize)]
struct ListQuery {
    #[serde(default)]
    all: u8,
}

async fn instances(State(order): Shared, Query(query): Query<ListQuery>) -> Json<Value> {
    let order = order.borrow();
    let mut list = Vec::new();
    if !order.machine_gone {
        list.push(order.instance());
    }
    if query.all == 1 {
        list.push(Order { machine_gone: true, ..order.clone() }.instance());
    }
    Json(Value::Array(list))
}

fn pools() -> Value {
    json!([{
        "name": "here", "labels": ["cpu-small"], "instances": 1, "max_instances": 1, "gpus": 0, "gpus_used": 0,
        "jobs_queued": 0, "jobs_running": 0,
        "placements": [{"name": "here", "provider": "local", "health": "ok", "reason": null, "until": null,
                        "instances": 1, "max_instances": 1}],
    }])
}

async fn status() -> Json<Value> {
    Json(json!({
        "instances": 1, "jobs_queued": 0, "jobs_running": 0, "pools": pools(), "version": "0.1.0",
        "alerts": [{"code": "a", "message": "look", "since": NOW}],
    }))
}

async fn plan() -> Json<Value> {
    Json(json!({
        "actions": [{"what": "drain", "subject": INSTANCE, "reason": "idle", "text": "idle for 1m"}],
        "waiting": [], "instances": [], "wake_at": NOW,
    }))
}

async fn drain(State(order): Shared, Json(request): Json<DrainRequest>) -> Json<Value> {
    order.send_modify(|order| order.drain = Some(request));
    Json(json!({"instances": [INSTANCE]}))
}

async fn hold(State(order): Shared, Json(request): Json<HoldRequest>) -> Json<Value> {
    order.send_modify(|order| order.held = Some(request.seconds));
    Json(order.borrow().instance())
}

async fn release(State(order): Shared, Json(_): Json<ReleaseRequest>) -> Json<Value> {
    order.send_modify(|order| order.held = None);
    Json(order.borrow().instance())
}

fn orphans() -> Value {
    json!([{"provider": "local", "instance": INSTANCE, "since": NOW}])
}

async fn reap(State(order): Shared) -> Json<Value> {
    order.send_modify(|order| order.reaped = true);
    Json(orphans())
}
