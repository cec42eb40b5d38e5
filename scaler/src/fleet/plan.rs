//! What should be done: [`plan`] is a function of the world and the time, and leaves the shell no choices.
//!
//! Whatever the plan says is first recorded ([`World::record`]) and committed, then done. Planning again after
//! recording gives an empty plan.

mod record;
mod runners;

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use pilotlight_wire::{AssignmentId, ForgeName, GpuId, InstanceId, JobId};

use super::{
    asks::{self, Ask},
    forge::Wanted,
    ids::IdGen,
    instance::{AssignmentState, Call, Instance, OVERTIME, Phase},
    mutant::{Mutant, planted},
    packing::{self, Census, Packed},
    reason::{Cause, Reason, Waiting},
    world::{BootKey, Breaker, HEARD, Health, LEASE_MARGIN, Machine, TOMBSTONE, World, later, log_bound},
};

/// Something to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Ask a placement for a new machine.
    Launch(Box<Instance>),
    /// Ask again for a machine whose create call was cut off or is unclear.
    Create(InstanceId),
    /// Give GPUs of a ready machine to a job.
    Assign {
        /// The claim.
        id: AssignmentId,
        /// The job.
        job: JobId,
        /// The machine.
        instance: InstanceId,
        /// The GPUs.
        gpu_ids: Vec<GpuId>,
    },
    /// Give GPUs of a ready machine to a runner that is to be registered for a forge's job.
    Grant {
        /// The claim.
        id: AssignmentId,
        /// The runner's own row.
        job: JobId,
        /// The forge.
        forge: ForgeName,
        /// What it is granted for.
        wanted: Box<Wanted>,
        /// The machine.
        instance: InstanceId,
        /// The GPUs.
        gpu_ids: Vec<GpuId>,
    },
    /// Register a runner again whose registration failed or is unclear.
    Mint(JobId),
    /// Let a runner leave unless it has taken a job.
    Withdraw {
        /// Its row.
        job: JobId,
        /// The machine that it is on.
        instance: InstanceId,
        /// Its claim.
        assignment: AssignmentId,
    },
    /// End a runner's registration, and with it a task that nobody runs any more.
    EndRegistration(JobId),
    /// No new work for a machine that still has some.
    Drain {
        /// The machine.
        instance: InstanceId,
        /// Why.
        cause: Cause,
    },
    /// Destroy a machine.
    Terminate {
        /// The machine.
        instance: InstanceId,
        /// Why.
        cause: Cause,
    },
    /// Make the destroy call of a machine that is to go.
    Destroy(InstanceId),
    /// Destroy what carries our mark, is known to nobody, and has been silent for long.
    Reap(InstanceId),
    /// Close the log of a finished job to which nothing more will come.
    CloseLog {
        /// The job.
        job: JobId,
        /// Whether some of it may be missing: the log says so.
        incomplete: bool,
    },
    /// Drop the memory of a machine that has been gone for long.
    Forget(InstanceId),
}

/// An action and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// What to do.
    pub action: Action,
    /// Why.
    pub reason: Reason,
}

/// What should be done now.
#[derive(Clone, Debug)]
pub struct Plan {
    /// In order.
    pub actions: Vec<Planned>,
    /// What each queued job waits for.
    pub waiting: BTreeMap<JobId, Waiting>,
    /// When to look again without news.
    pub wake_at: Option<Timestamp>,
    /// Whether the provider's list is wanted soon: something is to be proved gone.
    pub list_soon: bool,
    ids: IdGen,
}

/// Decides what should be done.
#[must_use]
pub fn plan(world: &World, now: Timestamp) -> Plan {
    let mut ids = world.ids.clone();
    let mut draft =
        Draft { world, now, actions: Vec::new(), wake: None, list_soon: false, leaving: Leaving::default() };
    let mut census = Census::default();
    for machine in world.machines() {
        draft.machine(&machine);
        let leaves = draft.leaving.instances.contains(&machine.instance.id);
        census.count(world, machine, leaves, now);
    }
    let asks = asks::asks(world, now);
    draft.runners(&asks);
    let leaving = std::mem::take(&mut draft.leaving);
    let packed = packing::pack(world, &asks.all, &mut census, &leaving, &mut ids, now);
    draft.idle(&census.vacant, &packed);
    draft.orphans();
    for (job, incomplete) in asks.over {
        draft.push(Action::CloseLog { job, incomplete }, Reason::LogOver { incomplete });
    }
    draft.placements(&packed, &asks.all);
    let (mut actions, wake_at, list_soon) = (draft.actions, draft.wake, draft.list_soon);
    for (ask, instance, gpu_ids) in packed.assignments {
        let id = ids.mint(now);
        let action = match ask.wanted {
            None => Action::Assign { id, job: ask.id, instance, gpu_ids },
            Some((forge, wanted)) => Action::Grant {
                id,
                job: ids.mint(now),
                forge: forge.name.clone(),
                wanted: Box::new(wanted.clone()),
                instance,
                gpu_ids,
            },
        };
        actions.push(Planned { action, reason: Reason::Fits });
        if world.instances.get(&instance).is_some_and(|instance| instance.single_use) {
            let cause = Cause::SingleUse;
            let action = Action::Drain { instance, cause: cause.clone() };
            actions.push(Planned { action, reason: Reason::Cause(cause) });
        }
    }
    for machine in packed.launches {
        if let Some(instance) = world.new_instance(&machine, now) {
            let reason = if machine.spare { Reason::MinIdle } else { Reason::Demand };
            actions.push(Planned { action: Action::Launch(Box::new(instance)), reason });
        }
    }
    Plan { actions, waiting: packed.waiting, wake_at, list_soon, ids }
}

