//! What the API says, for people.

use std::fmt::Write as _;

use jiff::{SignedDuration, Timestamp};
use pilotlight_runtime::units::{Size, Span};
use pilotlight_wire::api::{InstanceView, JobState, JobView, Orphan, PlanLine, PlanView, PoolView, StatusView};

use super::screen::{escape, table};
use crate::fleet::view::counted;

/// A line on where a job is; empty when there is nothing to tell.
pub(crate) fn progress(job: &JobView) -> String {
    let on = job.instance.map_or_else(String::new, |instance| format!(" on instance {instance}"));
    let said = job.detail.as_deref().or(job.reason.as_deref());
    match job.state {
        JobState::Queued => format!("queued: {}", said.unwrap_or("waiting for a machine")),
        JobState::Assigned => format!("assigned{on}: {}", said.unwrap_or("preparing")),
        JobState::Running => {
            let after = job.started_at.map_or_else(String::new, |at| format!(" after {}", between(job.queued_at, at)));
            format!("started{on}{after}")
        }
        JobState::Finished => String::new(),
    }
}

/// Phases, usage and verdict of a finished job.
pub(crate) fn report(job: &JobView) -> String {
    let mut previous = job.queued_at;
    let mut phases = Vec::new();
    for (phase, at) in job.phases.in_order() {
        if let Some(at) = at {
            phases.push(vec![phase.to_owned(), time(at), between(job.queued_at, at), between(previous, at)]);
            previous = at;
        }
    }
    let mut text = table(&["PHASE", "AT", "SINCE QUEUED", "STEP"], &phases);
    text.push_str(&table(&["WALL", "CPU", "PEAK MEMORY", "GPUS", "COST"], &[usage(job)]));
    let _infallible = writeln!(text, "pilotlight: {}", escape(&verdict(job)));
    text
}

fn usage(job: &JobView) -> Vec<String> {
    let used = job.usage.as_ref();
    let seconds = |seconds: f64| format!("{seconds:.1} s");
    let memory = used.and_then(|used| used.memory_peak_bytes.map(|bytes| Size(bytes).to_string()));
    vec![
        used.map_or_else(String::new, |used| seconds(used.wall_seconds)),
        used.and_then(|used| used.cpu_seconds).map_or_else(String::new, seconds),
        memory.unwrap_or_default(),
        job.gpus.to_string(),
        job.cost.map_or_else(String::new, |cost| format!("{cost:.4}")),
    ]
}

/// How a job ended, in one line.
pub(crate) fn verdict(job: &JobView) -> String {
    let mut text = job.verdict.map_or("no verdict", |verdict| verdict.as_str()).to_owned();
    if let Some(code) = job.exit_code {
        let _infallible = write!(text, ", exit code {code}");
    }
    if job.usage.as_ref().is_some_and(|usage| usage.out_of_memory) {
        text.push_str(", out of memory");
    }
    if let Some(reason) = &job.reason {
        let _infallible = write!(text, ": {reason}");
    }
    if job.log_gap {
        text.push_str(" (bytes are missing from the log)");
    }
    text
}

pub(crate) fn jobs(jobs: &[JobView]) -> String {
    let rows: Vec<_> = jobs
        .iter()
        .map(|job| {
            let told = match job.state {
                JobState::Finished => verdict(job),
                JobState::Queued | JobState::Assigned | JobState::Running => {
                    job.detail.clone().or_else(|| job.reason.clone()).unwrap_or_default()
                }
            };
            vec![
                job.id.to_string(),
                job.state.as_str().to_owned(),
                job.label.to_string(),
                job.gpus.to_string(),
                job.name.clone(),
                optional(job.instance),
                time(job.queued_at),
                told,
            ]
        })
        .collect();
    table(&["ID", "STATE", "LABEL", "GPUS", "NAME", "INSTANCE", "QUEUED", "RESULT"], &rows)
}

