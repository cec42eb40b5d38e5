//! What agents say: enrolment, syncs, events of assignments.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use pilotlight_wire::{
    AssignmentId, InstanceId,
    agent::{AssignmentEvent, AssignmentEventKind, AssignmentReport, Stage},
};

use super::{World, later};
use crate::fleet::{
    Job,
    demand::JobState,
    event::{Applied, Enrol, Order, Refusal, Synced},
    instance::{AssignmentState, Enrolment, Instance, Phase, Step},
    reason::Cause,
};

/// Longer than a sync is on its way: its agent gives up after 35 s.
const SYNC_ON_ITS_WAY: SignedDuration = SignedDuration::from_mins(2);

impl World {
    pub(super) fn enrol(&mut self, enrol: Enrol, now: Timestamp) -> Result<Applied, Refusal> {
        if enrol.proven && self.orphans.contains_key(&enrol.instance) {
            // It was taken in by a scaler whose database is lost; its next sync says what runs on it, and adopts it.
            return Ok(Applied::Done);
        }
        let instance = self.instances.get(&enrol.instance).ok_or(Refusal::UnknownInstance)?;
        if let Some(first) = &instance.enrolment {
            if first.nonce != enrol.nonce {
                self.seen.entry(enrol.instance).or_default().intruder_at = Some(now);
                return Err(Refusal::OtherNonce);
            }
            return if instance.is_live() { Ok(Applied::Done) } else { Err(Refusal::InstanceGone) };
        }
        if !matches!(instance.phase, Phase::Requested { .. } | Phase::Booting) {
            return Err(Refusal::InstanceGone);
        }
        let mut problems = enrol.problems;
        let found = u32::try_from(enrol.inventory.gpus.len()).unwrap_or(u32::MAX);
        if found < instance.gpus() {
            problems.push(format!("{found} GPUs found, {} expected", instance.gpus()));
        }
        self.step(enrol.instance, &Step::Enrolled, now);
        self.seen.entry(enrol.instance).or_default().heard_at = Some(now);
        if let Some(instance) = self.instance_mut(enrol.instance) {
            if instance.gpu_ids.is_empty() {
                let wanted = usize::try_from(instance.placement.gpus).unwrap_or(usize::MAX);
                instance.gpu_ids = enrol.inventory.gpus.iter().take(wanted).map(|gpu| gpu.uuid.clone()).collect();
            }
            instance.enrolment = Some(Enrolment {
                nonce: enrol.nonce,
                at: now,
                agent_started_at: believed(enrol.agent_started_at, instance.created_at, now),
                agent_version: enrol.agent_version,
                inventory: enrol.inventory,
            });
        }
        let Some(instance) = self.instances.get(&enrol.instance).cloned() else { return Ok(Applied::Done) };
        if problems.is_empty() {
            self.came_up(&instance.placement);
        } else {
            // The agent is told to leave with its first sync; and the breaker trips, or the same broken box would be
            // tried for ever.
            let cause = Cause::Unhealthy { message: problems.join("; ") };
            self.trip(&instance, &cause.to_string(), now);
            self.step(enrol.instance, &Step::Terminate(cause), now);
        }
        Ok(Applied::Done)
    }

    pub(super) fn synced(&mut self, synced: Synced, now: Timestamp) -> Result<Applied, Refusal> {
        let id = synced.instance;
        if !self.instances.contains_key(&id) && !self.adopt(id, synced.nonce, !synced.assignments.is_empty(), now) {
            return Err(Refusal::UnknownInstance);
        }
        let instance = self.instances.get(&id).ok_or(Refusal::UnknownInstance)?;
        if !instance.is_live() {
            return Err(Refusal::InstanceGone);
        }
        self.heard_again |= !self.is_heard(id, now);
        let serves = matches!(instance.phase, Phase::Ready { .. } | Phase::Draining { .. });
        let seen = self.seen.entry(id).or_default();
        if seen.seq.is_some_and(|newest| synced.seq < newest) {
            return Ok(Applied::Directives(Vec::new()));
        }
        seen.seq = Some(synced.seq);
        seen.heard_at = Some(now);
        seen.absent = 0;
        seen.sample = synced.sample.or(seen.sample);
        let reports = synced.assignments.into_iter().map(|report| (report.id, report)).collect();
        if serves {
            self.adopt_assignments(id, &reports, now);
        }
        let before = std::mem::replace(&mut self.seen.entry(id).or_default().reports, reports);
        self.end_forgotten(id, now);
        self.drop_settled_assignments(id, &before, now);
        self.orders(id).map(Applied::Directives)
    }

    pub(super) fn sync_answered(&mut self, id: InstanceId, now: Timestamp) -> Result<Applied, Refusal> {
        if let Some(seen) = self.seen.get_mut(&id) {
            seen.heard_at = Some(now);
        }
        self.orders(id).map(Applied::Directives)
    }

    /// Assignments that are over, whose log is closed, and whose file the agent no longer has: it was listed before, or
    /// is over for so long that this sync cannot have been sent before it came. One that was dropped too early would be
    /// adopted by the next sync that lists it.
    fn drop_settled_assignments(
        &mut self,
        id: InstanceId,
        before: &BTreeMap<AssignmentId, AssignmentReport>,
        now: Timestamp,
    ) {
        let (Some(instance), Some(seen)) = (self.instances.get(&id), self.seen.get(&id)) else { return };
        let settled: Vec<AssignmentId> = instance
            .assignments
            .iter()
            .filter(|(id, _)| !seen.reports.contains_key(id))
            .filter(|(id, assignment)| match assignment.state {
                AssignmentState::Ended { at, log_closed: true } => {
                    before.contains_key(id) || later(at, SYNC_ON_ITS_WAY) <= now
                }
                _ => false,
            })
            .map(|(id, _)| *id)
            .collect();
        if !settled.is_empty()
            && let Some(instance) = self.instance_mut(id)
        {
            instance.assignments.retain(|id, _| !settled.contains(id));
        }
    }

