//! What agents call (design 5, link 1 to 6).

use std::{
    collections::HashMap,
    pin::pin,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use axum::{
    Extension, Json,
    extract::{
        FromRequest, Path, Query, Request, State,
        rejection::{BytesRejection, JsonRejection, PathRejection, QueryRejection},
    },
    middleware::Next,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use pilotlight_runtime::failpoint;
use pilotlight_wire::{
    AssignmentId, InstanceId, JobId, PoolName, Volume,
    agent::{
        AssignmentEvent, Directive, EnrolRequest, EnrolResponse, EventAck, JobRef, LogSize, Policy, SYNC_HOLD_SECONDS,
        Seq, Start, SyncRequest, SyncResponse,
    },
};
use serde::Deserialize;
use tokio::sync::watch;

use super::{ApiError, App, bearer};
use crate::{
    control::{Stopped, orders},
    fleet::{
        Event, Order, Refusal,
        demand::Log,
        event::{Enrol, Synced},
        instance::{Assignment, AssignmentState},
    },
};

/// Seconds between SIGTERM and SIGKILL when a job is ended early.
const STOP_GRACE_SECONDS: u64 = 10;

/// How long an upload waits for its assignment's first event.
const FIRST_EVENT: Duration = Duration::from_secs(5);

/// Seconds between host samples.
const SAMPLE_SECONDS: u64 = 5;

/// The order of syncs per instance: a higher one supersedes the held one (link 3).
#[derive(Debug, Default)]
pub struct Syncs(Mutex<HashMap<InstanceId, watch::Sender<Seq>>>);

impl Syncs {
    /// Enters a sync; the receiver changes when a higher one enters. `None` when a higher one has entered before.
    fn enter(&self, instance: InstanceId, seq: Seq) -> Option<watch::Receiver<Seq>> {
        let mut latest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = latest.entry(instance).or_insert_with(|| watch::Sender::new(seq));
        if seq < *sender.borrow() {
            return None;
        }
        sender.send_replace(seq);
        Some(sender.subscribe())
    }

    fn forget(&self, instance: InstanceId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&instance);
    }
}

/// The agent that a bearer token names.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    instance: InstanceId,
    nonce: String,
}

pub(super) async fn authenticate(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let Some((instance, nonce)) = bearer(request.headers()).and_then(|token| app.keys.verify_bearer(token)) else {
        return ApiError::unauthorized("not an agent's bearer token").into_response();
    };
    // Revoked by the instance's phase: the handlers' events answer 410 for one that is gone. A token made with another
    // nonce than the one that won is nobody's. Of an instance that is not known (a lost database) only the token is
    // there to be believed; a sync adopts it once a provider lists it.
    let known = nonce.clone();
    let won = app
        .control
        .read(move |world, _, _| match world.instance(instance) {
            Some(found) => found.enrolment.as_ref().is_some_and(|enrolment| enrolment.nonce == known),
            None => true,
        })
        .await;
    match won {
        Ok(true) => {
            request.extensions_mut().insert(Caller { instance, nonce });
            next.run(request).await
        }
        Ok(false) => ApiError::unauthorized("another agent has enrolled as this instance").into_response(),
        Err(stopped) => ApiError::from(stopped).into_response(),
    }
}

pub(super) async fn enrol(
    State(app): State<App>,
    request: Result<Json<EnrolRequest>, JsonRejection>,
) -> Result<Json<EnrolResponse>, ApiError> {
    let Json(request) = request?;
    let (instance, nonce) = (request.instance, request.nonce.clone());
    if !app.keys.verify_enrol(instance, &request.secret) {
        return Err(ApiError::unauthorized("the secret is not this instance's"));
    }
    if nonce.len() != 64 || !nonce.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(ApiError::bad_input("nonce must be 32 bytes in hex"));
    }
    let shown = request.bearer.as_ref().and_then(|bearer| app.keys.verify_bearer(bearer.expose()));
    let enrol = Enrol {
        instance,
        proven: shown.is_some_and(|shown| shown == (instance, nonce.clone())),
        nonce: request.nonce,
        agent_version: request.agent_version,
        agent_started_at: request.agent_started_at,
        inventory: request.inventory,
        problems: request.health.problems,
    };
    app.control.apply(Event::Enrolled(Box::new(enrol))).await??;
    failpoint!("scaler.enrol.unanswered");
    let cpu_jobs = app.control.read(move |world, _, _| world.cpu_jobs(instance)).await?;
    tracing::info!(%instance, "enrolled");
    Ok(Json(EnrolResponse {
        bearer: app.keys.bearer(instance, &nonce),
        policy: Policy {
            lease_seconds: lease_seconds(&app),
            result_grace_seconds: crate::fleet::RESULT_GRACE.as_secs().unsigned_abs(),
            sample_seconds: SAMPLE_SECONDS,
            cpu_jobs: cpu_jobs.unwrap_or(0),
        },
        server_time: app.clock.now(),
    }))
}

