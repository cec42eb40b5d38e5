//! A scaler as the link sees it: it remembers, and its answers can be spoilt.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use axum::{
    Json, Router,
    body::Bytes,
    extract::{DefaultBodyLimit, Path, Query, State},
    http::{HeaderMap, StatusCode, header},
    response::{Html, IntoResponse, Response},
    routing::{post, put},
};
use jiff::Timestamp;
use pilotlight_wire::{
    AssignmentId, ErrorBody, Secret,
    agent::{
        AssignmentEvent, AssignmentEventKind, Directive, EnrolRequest, EnrolResponse, EventAck, LogSize, Policy,
        SYNC_HOLD_SECONDS, Seq, Start, SyncRequest, SyncResponse,
    },
};
use serde::Deserialize;
use tokio::{net::TcpListener, sync::watch, time::timeout};

/// How an answer is spoilt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// Done, but the answer is lost.
    Lost,
    /// Not done.
    Status(u16),
    /// A captive proxy's page, with success.
    Page,
    /// Another service's JSON, with success.
    Json,
    /// Elsewhere.
    Redirect,
    /// The instance is gone.
    Gone,
}

pub(super) const FOREIGN: [Fault; 10] = [
    // Means something on enrolment only.
    Fault::Status(409),
    Fault::Status(401),
    Fault::Status(403),
    Fault::Status(404),
    Fault::Status(410),
    Fault::Status(500),
    Fault::Status(503),
    Fault::Page,
    Fault::Json,
    Fault::Redirect,
];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Route {
    Enrol,
    Sync,
    Events,
    Log,
}

pub(super) const ROUTES: [Route; 4] = [Route::Enrol, Route::Sync, Route::Events, Route::Log];

#[derive(Default)]
pub(super) struct Scaler {
    pub(super) nonce: Option<String>,
    pub(super) wanted: BTreeMap<AssignmentId, Start>,
    pub(super) cancels: BTreeSet<AssignmentId>,
    pub(super) terminate: bool,
    pub(super) events: BTreeMap<AssignmentId, Vec<AssignmentEvent>>,
    pub(super) logs: BTreeMap<AssignmentId, Vec<u8>>,
    pub(super) seq: Option<Seq>,
    pub(super) last: Option<SyncRequest>,
    pub(super) samples: usize,
    /// One each, first to last.
    pub(super) faults: BTreeMap<Route, VecDeque<Fault>>,
    /// Every request, until taken back.
    pub(super) always: Option<Fault>,
    pub(super) requests: usize,
    /// This request's answer is lost.
    pub(super) lose: Option<usize>,
}

impl Scaler {
    pub(super) fn finished(&self, id: AssignmentId) -> bool {
        let events = self.events.get(&id).into_iter().flatten();
        events.into_iter().any(|event| !matches!(event.event, AssignmentEventKind::Started { .. }))
    }

    pub(super) fn lists(&self, id: AssignmentId) -> bool {
        self.last.iter().flat_map(|sync| &sync.assignments).any(|listed| listed.id == id)
    }

    fn directives(&self) -> Vec<Directive> {
        if self.terminate {
            return vec![Directive::Terminate { reason: "the test says so".to_owned() }];
        }
        let starts =
            self.wanted.values().filter(|start| !self.lists(start.assignment) && !self.finished(start.assignment));
        let cancels = self.cancels.iter().filter(|id| !self.finished(**id));
        starts
            .map(|start| Directive::Start(Box::new(start.clone())))
            .chain(cancels.map(|&assignment| Directive::Cancel { assignment }))
            .collect()
    }
}

#[derive(Clone)]
pub(super) struct Fake {
    scaler: Arc<Mutex<Scaler>>,
    changed: watch::Sender<()>,
    pub(super) url: String,
}

pub(super) fn policy() -> Policy {
    Policy { lease_seconds: 60, result_grace_seconds: 3600, sample_seconds: 5, cpu_jobs: 3 }
}

impl Fake {
    pub(super) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let fake = Self { scaler: Arc::default(), changed: watch::Sender::new(()), url };
        let router = Router::new()
            .route("/agent/v1/enrol", post(enrol))
            .route("/agent/v1/sync", post(sync))
            .route("/agent/v1/assignments/{id}/events", post(events))
            .route("/agent/v1/assignments/{id}/log", put(log))
            .layer(DefaultBodyLimit::max(2 << 20))
            .with_state(fake.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        fake
    }

    /// Looks at the state or changes it; held syncs see what changed.
    pub(super) fn with<T>(&self, f: impl FnOnce(&mut Scaler) -> T) -> T {
        let result = f(&mut self.lock());
        self.changed.send_replace(());
        result
    }

    /// Waits until the state is so.
    pub(super) async fn wait(&self, what: &str, is_so: impl Fn(&Scaler) -> bool) {
        let mut changed = self.changed.subscribe();
        let wait = async {
            while !is_so(&self.lock()) {
                changed.changed().await.unwrap();
            }
        };
        timeout(Duration::from_secs(7200), wait).await.unwrap_or_else(|_| panic!("never: {what}"));
    }

