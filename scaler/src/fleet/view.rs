//! The world as clients see it (design 7).

mod alerts;

use jiff::Timestamp;
use pilotlight_runtime::units::Span;
use pilotlight_wire::api::{
    AssignmentView, ForgeJobView, InstanceView, JobState as WireState, JobView, Phases, PlacementView, PlanLine,
    PlanView, PoolView, StatusView,
};

use super::{
    Action, Breaker, Health, Instance, Job, Phase, Plan, Pool, ProviderConfig, World, asks,
    demand::JobState,
    forge::ForgeJob,
    instance::{Assignment, AssignmentState},
    plan,
    world::title,
};

/// A job as clients see it, without what only the living world knows.
#[must_use]
pub fn job(job: &Job, running: bool) -> JobView {
    let ended = job.ended();
    let state = match &job.state {
        JobState::Queued => WireState::Queued,
        JobState::Placed { .. } if running => WireState::Running,
        JobState::Placed { .. } => WireState::Assigned,
        JobState::Finished(_) => WireState::Finished,
    };
    JobView {
        id: job.id,
        forge: job.forge.clone(),
        name: job.name.clone(),
        label: job.label.clone(),
        state,
        verdict: ended.map(|ended| ended.verdict),
        exit_code: ended.and_then(|ended| ended.exit_code),
        reason: ended.and_then(|ended| ended.reason.clone()),
        instance: job.instance,
        gpus: job.gpus,
        queued_at: job.queued_at,
        started_at: job.phases.started,
        finished_at: ended.map(|ended| ended.at),
        phases: job.phases.clone(),
        detail: None,
        usage: ended.and_then(|ended| ended.usage.clone()),
        cost: ended.and_then(|ended| ended.cost),
        log_gap: ended.is_some_and(|ended| ended.log_gap),
        forge_job: job.runner.as_ref().map(|runner| forge_job(&runner.job, runner.has_picked())),
    }
}

fn forge_job(job: &ForgeJob, taken: bool) -> ForgeJobView {
    let (repository, url) = (job.repository.clone(), job.url.clone());
    ForgeJobView { id: job.id, run: job.run, repository, url, taken }
}

/// A machine as clients see it, without what only the living world knows.
#[must_use]
pub fn instance(instance: &Instance) -> InstanceView {
    InstanceView {
        id: instance.id,
        pool: instance.pool.clone(),
        placement: instance.placement.name.clone(),
        provider: provider(&instance.placement.provider).to_owned(),
        phase: instance.phase.word().to_owned(),
        gpus: instance.gpus(),
        assignments: instance
            .live_assignments()
            .map(|(id, assignment)| AssignmentView {
                id: *id,
                job: assignment.job,
                gpus: u32::try_from(assignment.gpu_ids.len()).unwrap_or(u32::MAX),
                deadline: assignment.deadline,
            })
            .collect(),
        created_at: instance.created_at,
        ready_at: instance.ready_at(),
        expires_at: instance.expires_at(),
        held_until: instance.held_until,
        cause: match &instance.phase {
            Phase::Draining { cause } | Phase::Terminating { cause, .. } | Phase::Gone { cause } => {
                Some(cause.to_string())
            }
            Phase::Requested { .. } | Phase::Booting | Phase::Ready { .. } => None,
        },
        last_sync_at: None,
        sample: None,
    }
}

/// The provider's kind, as the config spells it.
#[must_use]
pub fn provider(config: &ProviderConfig) -> &'static str {
    match config {
        ProviderConfig::Local(_) => "local",
    }
}

impl World {
    /// A job as clients see it. `plan` says what a queued one waits for.
    #[must_use]
    pub fn job_view(&self, of: &Job, plan: &Plan) -> JobView {
        let running = matches!(&of.state, JobState::Placed { instance, assignment }
            if self.instances.get(instance).and_then(|instance| instance.assignments.get(assignment))
                .is_some_and(|assignment| assignment.state == AssignmentState::Running));
        let mut view = job(of, running);
        view.detail = self.detail(of).map(str::to_owned);
        if view.reason.is_none() {
            view.reason = plan.waiting.get(&of.id).map(ToString::to_string);
        }
        view
    }

    /// Queued jobs of forges for which no runner stands ready.
    #[must_use]
    pub fn wanted_views(&self, plan: &Plan, now: Timestamp) -> Vec<JobView> {
        let asks = asks::asks(self, now).all;
        let wanted = asks.iter().filter_map(|ask| Some((ask, ask.wanted?)));
        wanted
            .map(|(ask, (forge, wanted))| JobView {
                id: ask.id,
                forge: forge.name.clone(),
                name: title(&wanted.job),
                label: ask.label.clone(),
                state: WireState::Queued,
                verdict: None,
                exit_code: None,
                reason: plan.waiting.get(&ask.id).map(ToString::to_string),
                instance: None,
                gpus: ask.gpus,
                queued_at: ask.queued_at,
                started_at: None,
                finished_at: None,
                phases: Phases { queued: Some(ask.queued_at), ..Phases::default() },
                detail: None,
                usage: None,
                cost: None,
                log_gap: false,
                forge_job: Some(forge_job(&wanted.job, false)),
            })
            .collect()
    }

