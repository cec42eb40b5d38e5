//! What clients call (design 7, link 6).

use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};
use axum::{
    Json,
    body::Body,
    extract::{
        Path, Query, State,
        rejection::{JsonRejection, PathRejection, QueryRejection},
    },
    http::StatusCode,
    response::{IntoResponse, Response},
};
use jiff::SignedDuration;
use pilotlight_runtime::failpoint;
use pilotlight_wire::{
    InstanceId, JobId, Work,
    api::{
        DrainRequest, DrainResponse, FOLLOW_HOLD_SECONDS, HoldRequest, InstanceView, JobView, LOG_SIZE_HEADER,
        LOG_STATE_HEADER, MAX_LOG_ANSWER, Orphan, PlanView, PoolView, ReleaseRequest, StatusView, SubmitJob,
    },
};
use serde::Deserialize;

use super::{ApiError, App};
use crate::fleet::{Applied, Event, Job, event::Submission, view};

/// How many settled jobs `jobs --all` lists.
const LISTED_JOBS: u32 = 1000;

/// The longest name a job may have, bytes.
const MAX_NAME: usize = 200;

/// The longest timeout a job may ask for.
const MAX_TIMEOUT_SECONDS: u64 = 30 * 86_400;

pub(super) async fn submit(
    State(app): State<App>,
    id: Result<Path<JobId>, PathRejection>,
    body: Result<Json<SubmitJob>, JsonRejection>,
) -> Result<Response, ApiError> {
    let (Path(id), Json(mut job)) = (id?, body?);
    check(&job).map_err(ApiError::bad_input)?;
    // The hash is over our own serialisation, so that white space in the body does not make another job.
    let bytes = serde_json::to_vec(&job).map_err(|error| ApiError::internal(&error))?;
    let body_hash = hex::encode(digest(&SHA256, &bytes));
    if let Some(known) = find(&app, id).await? {
        return if known.has_body(&body_hash) {
            Ok((StatusCode::OK, Json(view_of(&app, known).await?)).into_response())
        } else {
            Err(crate::fleet::Refusal::OtherBody.into())
        };
    }
    if job.name.is_empty() {
        job.name = default_name(&job);
    }
    let submission = Submission {
        id,
        label: job.label,
        name: job.name,
        body_hash,
        timeout: job
            .timeout_seconds
            .map(|seconds| SignedDuration::from_secs(i64::try_from(seconds).unwrap_or(i64::MAX))),
        priority: job.priority,
    };
    let applied = app.control.submit(Event::Submitted(Box::new(submission)), id, Work::Job(job.spec)).await??;
    failpoint!("scaler.submit.unanswered");
    let (status, job) = match applied {
        Applied::Job(job) => {
            tracing::info!(job = %job.id, label = %job.label, "submitted");
            (StatusCode::CREATED, job)
        }
        // Two calls at once: the other one was first.
        Applied::Known(job) => (StatusCode::OK, job),
        _ => return Err(crate::fleet::Refusal::UnknownJob.into()),
    };
    Ok((status, Json(view_of(&app, *job).await?)).into_response())
}

/// What is wrong with a submission, if anything.
fn check(job: &SubmitJob) -> Result<(), String> {
    if job.spec.image.trim().is_empty() {
        return Err("spec.image is empty; name an image, or `pilotlight/host`".to_owned());
    }
    if job.name.len() > MAX_NAME {
        return Err(format!("name has {} bytes; at most {MAX_NAME} are kept", job.name.len()));
    }
    if job.timeout_seconds.is_some_and(|seconds| seconds == 0 || seconds > MAX_TIMEOUT_SECONDS) {
        return Err("timeout_seconds must be from 1 to 2592000 (30 days)".to_owned());
    }
    for (name, value) in &job.spec.env {
        if name.is_empty() || name.contains(['=', '\0']) {
            return Err(format!("spec.env: {name:?} is no name of a variable; it must not be empty nor hold = or NUL"));
        }
        if value.contains('\0') {
            return Err(format!("spec.env.{name}: the value holds a NUL byte, which no process can be given"));
        }
    }
    let words = job.spec.command.iter().chain(job.spec.entrypoint.iter().flatten());
    if words.into_iter().any(|word| word.contains('\0')) {
        return Err("spec.command holds a NUL byte, which no process can be given".to_owned());
    }
    Ok(())
}

