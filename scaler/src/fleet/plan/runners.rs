//! Runners of forges: registered, withdrawn when nobody waits for them, and their registrations ended.

use jiff::SignedDuration;
use pilotlight_wire::AssignmentId;

use super::{Action, Draft};
use crate::fleet::{
    Job, Reason,
    asks::{Asks, stands_ready},
    demand::JobState,
    forge::{Key, Registration},
    instance::{Assignment, Call, Instance, Phase},
    world::later,
};

/// How long a runner waits for a job before it may be one too many: the job that it was granted for may be on its way
/// to it, and another is often queued behind it.
const SURPLUS: SignedDuration = SignedDuration::from_mins(1);

impl Draft<'_> {
    /// What is to be done about runners and their registrations.
    pub(super) fn runners(&mut self, asks: &Asks<'_>) {
        let world = self.world;
        let mut surplus = asks.surplus.clone();
        // The youngest leave first: the elders are nearer to their job.
        for job in asks.runners.iter().rev() {
            let Some(runner) = &job.runner else { continue };
            match runner.registration {
                Registration::Ending(Call::Due { at, .. }) => {
                    if self.due(at) {
                        self.push(Action::EndRegistration(job.id), Reason::RunnerOver);
                    }
                }
                Registration::Minting(Call::Due { at, .. }) => {
                    if world.placed(job).is_some_and(|(_, _, assignment)| stands_ready(job, assignment)) && self.due(at)
                    {
                        self.push(Action::Mint(job.id), Reason::RepeatGrant);
                    }
                }
                Registration::Minting(_) | Registration::Held { .. } | Registration::Ending(_) | Registration::Over => {
                }
            }
            let Some((instance, id, assignment)) = world.placed(job) else { continue };
            if !stands_ready(job, assignment) {
                continue;
            }
            let key = Key { label: job.label.clone(), repository: runner.repository.clone() };
            let spare = surplus.get_mut(&(&job.forge, key));
            if let Some(reason) = self.unneeded(instance, assignment, spare, &job.forge) {
                self.push(Action::Withdraw { job: job.id, instance: instance.id, assignment: *id }, reason);
            }
        }
    }

    /// Why a runner that has taken no job should leave.
    fn unneeded(
        &mut self,
        instance: &Instance,
        assignment: &Assignment,
        spare: Option<&mut u32>,
        forge: &pilotlight_wire::ForgeName,
    ) -> Option<Reason> {
        match &instance.phase {
            Phase::Draining { cause } => return Some(Reason::Cause(cause.clone())),
            Phase::Ready { .. } if instance.is_held(self.now) => return Some(Reason::Held),
            Phase::Ready { .. } => {}
            Phase::Requested { .. } | Phase::Booting | Phase::Terminating { .. } | Phase::Gone { .. } => return None,
        }
        let spare = spare.filter(|spare| **spare > 0)?;
        let newer = self.world.demand.get(forge).and_then(|demand| demand.read_at)? > assignment.assigned_at;
        // One that is spare for a moment is counted all the same, or an elder would go in its place.
        *spare -= 1;
        (self.due(later(assignment.assigned_at, SURPLUS)) && newer).then_some(Reason::NotNeeded)
    }
}

impl crate::fleet::World {
    /// Where a job is.
    pub(crate) fn placed<'a>(&'a self, job: &Job) -> Option<(&'a Instance, &'a AssignmentId, &'a Assignment)> {
        let JobState::Placed { instance, assignment } = &job.state else { return None };
        let instance = self.instances.get(instance)?;
        let (id, assignment) = instance.assignments.get_key_value(assignment)?;
        Some((instance, id, assignment))
    }
}