    fn lock(&self) -> MutexGuard<'_, Scaler> {
        self.scaler.lock().unwrap()
    }

    /// Answers a request, spoilt if one is due.
    fn answer(&self, route: Route, headers: &HeaderMap, act: impl FnOnce(&mut Scaler) -> Response) -> Response {
        self.with(|scaler| {
            scaler.requests += 1;
            let lost = (scaler.lose == Some(scaler.requests)).then_some(Fault::Lost);
            let next = scaler.faults.get_mut(&route).and_then(VecDeque::pop_front);
            let authorised = route == Route::Enrol
                || headers.get(header::AUTHORIZATION).is_some_and(|value| value == "Bearer the-bearer");
            match lost.or(scaler.always).or(next) {
                None if authorised => act(scaler),
                None => StatusCode::UNAUTHORIZED.into_response(),
                Some(Fault::Lost) => {
                    let _lost = act(scaler);
                    (StatusCode::BAD_GATEWAY, Html("<h1>bad gateway</h1>")).into_response()
                }
                Some(Fault::Status(status)) => {
                    (StatusCode::from_u16(status).unwrap(), Json(ErrorBody::new("nonsense", "not us"))).into_response()
                }
                Some(Fault::Page) => Html("<h1>please log in</h1>").into_response(),
                Some(Fault::Json) => Json(serde_json::json!({"status": "ok"})).into_response(),
                Some(Fault::Redirect) => {
                    (StatusCode::TEMPORARY_REDIRECT, [(header::LOCATION, "/elsewhere")]).into_response()
                }
                Some(Fault::Gone) => error(StatusCode::GONE, ErrorBody::new(ErrorBody::INSTANCE_GONE, "gone")),
            }
        })
    }
}

fn error(status: StatusCode, body: ErrorBody) -> Response {
    (status, Json(body)).into_response()
}

async fn enrol(State(fake): State<Fake>, headers: HeaderMap, Json(request): Json<EnrolRequest>) -> Response {
    fake.answer(Route::Enrol, &headers, |scaler| {
        if *scaler.nonce.get_or_insert_with(|| request.nonce.clone()) != request.nonce {
            return error(StatusCode::CONFLICT, ErrorBody::new("other_nonce", "another machine enrolled first"));
        }
        let bearer = Secret::new("the-bearer");
        Json(EnrolResponse { bearer, policy: policy(), server_time: Timestamp::UNIX_EPOCH }).into_response()
    })
}

async fn sync(State(fake): State<Fake>, headers: HeaderMap, Json(request): Json<SyncRequest>) -> Response {
    let seq = request.seq;
    let empty = SyncResponse { directives: vec![], lease_seconds: policy().lease_seconds, server_time: Timestamp::MIN };
    let mut changed = fake.changed.subscribe();
    let mut heard = false;
    let first = fake.answer(Route::Sync, &headers, |scaler| {
        scaler.samples += usize::from(request.sample.is_some());
        // Two connections may swap two syncs.
        if scaler.seq.is_none_or(|last| last < seq) {
            scaler.seq = Some(seq);
            scaler.last = Some(request);
        }
        heard = true;
        StatusCode::OK.into_response()
    });
    if !heard || first.status() != StatusCode::OK {
        return first;
    }
    let held = async {
        loop {
            {
                let scaler = fake.lock();
                let directives = scaler.directives();
                if scaler.seq != Some(seq) {
                    return empty.clone();
                }
                if !directives.is_empty() {
                    return SyncResponse { directives, ..empty.clone() };
                }
            }
            changed.changed().await.unwrap();
        }
    };
    Json(timeout(Duration::from_secs(SYNC_HOLD_SECONDS), held).await.unwrap_or(empty.clone())).into_response()
}

async fn events(
    State(fake): State<Fake>,
    Path(id): Path<AssignmentId>,
    headers: HeaderMap,
    Json(event): Json<AssignmentEvent>,
) -> Response {
    fake.answer(Route::Events, &headers, |scaler| {
        let events = scaler.events.entry(id).or_default();
        let expected = events.len() as u64 + 1;
        if event.n > expected {
            let body = ErrorBody { expected: Some(expected), ..ErrorBody::new("gap", "an event is missing") };
            return error(StatusCode::CONFLICT, body);
        }
        if event.n == expected {
            events.push(event);
        } else {
            assert_eq!(events[usize::try_from(event.n).unwrap() - 1], event, "a number means one event for ever");
        }
        Json(EventAck { expected: events.len() as u64 + 1 }).into_response()
    })
}

#[derive(Deserialize)]
struct At {
    offset: usize,
}

async fn log(
    State(fake): State<Fake>,
    Path(id): Path<AssignmentId>,
    Query(At { offset }): Query<At>,
    headers: HeaderMap,
    bytes: Bytes,
) -> Response {
    fake.answer(Route::Log, &headers, |scaler| {
        let log = scaler.logs.entry(id).or_default();
        if offset != log.len() {
            let body = ErrorBody { size: Some(log.len() as u64), ..ErrorBody::new("offset", "not the size") };
            return error(StatusCode::CONFLICT, body);
        }
        log.extend_from_slice(&bytes);
        Json(LogSize { size: log.len() as u64 }).into_response()
    })
}