pub(crate) fn instances(instances: &[InstanceView]) -> String {
    let rows: Vec<_> = instances
        .iter()
        .map(|instance| {
            let used: u32 = instance.assignments.iter().map(|assignment| assignment.gpus).sum();
            vec![
                instance.id.to_string(),
                instance.phase.clone(),
                instance.pool.to_string(),
                instance.placement.to_string(),
                instance.provider.clone(),
                format!("{used}/{}", instance.gpus),
                instance.assignments.len().to_string(),
                time(instance.created_at),
                time(instance.expires_at),
                instance.held_until.map_or_else(String::new, time),
                instance.cause.clone().unwrap_or_default(),
            ]
        })
        .collect();
    let header =
        ["ID", "PHASE", "POOL", "PLACEMENT", "PROVIDER", "GPUS", "JOBS", "CREATED", "EXPIRES", "HELD UNTIL", "CAUSE"];
    table(&header, &rows)
}

pub(crate) fn pools(pools: &[PoolView]) -> String {
    let mut rows = Vec::new();
    for pool in pools {
        let labels: Vec<_> = pool.labels.iter().map(ToString::to_string).collect();
        let placements: Vec<_> = pool
            .placements
            .iter()
            .map(|placement| {
                let reason = placement.reason.as_ref().map_or_else(String::new, |reason| format!(" ({reason})"));
                format!("{} {}{reason}", placement.name, placement.health)
            })
            .collect();
        rows.push(vec![
            pool.name.to_string(),
            format!("{}/{}", pool.instances, pool.max_instances),
            format!("{}/{}", pool.gpus_used, pool.gpus),
            pool.jobs_queued.to_string(),
            pool.jobs_running.to_string(),
            labels.join(", "),
            placements.join(", "),
        ]);
    }
    table(&["POOL", "INSTANCES", "GPUS", "QUEUED", "RUNNING", "LABELS", "PLACEMENTS"], &rows)
}

fn number(count: u32) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}

pub(crate) fn status(status: &StatusView) -> String {
    let mut text = format!(
        "scaler {}: {}, {} queued, {} running\n\n{}",
        escape(&status.version),
        counted(number(status.instances), "instance"),
        counted(number(status.jobs_queued), "job"),
        status.jobs_running,
        pools(&status.pools)
    );
    if !status.alerts.is_empty() {
        let rows: Vec<_> = status
            .alerts
            .iter()
            .map(|alert| vec![alert.code.clone(), time(alert.since), alert.message.clone()])
            .collect();
        text.push('\n');
        text.push_str(&table(&["ALERT", "SINCE", "WHAT"], &rows));
    }
    text
}

pub(crate) fn plan(plan: &PlanView) -> String {
    let mut text = String::new();
    for (title, lines) in [("ACTION", &plan.actions), ("WAITING", &plan.waiting), ("INSTANCE", &plan.instances)] {
        if !lines.is_empty() {
            let row = |line: &PlanLine| vec![line.what.clone(), line.subject.clone(), line.text.clone()];
            text.push_str(&table(&[title, "SUBJECT", "WHY"], &lines.iter().map(row).collect::<Vec<_>>()));
            text.push('\n');
        }
    }
    if text.is_empty() {
        text.push_str("nothing to do\n");
    }
    if let Some(at) = plan.wake_at {
        let _infallible = writeln!(text, "looks again at {}", time(at));
    }
    text
}

pub(crate) fn orphans(orphans: &[Orphan]) -> String {
    let row = |orphan: &Orphan| vec![orphan.instance.to_string(), orphan.provider.clone(), time(orphan.since)];
    table(&["INSTANCE", "PROVIDER", "SINCE"], &orphans.iter().map(row).collect::<Vec<_>>())
}

fn optional(value: Option<impl ToString>) -> String {
    value.map_or_else(String::new, |value| value.to_string())
}

fn time(at: Timestamp) -> String {
    format!("{at:.0}")
}

/// The time between two moments; a clock that ran backwards in between is zero.
fn between(from: Timestamp, to: Timestamp) -> String {
    let span = to.duration_since(from).max(SignedDuration::ZERO).unsigned_abs();
    if span.as_secs() < 60 { format!("{:.2} s", span.as_secs_f64()) } else { Span(span).to_string() }
}
