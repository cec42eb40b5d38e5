//! Writing a plan down before it is done: intent before effect.

use std::collections::BTreeMap;

use jiff::Timestamp;
use pilotlight_wire::{AssignmentId, GpuId, InstanceId, JobId};

use super::{Action, Plan};
use crate::fleet::{
    demand::{JobState, Log},
    forge::Registration,
    instance::{Assignment, AssignmentState, Call, Instance, Phase, Step},
    mutant::{Mutant, planted},
    packing::NewMachine,
    reason::Cause,
    world::{World, cpu_jobs, later},
};

impl World {
    /// Records what the plan says, before it is done.
    pub fn record(&mut self, plan: &Plan, now: Timestamp) {
        self.ids = plan.ids.clone();
        for id in plan.waiting.keys() {
            if self.jobs.get(id).is_some_and(|job| job.phases.planned.is_none())
                && let Some(job) = self.job_mut(*id)
            {
                job.phases.planned = Some(now);
            }
        }
        for planned in &plan.actions {
            self.record_action(&planned.action, now);
        }
    }

    fn record_action(&mut self, action: &Action, now: Timestamp) {
        match action {
            Action::Launch(instance) => {
                self.dirty.instances.insert(instance.id);
                self.instances.insert(instance.id, (**instance).clone());
            }
            Action::Create(id) => {
                if let Some(instance) = self.instance_mut(*id)
                    && let Phase::Requested { create } = &mut instance.phase
                {
                    *create = Call::Sent { failures: create.failures() };
                }
            }
            Action::Assign { id, job, instance, gpu_ids } => self.assign(*id, *job, *instance, gpu_ids, now),
            Action::Grant { id, job, forge, wanted, instance, gpu_ids } => {
                if let Some(row) = self.runner_row(*job, forge, wanted, now) {
                    self.jobs.insert(*job, row);
                    self.assign(*id, *job, *instance, gpu_ids, now);
                }
            }
            Action::Mint(job) | Action::EndRegistration(job) => self.send_registration(*job),
            Action::Withdraw { instance, assignment, .. } => {
                if let Some(machine) = self.instance_mut(*instance)
                    && let Some(assignment) = machine.assignments.get_mut(assignment)
                {
                    assignment.withdrawn = true;
                }
            }
            Action::Drain { .. } if planted(Mutant::ForgetsDrain) => {}
            Action::Drain { instance, cause } => self.step(*instance, &Step::Drain(cause.clone()), now),
            Action::Terminate { instance, cause } => {
                if cause.is_failed_boot()
                    && let Some(instance) = self.instances.get(instance).cloned()
                {
                    self.trip(&instance, &cause.to_string(), now);
                }
                self.step(*instance, &Step::Terminate(cause.clone()), now);
                self.send_destroy(*instance);
                if planted(Mutant::LosesJobsEarly) {
                    self.step(*instance, &Step::ProvedGone, now);
                    self.settle_gone(*instance, now);
                }
            }
            Action::Destroy(id) => self.send_destroy(*id),
            Action::Reap(id) => {
                self.condemn(*id, Cause::Orphaned, now);
                self.send_destroy(*id);
            }
            Action::CloseLog { job, incomplete } => {
                if let Some(job) = self.job_mut(*job)
                    && let JobState::Finished(ended) = &mut job.state
                {
                    ended.log = Log::Closing { incomplete: *incomplete };
                    ended.log_gap |= *incomplete;
                }
            }
            Action::Forget(id) => {
                self.dirty.instances.insert(*id);
                self.instances.remove(id);
                self.seen.remove(id);
            }
        }
    }

    fn send_registration(&mut self, id: JobId) {
        if let Some(job) = self.job_mut(id)
            && let Some(runner) = &mut job.runner
            && let Registration::Minting(call) | Registration::Ending(call) = &mut runner.registration
        {
            *call = Call::Sent { failures: call.failures() };
        }
    }

    fn send_destroy(&mut self, id: InstanceId) {
        if let Some(instance) = self.instance_mut(id)
            && let Phase::Terminating { destroy, .. } = &mut instance.phase
        {
            *destroy = Call::Sent { failures: destroy.failures() };
        }
    }

    fn assign(&mut self, id: AssignmentId, job: JobId, instance: InstanceId, gpu_ids: &[GpuId], now: Timestamp) {
        let Some(machine) = self.instances.get(&instance) else { return };
        let (created_at, enrolment) = (machine.created_at, machine.enrolment.clone());
        let Some(job) = self.job_mut(job) else { return };
        job.state = JobState::Placed { instance, assignment: id };
        job.instance = Some(instance);
        job.phases.planned.get_or_insert(now);
        job.phases.assigned = Some(now);
        // A job that found a warm machine was not launched for.
        if created_at >= job.queued_at {
            job.phases.launched = Some(created_at);
            job.phases.booted = enrolment.as_ref().map(|enrolment| enrolment.agent_started_at);
            job.phases.enrolled = enrolment.as_ref().map(|enrolment| enrolment.at);
        }
        let assignment = Assignment {
            job: job.id,
            gpu_ids: gpu_ids.to_vec(),
            assigned_at: now,
            deadline: later(now, job.timeout),
            cancel: false,
            withdrawn: false,
            last_event: 0,
            adopted: false,
            state: AssignmentState::Assigned,
        };
        if let Some(machine) = self.instance_mut(instance) {
            machine.assignments.insert(id, assignment);
            machine.assigned_total += 1;
        }
    }

    pub(super) fn new_instance(&self, machine: &NewMachine, now: Timestamp) -> Option<Instance> {
        let pool = self.settings.pools.get(&machine.pool)?;
        let placement = self.settings.placements.get(&machine.placement)?;
        Some(Instance {
            id: machine.id,
            pool: pool.name.clone(),
            placement: placement.clone(),
            gpu_ids: machine.gpu_ids.clone(),
            cpu_jobs: cpu_jobs(placement, pool.cpu_jobs),
            phase: Phase::Requested { create: Call::Sent { failures: 0 } },
            created_at: now,
            changed_at: now,
            boot_deadline: later(now, pool.boot_timeout),
            lifetime_end: later(now, pool.max_lifetime),
            held_until: None,
            single_use: !pool.reuse,
            assigned_total: 0,
            enrolment: None,
            assignments: BTreeMap::new(),
        })
    }
}
