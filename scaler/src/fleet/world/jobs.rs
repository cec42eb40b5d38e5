//! Jobs of the built-in queue: submitted, cancelled, over.

use jiff::{SignedDuration, Timestamp};
use pilotlight_wire::{ForgeName, InstanceId, JobId, Verdict, agent::Finished, api::Phases};

use super::{World, later};
use crate::fleet::{
    demand::{Ended, Job, JobState, Log, MAX_REFUSALS, Refused},
    event::{Applied, Refusal, Submission},
    instance::{AssignmentState, Instance, Phase},
    mutant::{Mutant, planted},
    placement::Placement,
};

/// How long a job that was refused waits, times the refusals.
const REFUSAL_PAUSE: SignedDuration = SignedDuration::from_secs(15);

impl World {
    pub(super) fn submit(&mut self, submission: Submission, now: Timestamp) -> Result<Applied, Refusal> {
        if let Some(job) = self.jobs.get(&submission.id) {
            return if job.has_body(&submission.body_hash) {
                Ok(Applied::Known(Box::new(job.clone())))
            } else {
                Err(Refusal::OtherBody)
            };
        }
        let Some(label) = self.settings.labels.get(&submission.label) else {
            let known = self.settings.labels.keys().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            return Err(Refusal::UnknownLabel { label: submission.label, known });
        };
        let placements: Vec<&Placement> = self
            .settings
            .pools
            .get(&label.pool)
            .into_iter()
            .flat_map(|pool| &pool.placements)
            .filter_map(|name| self.settings.placements.get(name))
            .collect();
        let pool_cpu_jobs = self.settings.pools.get(&label.pool).and_then(|pool| pool.cpu_jobs);
        if !placements.iter().any(|placement| could_hold(placement, pool_cpu_jobs, label.gpus)) {
            let have = placements
                .iter()
                .map(|placement| format!("{} has {}", placement.name, placement.gpus))
                .collect::<Vec<_>>()
                .join(", ");
            return Err(Refusal::TooLarge { label: label.name.clone(), gpus: label.gpus, have });
        }
        // Ages of one breath are equal; which call came first must not matter.
        let arrival = if planted(Mutant::OrderOfArrival) { i32::try_from(self.jobs.len()).unwrap_or(0) } else { 0 };
        let queued_at = later(now, SignedDuration::new(0, arrival));
        let job = Job {
            id: submission.id,
            forge: ForgeName::direct(),
            label: label.name.clone(),
            pool: label.pool.clone(),
            gpus: label.gpus,
            priority: submission.priority.unwrap_or(label.priority),
            timeout: submission.timeout.unwrap_or(label.timeout),
            name: submission.name,
            body_hash: submission.body_hash,
            queued_at,
            state: JobState::Queued,
            refusal: None,
            phases: Phases { queued: Some(now), ..Phases::default() },
            instance: None,
            runner: None,
        };
        self.dirty.jobs.insert(job.id);
        self.jobs.insert(job.id, job.clone());
        Ok(Applied::Job(Box::new(job)))
    }

    pub(super) fn cancel_job(&mut self, id: JobId, now: Timestamp) -> Result<Applied, Refusal> {
        let job = self.jobs.get(&id).ok_or(Refusal::UnknownJob)?;
        match job.state {
            JobState::Queued => {
                let ended = never_ran(Verdict::Cancelled, Some("cancelled while it was queued".to_owned()), now);
                self.end_job(id, ended, now);
            }
            JobState::Placed { instance, assignment } => {
                if let Some(assignment) =
                    self.instance_mut(instance).and_then(|instance| instance.assignments.get_mut(&assignment))
                {
                    assignment.cancel = true;
                }
            }
            JobState::Finished(_) => {}
        }
        let job = self.jobs.get(&id).ok_or(Refusal::UnknownJob)?;
        Ok(Applied::Job(Box::new(job.clone())))
    }

    pub(super) fn log_closed(&mut self, id: JobId) {
        let Some(job) = self.job_mut(id) else { return };
        let JobState::Finished(ended) = &mut job.state else { return };
        ended.log = Log::Closed;
        let Some(instance) = job.instance else { return };
        if let Some(instance) = self.instance_mut(instance) {
            for assignment in instance.assignments.values_mut().filter(|assignment| assignment.job == id) {
                if let AssignmentState::Ended { log_closed, .. } = &mut assignment.state {
                    *log_closed = true;
                }
            }
        }
    }

    pub(super) fn end_job(&mut self, id: JobId, ended: Ended, now: Timestamp) {
        if let Some(job) = self.job_mut(id)
            && job.ended().is_none()
        {
            job.phases.finished = Some(now);
            job.state = JobState::Finished(Box::new(ended));
            job.end_registration(now);
        }
    }

    /// A job's assignment ended by the agent's own word.
    pub(super) fn end_by_agent(&mut self, instance: InstanceId, id: JobId, finished: Finished, at: Timestamp) {
        let cost = finished.usage.as_ref().and_then(|usage| self.cost(instance, id, usage.wall_seconds));
        let ended = Ended {
            verdict: finished.verdict,
            exit_code: finished.exit_code,
            reason: finished.reason,
            at,
            log: Log::Expected { bytes: finished.log_bytes },
            log_gap: finished.log_gap,
            usage: finished.usage,
            cost,
        };
        self.end_job(id, ended, at);
    }

    /// The job's share of its machine's price.
    fn cost(&self, instance: InstanceId, job: JobId, wall_seconds: f64) -> Option<f64> {
        let (instance, job) = (self.instances.get(&instance)?, self.jobs.get(&job)?);
        Some(self.price_per_hour(instance, job.gpus)? * wall_seconds / 3600.0)
    }