pub(super) async fn sync(
    State(app): State<App>,
    Extension(Caller { instance, nonce }): Extension<Caller>,
    request: Result<Json<SyncRequest>, JsonRejection>,
) -> Result<Json<SyncResponse>, ApiError> {
    let Json(request) = request?;
    let seq = request.seq;
    let Some(mut latest) = app.syncs.enter(instance, seq) else {
        return Ok(Json(response(&app, Vec::new())));
    };
    if let Some(note) = &request.note {
        tracing::info!(%instance, note, "agent says");
    }
    let expires = tokio::time::Instant::now() + hold(app.rules.borrow().lease);
    let waker = app.control.waker(instance);
    // Armed before the world is asked, so that a change in between is not missed.
    let mut changed = pin!(waker.notified());
    changed.as_mut().enable();
    let synced = Synced { instance, nonce, seq, assignments: request.assignments, sample: request.sample };
    let mut found = match app.control.apply(Event::Synced(Box::new(synced))).await? {
        Ok(applied) => orders(applied),
        Err(refusal) => {
            if refusal == Refusal::InstanceGone {
                app.syncs.forget(instance);
            }
            return Err(refusal.into());
        }
    };
    while found.is_empty() {
        let expired = tokio::select! {
            () = changed.as_mut() => false,
            _ = latest.wait_for(|latest| *latest > seq) => return Ok(Json(response(&app, Vec::new()))),
            () = tokio::time::sleep_until(expires) => true,
            () = app.shutdown.cancelled() => return Ok(Json(response(&app, Vec::new()))),
        };
        changed.set(waker.notified());
        changed.as_mut().enable();
        found = orders(app.control.apply(Event::SyncAnswered(instance)).await??);
        if expired {
            break;
        }
    }
    let mut directives = Vec::new();
    for order in found {
        directives.extend(directive(&app, instance, order).await?);
    }
    failpoint!("scaler.start.unsent", directives.iter().any(|directive| matches!(directive, Directive::Start(_))));
    Ok(Json(response(&app, directives)))
}

/// How long a sync is held: several answers must fit into a lease, or a healthy agent lapses between two of them.
fn hold(lease: Duration) -> Duration {
    Duration::from_secs(SYNC_HOLD_SECONDS).min(lease / 4)
}

fn response(app: &App, directives: Vec<Directive>) -> SyncResponse {
    SyncResponse { directives, lease_seconds: lease_seconds(app), server_time: app.clock.now() }
}

fn lease_seconds(app: &App) -> u64 {
    app.rules.borrow().lease.as_secs().max(1)
}

/// An order with its payload; `None` when it was overtaken.
async fn directive(app: &App, instance: InstanceId, order: Order) -> Result<Option<Directive>, ApiError> {
    let id = match order {
        Order::Start(id) => id,
        Order::Cancel(assignment) => return Ok(Some(Directive::Cancel { assignment })),
        Order::Withdraw(assignment) => return Ok(Some(Directive::Withdraw { assignment })),
        Order::Terminate => {
            let reason = app
                .control
                .read(move |world, _, _| world.instance(instance).and_then(|found| world.instance_view(found).cause))
                .await?;
            return Ok(Some(Directive::Terminate { reason: reason.unwrap_or_default() }));
        }
    };
    let found = app
        .control
        .read(move |world, _, now| {
            let machine = world.instance(instance)?;
            let assignment = machine.assignments.get(&id)?;
            let job = world.job(assignment.job)?;
            let left = assignment.deadline.duration_since(now).as_secs().max(0).unsigned_abs();
            let reference =
                JobRef { id: job.id, forge: job.forge.clone(), label: job.label.clone(), name: job.name.clone() };
            Some((reference, assignment.gpu_ids.clone(), left, volumes(world, &machine.pool)))
        })
        .await?;
    let Some((job, gpus, remaining_seconds, volumes)) = found else { return Ok(None) };
    let Some(work) = app.store.payload(job.id).await? else { return Ok(None) };
    Ok(Some(Directive::Start(Box::new(Start {
        assignment: id,
        job,
        work,
        gpus,
        volumes,
        remaining_seconds,
        max_log_bytes: app.rules.borrow().max_log,
        stop_grace_seconds: STOP_GRACE_SECONDS,
    }))))
}

fn volumes(world: &crate::fleet::World, pool: &PoolName) -> Vec<Volume> {
    world.settings().pools.get(pool).map(|pool| pool.volumes.clone()).unwrap_or_default()
}

