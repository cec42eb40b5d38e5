//! Numbers for Prometheus. Label values come from closed sets and from the admin's own names.

use std::sync::Arc;

use jiff::Timestamp;
use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};

use crate::fleet::{Dirty, Job, Plan, World, demand::JobState};

/// The scaler's numbers. Clones share them.
#[derive(Clone, Debug)]
pub struct Metrics(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    registry: Registry,
    actions: Family<ActionLabels, Counter>,
    finished: Family<FinishedLabels, Counter>,
    phases: Family<PhaseLabels, Histogram>,
    instances: Family<InstanceLabels, Gauge>,
    jobs: Family<JobLabels, Gauge>,
    alerts: Family<AlertLabels, Gauge>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ActionLabels {
    action: String,
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FinishedLabels {
    label: String,
    verdict: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PhaseLabels {
    phase: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InstanceLabels {
    pool: String,
    phase: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct JobLabels {
    label: String,
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AlertLabels {
    code: String,
}

/// From 5 ms to about 40 min, doubling.
const PHASE_BUCKETS: [f64; 20] = [
    0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 327.68,
    655.36, 1310.72, 2621.44,
];

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("pilotlight");
        let actions = Family::default();
        registry.register("actions", "What the planner did, and why", actions.clone());
        let finished = Family::default();
        registry.register("jobs_finished", "Jobs that are over", finished.clone());
        let phases = Family::<PhaseLabels, Histogram>::new_with_constructor(|| Histogram::new(PHASE_BUCKETS));
        registry.register_with_unit(
            "phase",
            "From the phase before to this one, of jobs that are over",
            Unit::Seconds,
            phases.clone(),
        );
        let instances = Family::default();
        registry.register("instances", "Machines that are not gone", instances.clone());
        let jobs = Family::default();
        registry.register("jobs", "Jobs that are not over", jobs.clone());
        let alerts = Family::default();
        registry.register("alerts", "What a person should look at", alerts.clone());
        Self(Arc::new(Inner { registry, actions, finished, phases, instances, jobs, alerts }))
    }
}

impl Metrics {
    /// Counts an action.
    pub fn action(&self, action: &str, reason: &'static str) {
        self.0.actions.get_or_create(&ActionLabels { action: action.to_owned(), reason }).inc();
    }

    /// Takes in what one pass changed: each job once, when nothing about it can change any more.
    pub fn observe(&self, world: &World, dirty: &Dirty) {
        for job in dirty.jobs.iter().filter_map(|id| world.job(*id)).filter(|job| job.is_settled()) {
            self.finished(job);
        }
    }

    fn finished(&self, job: &Job) {
        let Some(ended) = job.ended() else { return };
        let labels = FinishedLabels { label: job.label.to_string(), verdict: ended.verdict.as_str() };
        self.0.finished.get_or_create(&labels).inc();
        let mut last: Option<Timestamp> = None;
        for (phase, at) in job.phases.in_order() {
            let Some(at) = at else { continue };
            if let Some(last) = last {
                let seconds = at.duration_since(last).as_secs_f64().max(0.0);
                self.0.phases.get_or_create(&PhaseLabels { phase }).observe(seconds);
            }
            last = Some(at);
        }
    }

    /// Sets the gauges from the world and prints everything.
    ///
    /// # Errors
    /// When formatting fails.
    pub fn render(&self, world: &World, plan: &Plan, now: Timestamp) -> Result<String, std::fmt::Error> {
        let inner = &self.0;
        inner.instances.clear();
        for instance in world.instances().filter(|instance| instance.is_live()) {
            let labels = InstanceLabels { pool: instance.pool.to_string(), phase: instance.phase.word() };
            inner.instances.get_or_create(&labels).inc();
        }
        inner.jobs.clear();
        for job in world.jobs() {
            let state = match job.state {
                JobState::Queued => "queued",
                JobState::Placed { .. } => "running",
                JobState::Finished(_) => continue,
            };
            inner.jobs.get_or_create(&JobLabels { label: job.label.to_string(), state }).inc();
        }
        inner.alerts.clear();
        for alert in world.alerts(plan, now) {
            inner.alerts.get_or_create(&AlertLabels { code: alert.code }).inc();
        }
        let mut text = String::new();
        encode(&mut text, &inner.registry)?;
        Ok(text)
    }
}