    /// What an hour of a machine's share costs that has so many GPUs.
    #[must_use]
    pub(crate) fn price_per_hour(&self, instance: &Instance, gpus: u32) -> Option<f64> {
        let price = instance.placement.price_per_hour?;
        let share = match (instance.gpus(), gpus) {
            (0, _) => 1.0 / f64::from(instance.cpu_jobs.max(1)),
            // A job without GPUs rides along: the GPUs it does not hold are not on its bill.
            (_, 0) => 0.0,
            (all, some) => f64::from(some) / f64::from(all),
        };
        Some(price * share)
    }

    /// The last word on what a machine that is now gone had: its jobs are lost, and no more of their logs will come.
    pub(in crate::fleet) fn settle_gone(&mut self, id: InstanceId, now: Timestamp) {
        let Some(instance) = self.instances.get(&id) else { return };
        let cause = match &instance.phase {
            Phase::Gone { cause } => cause.to_string(),
            _ => return,
        };
        let assignments: Vec<_> = instance
            .assignments
            .values()
            .map(|assignment| (assignment.job, assignment.cancel, assignment.is_live()))
            .collect();
        for (job, cancel, live) in assignments {
            if live {
                let (verdict, reason) = if cancel {
                    (Verdict::Cancelled, format!("cancelled; its machine is gone: {cause}"))
                } else {
                    (Verdict::Infrastructure, format!("its machine is gone: {cause}"))
                };
                // Its `started` may have been on its way: nobody knows that it wrote nothing.
                let ended = Ended { log: Log::Over { incomplete: true }, ..never_ran(verdict, Some(reason), now) };
                self.end_job(job, ended, now);
            } else if let Some(job) = self.job_mut(job)
                // One that this machine refused has its log elsewhere.
                && job.instance == Some(id)
                && let JobState::Finished(ended) = &mut job.state
                && let Log::Expected { .. } = ended.log
            {
                ended.log = Log::Over { incomplete: true };
            }
        }
        if let Some(instance) = self.instance_mut(id) {
            instance.assignments.clear();
        }
    }

    /// Ends a job that its machine refuses after it had started it: what has run must not run a second time.
    pub(super) fn taken_back(&mut self, id: JobId, reason: &str, now: Timestamp) {
        let reason = format!("its machine refused it after it had started: {reason}");
        let log = Log::Over { incomplete: true };
        self.end_job(id, Ended { log, ..never_ran(Verdict::Infrastructure, Some(reason), now) }, now);
    }

    /// Ends a job whose result was lost with a database.
    pub(super) fn result_lost(&mut self, id: JobId, now: Timestamp) {
        let reason = "it is over, and its result was lost with the scaler's database".to_owned();
        let ended = never_ran(Verdict::Infrastructure, Some(reason), now);
        self.end_job(id, Ended { log: Log::Over { incomplete: true }, ..ended }, now);
    }

    /// Puts a job that its machine refused back into the queue, or ends it when that happened too often.
    pub(super) fn refused(&mut self, id: JobId, reason: &str, cancel: bool, now: Timestamp) {
        let Some(job) = self.job_mut(id) else { return };
        let count = job.refusal.as_ref().map_or(0, |refused| refused.count) + 1;
        if job.runner.is_some() {
            self.runner_refused(id, reason, now);
        } else if cancel {
            let ended = never_ran(Verdict::Cancelled, Some("cancelled before it started".to_owned()), now);
            self.end_job(id, ended, now);
        } else if job.is_adopted() {
            let reason =
                format!("refused by its machine, and what it runs was lost with the scaler's database: {reason}");
            self.end_job(id, never_ran(Verdict::Infrastructure, Some(reason), now), now);
        } else if count >= MAX_REFUSALS {
            let reason = format!("refused by {count} machines in a row, last: {reason}");
            self.end_job(id, never_ran(Verdict::Infrastructure, Some(reason), now), now);
        } else {
            let until = later(now, REFUSAL_PAUSE * i32::try_from(count).unwrap_or(i32::MAX));
            job.refusal = Some(Refused { count, reason: reason.to_owned(), until });
            job.state = JobState::Queued;
            job.instance = None;
            job.phases = Phases { queued: job.phases.queued, planned: job.phases.planned, ..Phases::default() };
        }
    }
}

/// The end of a job that has no log of its own to come.
pub(super) fn never_ran(verdict: Verdict, reason: Option<String>, at: Timestamp) -> Ended {
    Ended {
        verdict,
        exit_code: None,
        reason,
        at,
        log: Log::Over { incomplete: false },
        log_gap: false,
        usage: None,
        cost: None,
    }
}

/// Whether a machine of this placement could ever hold a job with so many GPUs.
pub(in crate::fleet) fn could_hold(placement: &Placement, pool_cpu_jobs: Option<u32>, gpus: u32) -> bool {
    if gpus == 0 { cpu_jobs(placement, pool_cpu_jobs) > 0 } else { placement.gpus >= gpus }
}

/// Jobs without GPUs at once: the pool's `cpu_jobs`, else 1 on machines without GPUs and 0 on others (design 2).
pub(in crate::fleet) fn cpu_jobs(placement: &Placement, pool_cpu_jobs: Option<u32>) -> u32 {
    pool_cpu_jobs.unwrap_or(u32::from(placement.gpus == 0))
}

/// A bound on what an open log can hold a machine for.
pub(in crate::fleet) fn log_bound(ended_at: Timestamp) -> Timestamp {
    later(ended_at, super::RESULT_GRACE)
}