    /// A machine as clients see it.
    #[must_use]
    pub fn instance_view(&self, of: &Instance) -> InstanceView {
        let seen = self.seen.get(&of.id);
        InstanceView {
            last_sync_at: seen.and_then(|seen| seen.heard_at),
            sample: seen.and_then(|seen| seen.sample),
            ..instance(of)
        }
    }

    /// Machines and jobs in numbers, and what a person should look at.
    #[must_use]
    pub fn status_view(&self, plan: &Plan, now: Timestamp) -> StatusView {
        StatusView {
            instances: count(self.instances().filter(|instance| instance.is_live())),
            jobs_queued: count(asks::asks(self, now).all.into_iter()),
            jobs_running: count(self.jobs().filter(|job| matches!(job.state, JobState::Placed { .. }))),
            pools: self.pool_views(now),
            alerts: self.alerts(plan, now),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }

    /// Pools as clients see them.
    #[must_use]
    pub fn pool_views(&self, now: Timestamp) -> Vec<PoolView> {
        self.settings.pools.values().map(|pool| self.pool_view(pool, now)).collect()
    }

    fn pool_view(&self, pool: &Pool, now: Timestamp) -> PoolView {
        let instances = || self.instances.values().filter(|instance| instance.pool == pool.name && instance.is_live());
        let ready =
            || instances().filter(|instance| matches!(instance.phase, Phase::Ready { .. } | Phase::Draining { .. }));
        let jobs = || self.jobs.values().filter(|job| job.pool == pool.name);
        PoolView {
            name: pool.name.clone(),
            labels: self
                .settings
                .labels
                .values()
                .filter(|label| label.pool == pool.name)
                .map(|label| label.name.clone())
                .collect(),
            instances: count(instances()),
            max_instances: pool.max_instances,
            min_idle: pool.min_idle,
            gpus: ready().map(Instance::gpus).sum(),
            gpus_used: count(
                ready()
                    .flat_map(|instance| instance.live_assignments().flat_map(|(_, assignment)| &assignment.gpu_ids)),
            ),
            jobs_queued: count(jobs().filter(|job| job.is_queued())),
            jobs_running: count(jobs().filter(|job| matches!(job.state, JobState::Placed { .. }))),
            placements: pool
                .placements
                .iter()
                .filter_map(|name| self.settings.placements.get(name))
                .map(|placement| {
                    let (health, reason, until) = match self.health.get(&placement.name) {
                        Some(Health::Cooling { until, message, .. }) if now < *until => {
                            ("cooling", Some(message.clone()), Some(*until))
                        }
                        Some(Health::Stopped { message, .. }) => ("stopped", Some(message.clone()), None),
                        Some(Health::Cooling { .. }) | None => match self.breaker(placement) {
                            Some(Breaker { until, message, .. }) if now < *until => {
                                ("cooling", Some(message.clone()), Some(*until))
                            }
                            Some(Breaker { message, .. }) => ("probing", Some(message.clone()), None),
                            None => ("ok", None, None),
                        },
                    };
                    PlacementView {
                        name: placement.name.clone(),
                        provider: provider(&placement.provider).to_owned(),
                        health: health.to_owned(),
                        reason,
                        until,
                        instances: count(instances().filter(|instance| instance.placement.name == placement.name)),
                        max_instances: placement.max_instances,
                    }
                })
                .collect(),
        }
    }

    /// What would happen now, and why.
    #[must_use]
    pub fn plan_view(&self, now: Timestamp) -> PlanView {
        let plan = plan(self, now);
        PlanView {
            actions: plan.actions.iter().map(|planned| action_line(&planned.action, &planned.reason)).collect(),
            waiting: plan
                .waiting
                .iter()
                .map(|(job, waiting)| PlanLine {
                    what: "wait".to_owned(),
                    subject: job.to_string(),
                    reason: waiting.word().to_owned(),
                    text: format!("job {job} waits: {waiting}"),
                })
                .chain(self.unserved_lines())
                .collect(),
            instances: self
                .instances
                .values()
                .filter(|instance| instance.is_live())
                .map(|instance| self.standing(instance, now))
                .collect(),
            wake_at: plan.wake_at,
        }
    }

    /// Jobs of forges that ask for us in vain.
    fn unserved_lines(&self) -> impl Iterator<Item = PlanLine> {
        self.demand.iter().flat_map(|(forge, demand)| {
            demand.unserved.iter().map(move |unserved| PlanLine {
                what: "unserved".to_owned(),
                subject: unserved.job.id.to_string(),
                reason: "unserved".to_owned(),
                text: format!(
                    "job {} of {forge} ({}) is not served: {}",
                    unserved.job.id,
                    title(&unserved.job),
                    unserved.why
                ),
            })
        })
    }

    /// Why a machine stays or goes.
    fn standing(&self, instance: &Instance, now: Timestamp) -> PlanLine {
        let id = instance.id;
        let running = instance.live_assignments().count();
        let (reason, text) = match &instance.phase {
            _ if instance.is_held(now) => {
                let until = instance.held_until.unwrap_or(now);
                ("held", format!("is held until {until:.0}, runs {}", counted(running, "job")))
            }
            Phase::Requested { .. } => ("create", "asked of the provider".to_owned()),
            Phase::Booting => ("boot", format!("its agent is to enrol by {:.0}", instance.boot_deadline)),
            Phase::Ready { .. } if running > 0 => ("busy", format!("runs {}", counted(running, "job"))),
            Phase::Ready { idle_since } => {
                let idle_timeout = self.settings.pools.get(&instance.pool).map(|pool| pool.idle_timeout);
                let left = idle_timeout
                    .map_or(jiff::SignedDuration::ZERO, |timeout| timeout - now.duration_since(*idle_since));
                ("idle", format!("idle, goes in {} s without a job", left.as_secs().max(0)))
            }
            Phase::Draining { cause } => (cause.word(), format!("drains ({}): {cause}", counted(running, "job"))),
            Phase::Terminating { cause, .. } => (cause.word(), format!("is being destroyed: {cause}")),
            Phase::Gone { cause } => (cause.word(), format!("gone: {cause}")),
        };
        PlanLine {
            what: instance.phase.word().to_owned(),
            subject: id.to_string(),
            reason: reason.to_owned(),
            text: format!("instance {id} {text}"),
        }
    }
}

/// What the log of a job at a forge begins with: where it runs, and how long it took to get there.
#[must_use]
pub fn preface(job: &Job, on: &Instance, assignment: &Assignment) -> Vec<String> {
    let mut machine = format!("instance {} of pool {} on {}", on.id, on.pool, on.placement.name);
    let models = on.enrolment.as_ref().map(|enrolment| &enrolment.inventory.gpus);
    let gpus: Vec<String> = assignment
        .gpu_ids
        .iter()
        .map(|id| {
            let model = models.and_then(|gpus| gpus.iter().find(|gpu| gpu.uuid == *id)).map(|gpu| &gpu.model);
            model.map_or_else(|| id.to_string(), |model| format!("{model} {id}"))
        })
        .collect();
    if !gpus.is_empty() {
        machine += &format!(", {}: {}", counted(gpus.len(), "GPU"), gpus.join(", "));
    }
    let mut last = job.queued_at;
    let mut times = format!("queued {:.0}", job.queued_at);
    for (phase, at) in job.phases.in_order() {
        let Some(at) = at.filter(|_| phase != "queued") else { continue };
        let step = at.duration_since(last).as_secs_f64().max(0.0);
        times += &format!(", {phase} +{step:.1} s");
        last = at.max(last);
    }
    let timeout = Span(std::time::Duration::try_from(job.timeout).unwrap_or_default());
    vec![format!("Pilotlight: {machine}"), format!("Pilotlight: {times}; label {}, ends after {timeout}", job.label)]
}

/// One planned action as a line.
#[must_use]
pub fn action_line(action: &Action, reason: &super::Reason) -> PlanLine {
    let (what, subject, text) = match action {
        Action::Launch(instance) => (
            "launch",
            instance.id.to_string(),
            format!("launch instance {} of pool {} on {}", instance.id, instance.pool, instance.placement.name),
        ),
        Action::Create(id) => ("create", id.to_string(), format!("ask again for instance {id}")),
        Action::Assign { job, instance, gpu_ids, .. } => (
            "assign",
            job.to_string(),
            format!("give job {job} to instance {instance} with {}", counted(gpu_ids.len(), "GPU")),
        ),
        Action::Grant { job, forge, wanted, instance, gpu_ids, .. } => (
            "grant",
            job.to_string(),
            format!(
                "grant runner {job} of {forge} for {} on instance {instance} with {}",
                title(&wanted.job),
                counted(gpu_ids.len(), "GPU")
            ),
        ),
        Action::Mint(job) => ("mint", job.to_string(), format!("register runner {job} again")),
        Action::Withdraw { job, .. } => ("withdraw", job.to_string(), format!("withdraw runner {job}")),
        Action::EndRegistration(job) => {
            ("end_registration", job.to_string(), format!("end the registration of runner {job}"))
        }
        Action::Drain { instance, .. } => ("drain", instance.to_string(), format!("drain instance {instance}")),
        Action::Terminate { instance, .. } => {
            ("terminate", instance.to_string(), format!("terminate instance {instance}"))
        }
        Action::Destroy(id) => ("destroy", id.to_string(), format!("destroy instance {id}")),
        Action::Reap(id) => ("reap", id.to_string(), format!("reap {id}")),
        Action::CloseLog { job, .. } => ("close_log", job.to_string(), format!("close the log of job {job}")),
        Action::Forget(id) => ("forget", id.to_string(), format!("forget instance {id}")),
    };
    PlanLine { what: what.to_owned(), subject, reason: reason.word().to_owned(), text: format!("{text}: {reason}") }
}

/// A number of things, such as `1 job` or `3 jobs`.
pub(crate) fn counted(number: usize, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}

fn count<T>(items: impl Iterator<Item = T>) -> u32 {
    u32::try_from(items.count()).unwrap_or(u32::MAX)
}