/// The image and the program. Arguments are not for everybody who may see names: they hold tokens and whole scripts.
fn default_name(job: &SubmitJob) -> String {
    let mut name = job.spec.image.clone();
    if let Some(program) = job.spec.entrypoint.iter().flatten().chain(&job.spec.command).next() {
        name.push(' ');
        name.push_str(program);
    }
    let end = (0..=MAX_NAME.min(name.len())).rev().find(|end| name.is_char_boundary(*end)).unwrap_or(0);
    name.truncate(end);
    name
}

#[derive(Debug, Deserialize)]
pub(super) struct All {
    #[serde(default)]
    all: u8,
}

pub(super) async fn jobs(
    State(app): State<App>,
    query: Result<Query<All>, QueryRejection>,
) -> Result<Json<Vec<JobView>>, ApiError> {
    let Query(All { all }) = query?;
    // The living first: one that settles between the two looks is then in both, and not in none.
    let living = app
        .control
        .read(move |world, plan, now| {
            let wanted = world.jobs().filter(|job| all > 0 || job.ended().is_none());
            let views = wanted.map(|job| world.job_view(job, plan));
            views.chain(world.wanted_views(plan, now)).collect::<Vec<_>>()
        })
        .await?;
    let mut views = Vec::new();
    if all > 0 {
        views.extend(app.store.settled_jobs(LISTED_JOBS).await?.iter().map(|job| view::job(job, false)));
    }
    let settled: std::collections::BTreeSet<JobId> = views.iter().map(|view| view.id).collect();
    views.extend(living.into_iter().filter(|view| !settled.contains(&view.id)));
    views.sort_by_key(|view| (view.queued_at, view.id));
    Ok(Json(views))
}

pub(super) async fn job(
    State(app): State<App>,
    id: Result<Path<JobId>, PathRejection>,
) -> Result<Json<JobView>, ApiError> {
    let Path(id) = id?;
    let job = find(&app, id).await?.ok_or_else(|| no_job(id))?;
    Ok(Json(view_of(&app, job).await?))
}

#[derive(Debug, Deserialize)]
pub(super) struct Follow {
    #[serde(default)]
    offset: u64,
    #[serde(default)]
    follow: u8,
}

pub(super) async fn log(
    State(app): State<App>,
    id: Result<Path<JobId>, PathRejection>,
    query: Result<Query<Follow>, QueryRejection>,
) -> Result<Response, ApiError> {
    let (Path(id), Query(Follow { offset, follow })) = (id?, query?);
    let job = find(&app, id).await?.ok_or_else(|| no_job(id))?;
    if !job.is_settled() {
        app.logs.create(id).await?;
    }
    let hold = Duration::from_secs(if follow > 0 { FOLLOW_HOLD_SECONDS } else { 0 });
    let slice = tokio::select! {
        slice = app.logs.read(id, offset, MAX_LOG_ANSWER, hold) => slice?,
        () = app.shutdown.cancelled() => return Err(ApiError::unavailable("the scaler is shutting down")),
    };
    Response::builder()
        .header(LOG_SIZE_HEADER, slice.size)
        .header(LOG_STATE_HEADER, if slice.closed { "closed" } else { "open" })
        .header(axum::http::header::CONTENT_TYPE, "application/octet-stream")
        .body(Body::from(slice.bytes))
        .map_err(|error| ApiError::internal(&error))
}

pub(super) async fn cancel(
    State(app): State<App>,
    id: Result<Path<JobId>, PathRejection>,
) -> Result<Json<JobView>, ApiError> {
    let Path(id) = id?;
    if let Ok(Applied::Job(job)) = app.control.apply(Event::JobCancelled(id)).await? {
        tracing::info!(job = %id, "cancel asked");
        return Ok(Json(view_of(&app, *job).await?));
    }
    // Not in the world: it is settled, and a cancel changes nothing, or it never was.
    let job = app.store.job(id).await?.ok_or_else(|| no_job(id))?;
    Ok(Json(view::job(&job, false)))
}

pub(super) async fn instances(
    State(app): State<App>,
    query: Result<Query<All>, QueryRejection>,
) -> Result<Json<Vec<InstanceView>>, ApiError> {
    let Query(All { all }) = query?;
    let look = move |world: &crate::fleet::World| {
        let wanted = world.instances().filter(|instance| all > 0 || instance.is_live());
        wanted.map(|instance| world.instance_view(instance)).collect::<Vec<_>>()
    };
    Ok(Json(app.control.read(move |world, _, _| look(world)).await?))
}

