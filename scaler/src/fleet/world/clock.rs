//! The system's clock was stepped (link 8).

use jiff::{SignedDuration, Timestamp};

use super::{Health, Settings, World, later};
use crate::fleet::{
    demand::{Job, JobState},
    forge::Registration,
    instance::{AssignmentState, Call, Instance, Phase},
};

impl World {
    /// A world as the store has it, at the start of a scaler that finds the system's clock stepped since the last one.
    /// It begins before the skip and goes along with it: what was outstanding is due now, not so much later.
    #[must_use]
    pub fn stepped(
        settings: Settings,
        seed: u64,
        now: Timestamp,
        (by, skipped): (SignedDuration, SignedDuration),
        instances: impl IntoIterator<Item = Instance>,
        jobs: impl IntoIterator<Item = Job>,
    ) -> Self {
        let before = now.saturating_sub(skipped).unwrap_or(now);
        let mut world = Self::new(settings, seed, before, instances, jobs);
        world.clock_stepped(by, skipped, now);
        world
    }

    /// Nothing is judged dead for a while, and what was noted by the old clock is read by the new one: a deadline is so
    /// many hours of running and not a date, and its agent, who counts on a clock that nobody can step, knows nothing
    /// of the step. Without this a step of some hours would end running jobs as soon as the grace is over.
    pub(super) fn clock_stepped(&mut self, by: SignedDuration, skipped: SignedDuration, now: Timestamp) {
        if skipped.is_positive() {
            self.skip(skipped);
        }
        self.grace_until = later(now, self.settings.lease);
        self.clock_stepped = Some((now, by));
    }

    /// Whether what is not known may be judged: not right after a start or a step of the clock.
    #[must_use]
    pub fn may_judge(&self, now: Timestamp) -> bool {
        now >= self.grace_until
    }

    fn skip(&mut self, skipped: SignedDuration) {
        let skip = |at: &mut Timestamp| *at = later(*at, skipped);
        for instance in self.instances.values_mut() {
            self.dirty.instances.insert(instance.id);
            times(instance, &skip);
        }
        for job in self.jobs.values_mut() {
            self.dirty.jobs.insert(job.id);
            job_times(job, &skip);
        }
        for seen in self.seen.values_mut() {
            [&mut seen.heard_at, &mut seen.intruder_at].into_iter().flatten().for_each(skip);
        }
        for health in self.health.values_mut() {
            match health {
                Health::Cooling { since, until, .. } => [since, until].into_iter().for_each(skip),
                Health::Stopped { since, .. } => skip(since),
            }
        }
        for orphan in self.orphans.values_mut() {
            skip(&mut orphan.since);
        }
        for breaker in self.breakers.values_mut() {
            [&mut breaker.since, &mut breaker.until].into_iter().for_each(skip);
        }
        for (since, _) in [&mut self.list.failing, &mut self.reload_error].into_iter().flatten() {
            skip(since);
        }
        self.paused.iter_mut().for_each(skip);
        skip(&mut self.started_at);
    }
}

fn times(instance: &mut Instance, skip: &impl Fn(&mut Timestamp)) {
    for at in
        [&mut instance.created_at, &mut instance.changed_at, &mut instance.boot_deadline, &mut instance.lifetime_end]
    {
        skip(at);
    }
    instance.held_until.iter_mut().for_each(skip);
    if let Some(enrolment) = &mut instance.enrolment {
        skip(&mut enrolment.at);
        skip(&mut enrolment.agent_started_at);
    }
    match &mut instance.phase {
        Phase::Requested { create: call } | Phase::Terminating { destroy: call, .. } => call_time(call, skip),
        Phase::Ready { idle_since } => skip(idle_since),
        Phase::Booting | Phase::Draining { .. } | Phase::Gone { .. } => {}
    }
    for assignment in instance.assignments.values_mut() {
        skip(&mut assignment.assigned_at);
        skip(&mut assignment.deadline);
        if let AssignmentState::Ended { at, .. } = &mut assignment.state {
            skip(at);
        }
    }
}

fn call_time(call: &mut Call, skip: &impl Fn(&mut Timestamp)) {
    match call {
        Call::Due { at, .. } | Call::Accepted { at } => skip(at),
        Call::Sent { .. } => {}
    }
}

fn job_times(job: &mut Job, skip: &impl Fn(&mut Timestamp)) {
    let phases = &mut job.phases;
    let noted = [
        &mut phases.queued,
        &mut phases.planned,
        &mut phases.launched,
        &mut phases.booted,
        &mut phases.enrolled,
        &mut phases.assigned,
        &mut phases.image_ready,
        &mut phases.started,
        &mut phases.finished,
    ];
    noted.into_iter().flatten().for_each(skip);
    skip(&mut job.queued_at);
    if let Some(runner) = &mut job.runner {
        runner.picked_at.iter_mut().for_each(skip);
        if let Registration::Minting(call) | Registration::Ending(call) = &mut runner.registration {
            call_time(call, skip);
        }
    }
    if let Some(refused) = &mut job.refusal {
        skip(&mut refused.until);
    }
    if let JobState::Finished(ended) = &mut job.state {
        skip(&mut ended.at);
    }
}