    /// What an agent should do: a function of what is, never a queue, so that a lost reply loses nothing (link 3).
    pub(super) fn orders(&self, id: InstanceId) -> Result<Vec<Order>, Refusal> {
        let instance = self.instances.get(&id).ok_or(Refusal::UnknownInstance)?;
        match instance.phase {
            Phase::Gone { .. } => return Err(Refusal::InstanceGone),
            Phase::Terminating { .. } => return Ok(vec![Order::Terminate]),
            Phase::Requested { .. } | Phase::Booting | Phase::Ready { .. } | Phase::Draining { .. } => {}
        }
        let listed =
            |assignment: &AssignmentId| self.seen.get(&id).is_some_and(|seen| seen.reports.contains_key(assignment));
        Ok(instance
            .live_assignments()
            .filter_map(|(id, assignment)| {
                let job = self.jobs.get(&assignment.job);
                if assignment.cancel {
                    Some(Order::Cancel(*id))
                } else if assignment.withdrawn && job.is_some_and(stands_down) {
                    Some(Order::Withdraw(*id))
                } else if !listed(id) && job.is_none_or(Job::can_start) {
                    Some(Order::Start(*id))
                } else {
                    None
                }
            })
            .collect())
    }

    pub(super) fn assignment_event(
        &mut self,
        id: InstanceId,
        assignment_id: AssignmentId,
        event: AssignmentEvent,
        now: Timestamp,
    ) -> Result<Applied, Refusal> {
        let instance = self.instances.get(&id).ok_or(Refusal::UnknownInstance)?;
        if !instance.is_live() {
            return Err(Refusal::InstanceGone);
        }
        let assignment = instance.assignments.get(&assignment_id).ok_or(Refusal::UnknownAssignment)?;
        // Also when it is only said again: the answer renews the agent's lease.
        self.seen.entry(id).or_default().heard_at = Some(now);
        if event.n <= assignment.last_event {
            return Ok(Applied::Done);
        }
        let expected = assignment.last_event + 1;
        let first_of_adopted = assignment.adopted && assignment.last_event == 0;
        if event.n > expected && !first_of_adopted {
            return Err(Refusal::EventGap { expected });
        }
        let (job, cancel, started) = (assignment.job, assignment.cancel, assignment.state == AssignmentState::Running);
        let begun = self.jobs.get(&job).and_then(|job| job.phases.started).unwrap_or(assignment.assigned_at);
        let at = believed(event.at, begun, now);
        let state = match event.event {
            AssignmentEventKind::Started { image_ready_at, .. } => {
                if let Some(job) = self.job_mut(job) {
                    job.phases.image_ready = Some(believed(image_ready_at, begun, at));
                    job.phases.started = Some(at);
                }
                self.runner_started(job);
                AssignmentState::Running
            }
            AssignmentEventKind::Picked(task) => {
                // By our clock: it is compared with when the forge was read.
                self.took(job, None, Some(task), now);
                AssignmentState::Running
            }
            AssignmentEventKind::Refused { reason } if started => {
                self.taken_back(job, &reason, now);
                AssignmentState::Ended { at: now, log_closed: true }
            }
            AssignmentEventKind::Refused { reason } => {
                self.refused(job, &reason, cancel, now);
                AssignmentState::Ended { at: now, log_closed: true }
            }
            AssignmentEventKind::Finished(finished) => {
                self.end_by_agent(id, job, finished, at);
                AssignmentState::Ended { at: now, log_closed: false }
            }
        };
        let Some(instance) = self.instance_mut(id) else { return Err(Refusal::UnknownInstance) };
        if let Some(assignment) = instance.assignments.get_mut(&assignment_id) {
            assignment.last_event = event.n;
            assignment.state = state;
        }
        rest(instance, now);
        Ok(Applied::Done)
    }

    /// Whether a machine's agent was heard a moment ago.
    pub(in crate::fleet) fn is_heard(&self, id: InstanceId, now: Timestamp) -> bool {
        super::is_heard(self.seen.get(&id), now)
    }

    /// The line that the agent last said about a job, such as the progress of a pull.
    #[must_use]
    pub fn detail(&self, job: &crate::fleet::Job) -> Option<&str> {
        let JobState::Placed { instance, assignment } = job.state else { return None };
        let report = self.seen.get(&instance)?.reports.get(&assignment)?;
        match report.stage {
            Stage::Running | Stage::Finishing | Stage::Finished => None,
            Stage::Accepted | Stage::Preparing => report.detail.as_deref(),
        }
    }
}

/// Whether a runner that is to leave has taken no job.
fn stands_down(job: &Job) -> bool {
    job.runner.as_ref().is_some_and(|runner| !runner.has_picked())
}

/// A time by an agent's clock, which may be wrong, held between two of ours: it decides how long a job is kept.
fn believed(said: Timestamp, earliest: Timestamp, latest: Timestamp) -> Timestamp {
    said.max(earliest).min(latest)
}

/// The idle clock starts when the last job ends.
pub(super) fn rest(instance: &mut Instance, now: Timestamp) {
    let vacant = instance.is_vacant();
    if let Phase::Ready { idle_since } = &mut instance.phase
        && vacant
    {
        *idle_since = now;
    }
}