pub(super) async fn event(
    State(app): State<App>,
    Extension(Caller { instance, .. }): Extension<Caller>,
    id: Result<Path<AssignmentId>, PathRejection>,
    event: Result<Json<AssignmentEvent>, JsonRejection>,
) -> Result<Json<EventAck>, ApiError> {
    let (Path(assignment), Json(event)) = (id?, event?);
    let n = event.n;
    app.control.apply(Event::AssignmentEvent { instance, assignment, event }).await??;
    failpoint!("scaler.started.unanswered");
    if let Ok(job) = job_of(&app, instance, assignment).await? {
        close_if_complete(&app, job).await?;
    }
    Ok(Json(EventAck { expected: n + 1 }))
}

#[derive(Debug, Deserialize)]
pub(super) struct Offset {
    offset: u64,
}

pub(super) async fn log(
    State(app): State<App>,
    Extension(Caller { instance, .. }): Extension<Caller>,
    id: Result<Path<AssignmentId>, PathRejection>,
    offset: Result<Query<Offset>, QueryRejection>,
    request: Request,
) -> Result<Json<LogSize>, ApiError> {
    let (Path(assignment), Query(Offset { offset })) = (id?, offset?);
    let (job, intake) = intake_of(&app, instance, assignment).await?;
    let bytes: Result<Bytes, BytesRejection> = Bytes::from_request(request, &()).await;
    let bytes = bytes?;
    app.logs.create(job).await?;
    if intake != Intake::Open {
        let (size, _) = app.logs.size(job).await?;
        let agreed = bytes.is_empty() && offset == size;
        return if agreed { Ok(Json(LogSize { size })) } else { Err(ApiError::offset(size)) };
    }
    let appended = app.logs.append(job, offset, bytes).await;
    failpoint!("scaler.log.unanswered");
    // Whatever came of it: the call that brought the last byte may have been cut off before it closed the log, and
    // its repeat is only a conflict.
    close_if_complete(&app, job).await?;
    Ok(Json(LogSize { size: appended? }))
}

/// Whether an assignment's bytes belong into its job's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Intake {
    /// Nobody knows yet: it has not been said that it started, and may still be refused.
    Early,
    /// They do.
    Open,
    /// The log is closed, or the assignment was refused: its job is in the queue again or with another machine, and
    /// bytes of this one would stand in front of, or among, those of the next.
    Over,
}

/// Waits a little for an assignment's first event: the first bytes often overtake it.
async fn intake_of(app: &App, instance: InstanceId, assignment: AssignmentId) -> Result<(JobId, Intake), ApiError> {
    let look = move |world: &crate::fleet::World| {
        let found = assignment_of(world, instance, assignment)?;
        let intake = match found.state {
            AssignmentState::Assigned => Intake::Early,
            AssignmentState::Running | AssignmentState::Ended { log_closed: false, .. } => Intake::Open,
            AssignmentState::Ended { log_closed: true, .. } => Intake::Over,
        };
        Ok::<_, Refusal>((found.job, intake))
    };
    let until = tokio::time::Instant::now() + FIRST_EVENT;
    let waker = app.control.waker(instance);
    loop {
        let changed = waker.notified();
        let (job, intake) = app.control.read(move |world, _, _| look(world)).await??;
        if intake != Intake::Early {
            return Ok((job, intake));
        }
        tokio::select! {
            () = changed => {}
            () = tokio::time::sleep_until(until) => return Ok((job, intake)),
            () = app.shutdown.cancelled() => return Ok((job, intake)),
        }
    }
}

fn assignment_of(
    world: &crate::fleet::World,
    instance: InstanceId,
    assignment: AssignmentId,
) -> Result<&Assignment, Refusal> {
    let machine = world.instance(instance).ok_or(Refusal::UnknownInstance)?;
    if !machine.is_live() {
        return Err(Refusal::InstanceGone);
    }
    machine.assignments.get(&assignment).ok_or(Refusal::UnknownAssignment)
}

async fn job_of(app: &App, instance: InstanceId, assignment: AssignmentId) -> Result<Result<JobId, Refusal>, Stopped> {
    app.control.read(move |world, _, _| assignment_of(world, instance, assignment).map(|found| found.job)).await
}

/// Closes a log that has all its bytes. Asked after every append and every event, each time anew: whichever of the
/// last byte and `finished` comes second sees the other.
async fn close_if_complete(app: &App, job: JobId) -> Result<(), ApiError> {
    let expected = app
        .control
        .read(move |world, _, _| match world.job(job)?.ended()?.log {
            Log::Expected { bytes } => Some(bytes),
            Log::Over { .. } | Log::Closing { .. } | Log::Closed => None,
        })
        .await?;
    let Some(expected) = expected else { return Ok(()) };
    app.logs.create(job).await?;
    let (size, _) = app.logs.size(job).await?;
    if size >= expected {
        app.logs.close(job, None).await?;
        failpoint!("scaler.log-close.unrecorded");
        app.control.apply(Event::LogClosed(job)).await??;
    }
    Ok(())
}