/// What this plan takes away, and packing must not count on.
#[derive(Debug, Default)]
pub(super) struct Leaving {
    /// Machines that this plan drains or terminates.
    pub(super) instances: BTreeSet<InstanceId>,
    /// What comes of the boots that failed just now.
    pub(super) breakers: BTreeMap<BootKey, Breaker>,
}

struct Draft<'a> {
    world: &'a World,
    now: Timestamp,
    actions: Vec<Planned>,
    wake: Option<Timestamp>,
    list_soon: bool,
    leaving: Leaving,
}

impl Draft<'_> {
    /// Whether a time has come; if not, the plan wakes then.
    fn due(&mut self, at: Timestamp) -> bool {
        if self.now >= at {
            return true;
        }
        self.wake = Some(self.wake.map_or(at, |wake| wake.min(at)));
        false
    }

    fn push(&mut self, action: Action, reason: Reason) {
        self.actions.push(Planned { action, reason });
    }

    /// The earliest time at which a machine may be judged dead: after a restart, and after a stepped clock, no machine is
    /// for one grace period.
    fn judged(&self, at: Timestamp) -> Timestamp {
        if planted(Mutant::IgnoresGrace) { at } else { at.max(self.world.grace_until) }
    }

    /// What is to be done with a machine whoever waits.
    fn machine(&mut self, machine: &Machine<'_>) {
        let instance = machine.instance;
        let id = instance.id;
        match &instance.phase {
            Phase::Gone { .. } => {
                if self.due(later(instance.changed_at, TOMBSTONE)) {
                    self.push(Action::Forget(id), Reason::Old);
                }
            }
            Phase::Terminating { cause, destroy, .. } => {
                self.list_soon |= matches!(destroy, Call::Accepted { .. });
                if let Call::Due { at, failures } = *destroy
                    && self.due(at)
                {
                    let reason = match failures {
                        0 => Reason::Cause(cause.clone()),
                        _ => Reason::RepeatDestroy { failures },
                    };
                    self.push(Action::Destroy(id), reason);
                }
            }
            Phase::Requested { .. } | Phase::Booting => self.unready(machine),
            Phase::Ready { .. } | Phase::Draining { .. } => self.enrolled(machine),
        }
    }

    /// A machine whose agent has not enrolled.
    fn unready(&mut self, machine: &Machine<'_>) {
        let instance = machine.instance;
        if let Some(note) = machine.stopped() {
            self.terminate(instance, Cause::Stopped { note });
        } else if planted(Mutant::EndsBootWithoutDemand) && self.world.jobs.is_empty() {
            self.terminate(instance, Cause::Drained);
        } else if self.due(self.judged(instance.boot_deadline)) && !planted(Mutant::NeverGivesUpBoot) {
            self.terminate(instance, Cause::BootTimeout);
        } else if let Phase::Requested { create: Call::Due { at, .. } } = instance.phase
            && self.due(at)
        {
            self.push(Action::Create(instance.id), Reason::RepeatCreate);
        }
    }

    /// A machine whose agent has enrolled: first what ends it at once, then what drains it.
    fn enrolled(&mut self, machine: &Machine<'_>) {
        let instance = machine.instance;
        if let Some(cause) = self.dead(machine) {
            return self.terminate(instance, cause);
        }
        let drain = match &instance.phase {
            Phase::Draining { cause } => Some(cause.clone()),
            _ => self.outgrown(machine),
        };
        let busy = !instance.is_vacant() || self.log_outstanding(instance) || self.held(instance);
        let busy = busy && !planted(Mutant::DrainEndsJobs);
        let busy = busy && !(planted(Mutant::ReloadEndsJobs) && drain == Some(Cause::PoolRemoved));
        match (drain, busy) {
            (Some(cause), false) => self.terminate(instance, cause),
            (Some(cause), true) => {
                if matches!(instance.phase, Phase::Ready { .. }) {
                    self.leaving.instances.insert(instance.id);
                    self.push(Action::Drain { instance: instance.id, cause: cause.clone() }, Reason::Cause(cause));
                }
            }
            (None, _) => {}
        }
    }

    /// Of the ready machines without work those on which no waiting job counts: the longest launched go first, and
    /// `min_idle` of each pool stay.
    fn idle(&mut self, vacant: &[Machine<'_>], packed: &Packed<'_>) {
        let mut spare_of = packed.spare_of.clone();
        for Machine { instance, pool, .. } in vacant {
            let (Phase::Ready { idle_since }, Some(pool)) = (&instance.phase, pool) else { continue };
            if packed.reserved.contains(&instance.id)
                || self.log_outstanding(instance)
                || self.held(instance)
                || planted(Mutant::NeverIdle)
            {
                continue;
            }
            let Some(left) = spare_of.get_mut(&pool.name) else { continue };
            let kept = if packed.crowded.contains(&pool.name) { 0 } else { pool.min_idle };
            let spare = packed.spare.contains(&instance.id);
            if spare && *left <= kept {
                continue;
            }
            if self.due(later(*idle_since, pool.idle_timeout)) {
                *left -= u32::from(spare);
                self.terminate(instance, Cause::Idle);
            }
        }
    }

    /// Whether an admin keeps a machine; its end wakes the plan.
    fn held(&mut self, instance: &Instance) -> bool {
        instance.held_until.is_some_and(|until| !self.due(until)) && !planted(Mutant::IgnoresHold)
    }

    /// Why a machine must end now, jobs or not.
    fn dead(&mut self, machine: &Machine<'_>) -> Option<Cause> {
        let (world, instance) = (self.world, machine.instance);
        if let Some(note) = machine.stopped() {
            return Some(Cause::Stopped { note });
        }
        let heard = machine
            .seen
            .and_then(|seen| seen.heard_at)
            .or(instance.ready_at())
            .unwrap_or(instance.created_at)
            .max(world.started_at);
        if instance.is_vacant() {
            let lapsed = later(later(heard, world.settings.lease), LEASE_MARGIN);
            if self.due(self.judged(lapsed)) {
                return Some(Cause::Silent);
            }
        } else {
            let lost_after = machine.pool.map_or(jiff::SignedDuration::from_hours(1), |pool| pool.lost_after);
            if self.due(self.judged(later(heard, lost_after.max(world.settings.lease)))) {
                return Some(Cause::Lost);
            }
            for (_, assignment) in instance.live_assignments() {
                if self.due(self.judged(later(assignment.deadline, OVERTIME))) {
                    return Some(Cause::Overdue);
                }
            }
        }
        self.due(self.judged(instance.expires_at())).then_some(Cause::HardEnd)
    }

    /// Why a machine takes no new work.
    fn outgrown(&mut self, machine: &Machine<'_>) -> Option<Cause> {
        let instance = machine.instance;
        if machine.pool.is_none() {
            return Some(Cause::PoolRemoved);
        }
        if instance.single_use && instance.assigned_total > 0 {
            return Some(Cause::SingleUse);
        }
        self.due(instance.lifetime_end).then_some(Cause::Lifetime)
    }

    /// Whether some job's log is on this machine only, within the bound that an agent keeps it.
    fn log_outstanding(&mut self, instance: &Instance) -> bool {
        instance.assignments.values().any(|assignment| match assignment.state {
            AssignmentState::Ended { at, log_closed: false } => !self.due(log_bound(at)),
            _ => false,
        })
    }

    fn terminate(&mut self, instance: &Instance, cause: Cause) {
        self.leaving.instances.insert(instance.id);
        if cause.is_failed_boot() {
            let breaker = self.world.tripped(instance, &cause.to_string(), self.now);
            self.leaving.breakers.insert(instance.placement.boot_key(), breaker);
        }
        self.push(Action::Terminate { instance: instance.id, cause: cause.clone() }, Reason::Cause(cause));
    }

    fn orphans(&mut self) {
        for (id, orphan) in &self.world.orphans {
            if self.due(self.world.orphan_bound(orphan)) || planted(Mutant::ReapsAtFirstSight) {
                self.push(Action::Reap(*id), Reason::Cause(Cause::Orphaned));
            }
        }
    }

    /// A placement that cools is looked at again when it is over, if somebody waits.
    fn placements(&mut self, packed: &Packed<'_>, asks: &[Ask<'_>]) {
        if packed.waiting.is_empty() && !packed.short {
            return;
        }
        for health in self.world.health.values() {
            if let Health::Cooling { until, .. } = health {
                let _over = self.due(*until);
            }
        }
        for breaker in self.world.breakers.values() {
            let _over = self.due(breaker.until);
        }
        for refusal in asks.iter().filter_map(|ask| ask.refusal) {
            let _again = self.due(refusal.until);
        }
        // Right after the start a job waits for a machine that is to be heard, but not for ever.
        if packed.waiting.values().any(|waiting| matches!(waiting, Waiting::Unheard(_))) {
            let _unheard = self.due(later(self.world.started_at, HEARD));
        }
        // A large job that begins to starve changes the packing by time alone.
        for ask in asks.iter().filter(|ask| ask.gpus > 0) {
            let _starving = self.due(later(ask.queued_at, packing::STARVING));
        }
    }
}