pub(super) async fn pools(State(app): State<App>) -> Result<Json<Vec<PoolView>>, ApiError> {
    Ok(Json(app.control.read(|world, _, now| world.pool_views(now)).await?))
}

pub(super) async fn status(State(app): State<App>) -> Result<Json<StatusView>, ApiError> {
    Ok(Json(app.control.read(|world, plan, now| world.status_view(plan, now)).await?))
}

pub(super) async fn plan(State(app): State<App>) -> Result<Json<PlanView>, ApiError> {
    Ok(Json(app.control.read(|world, _, now| world.plan_view(now)).await?))
}

pub(super) async fn drain(
    State(app): State<App>,
    body: Result<Json<DrainRequest>, JsonRejection>,
) -> Result<Json<DrainResponse>, ApiError> {
    let Json(request) = body?;
    tracing::info!(?request, "drain asked");
    let applied = app.control.apply(Event::Drain { target: request.target, now: request.now }).await??;
    let Applied::Instances(instances) = applied else { return Ok(Json(DrainResponse { instances: Vec::new() })) };
    Ok(Json(DrainResponse { instances }))
}

pub(super) async fn resume(State(app): State<App>) -> Result<StatusCode, ApiError> {
    app.control.apply(Event::Resumed).await??;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn hold(
    State(app): State<App>,
    body: Result<Json<HoldRequest>, JsonRejection>,
) -> Result<Json<InstanceView>, ApiError> {
    let Json(HoldRequest { instance, seconds }) = body?;
    tracing::info!(%instance, seconds, "hold asked");
    let duration = SignedDuration::from_secs(i64::try_from(seconds).unwrap_or(i64::MAX));
    app.control.apply(Event::Held { instance, duration }).await??;
    instance_view(&app, instance).await
}

pub(super) async fn release(
    State(app): State<App>,
    body: Result<Json<ReleaseRequest>, JsonRejection>,
) -> Result<Json<InstanceView>, ApiError> {
    let Json(ReleaseRequest { instance }) = body?;
    tracing::info!(%instance, "release asked");
    app.control.apply(Event::Released(instance)).await??;
    instance_view(&app, instance).await
}

async fn instance_view(app: &App, id: InstanceId) -> Result<Json<InstanceView>, ApiError> {
    let look = move |world: &crate::fleet::World| world.instance(id).map(|found| world.instance_view(found));
    let view = app.control.read(move |world, _, _| look(world)).await?;
    view.map(Json).ok_or_else(|| crate::fleet::Refusal::UnknownInstance.into())
}

pub(super) async fn orphans(State(app): State<App>) -> Result<Json<Vec<Orphan>>, ApiError> {
    Ok(Json(app.control.read(|world, _, _| list_orphans(world)).await?))
}

pub(super) async fn reap(State(app): State<App>) -> Result<Json<Vec<Orphan>>, ApiError> {
    let mut found = app.control.read(|world, _, _| list_orphans(world)).await?;
    let Applied::Orphans(ordered) = app.control.apply(Event::ReapOrphans).await?? else { return Ok(Json(found)) };
    found.retain(|orphan| ordered.contains(&orphan.instance));
    Ok(Json(found))
}

fn list_orphans(world: &crate::fleet::World) -> Vec<Orphan> {
    let one = |(id, orphan): (&InstanceId, &crate::fleet::Orphan)| Orphan {
        provider: "local".to_owned(),
        instance: *id,
        since: orphan.since,
    };
    world.orphans().map(one).collect()
}

/// A job, living or settled.
async fn find(app: &App, id: JobId) -> Result<Option<Job>, ApiError> {
    match app.control.read(move |world, _, _| world.job(id).cloned()).await? {
        Some(job) => Ok(Some(job)),
        None => Ok(app.store.job(id).await?),
    }
}

/// A job as clients see it, with what only the living world knows.
async fn view_of(app: &App, job: Job) -> Result<JobView, ApiError> {
    let look = move |world: &crate::fleet::World, plan: &crate::fleet::Plan| match world.job(job.id) {
        Some(living) => world.job_view(living, plan),
        None => view::job(&job, false),
    };
    Ok(app.control.read(move |world, plan, _| look(world, plan)).await?)
}

fn no_job(id: JobId) -> ApiError {
    ApiError::not_found(format!("no job {id}; `pilotlight jobs --all` lists those that are known"))
}
