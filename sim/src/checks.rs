//! The invariants of design 4, checked at every step of a random history. They panic, as tests do.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use pilotlight_scaler::fleet::{
    Action, Cause, Instance, Job, Phase, Plan, World, demand::JobState, instance::AssignmentState,
};
use pilotlight_wire::{InstanceId, Verdict};

/// What the checks remember from step to step.
pub struct Checks {
    /// Nothing may be judged dead before this.
    grace_until: Timestamp,
    /// Truthful or lying, how many lists in a row did not show a machine that could have been on them.
    omitted: BTreeMap<InstanceId, u32>,
    vanished: BTreeSet<InstanceId>,
}

impl Checks {
    /// At the beginning.
    #[must_use]
    pub fn new(now: Timestamp) -> Self {
        Self { grace_until: now, omitted: BTreeMap::new(), vanished: BTreeSet::new() }
    }

    /// Nothing may be judged dead for so long.
    pub fn grace(&mut self, until: Timestamp) {
        self.grace_until = self.grace_until.max(until);
    }

    /// A new scaler has seen no list.
    pub fn restart(&mut self, until: Timestamp) {
        self.grace(until);
        self.omitted.clear();
    }

    /// A new scaler knows nothing.
    pub fn forget(&mut self, until: Timestamp) {
        self.restart(until);
        self.vanished.clear();
    }

    /// Counts what a list leaves out.
    pub fn omissions(&mut self, world: &World, began_at: Timestamp, listed: &BTreeSet<InstanceId>) {
        for instance in world.instances() {
            if listed.contains(&instance.id) {
                self.omitted.remove(&instance.id);
            } else if instance.changed_at < began_at {
                *self.omitted.entry(instance.id).or_default() += 1;
            }
        }
    }

    /// After a list: a machine counts as vanished only after two without it, and as gone only when it is.
    pub fn vanished(&mut self, world: &World, truth: &BTreeSet<InstanceId>) {
        for instance in world.instances() {
            if matches!(&instance.phase, Phase::Terminating { cause: Cause::Vanished, .. })
                && self.vanished.insert(instance.id)
            {
                let omitted = self.omitted.get(&instance.id).copied().unwrap_or(0);
                assert!(omitted >= 2, "taken for vanished after {omitted} lists without it");
            }
        }
        proved_gone(world, truth);
    }

    /// Before a plan is recorded.
    pub fn planned(&self, world: &World, plan: &Plan, now: Timestamp) {
        for planned in &plan.actions {
            match &planned.action {
                Action::Terminate { instance, cause } => {
                    self.terminate(world.instance(*instance).expect("a machine that is known"), cause, now)
                }
                Action::Launch(_) => {
                    let list = world.list_state();
                    assert!(list.read_at.is_some() && list.failing.is_none(), "launched while the list is unknown");
                }
                Action::Assign { job, gpu_ids, .. } => {
                    let job = world.job(*job).expect("a job that is known");
                    assert_eq!(gpu_ids.len(), job.gpus as usize, "as many GPUs as it asked for");
                    fair(world, plan, job);
                }
                Action::Reap(_) => assert!(now >= self.grace_until, "reaped at first sight"),
                Action::Grant { wanted, gpu_ids, .. } => {
                    let label = &world.settings().labels[&wanted.label];
                    assert_eq!(gpu_ids.len(), label.gpus as usize, "as many GPUs as its label has");
                }
                Action::Create(_)
                | Action::Mint(_)
                | Action::Withdraw { .. }
                | Action::EndRegistration(_)
                | Action::Drain { .. }
                | Action::Destroy(_)
                | Action::CloseLog { .. }
                | Action::Forget(_) => {}
            }
        }
    }

    fn terminate(&self, machine: &Instance, cause: &Cause, now: Timestamp) {
        let fault =
            matches!(cause, Cause::Silent | Cause::Lost | Cause::Overdue | Cause::HardEnd | Cause::Stopped { .. });
        // A machine with a running job is never terminated for idleness, drain, reload or missing demand.
        assert!(machine.is_vacant() || fault, "{cause:?} must not end a running job");
        // Never kill on demand dropping: a booting machine serves the next job or idles out.
        if matches!(machine.phase, Phase::Requested { .. } | Phase::Booting) {
            assert!(matches!(cause, Cause::BootTimeout | Cause::Stopped { .. }), "{cause:?} must not end a boot");
        }
        let judged =
            matches!(cause, Cause::Silent | Cause::Lost | Cause::Overdue | Cause::HardEnd | Cause::BootTimeout);
        assert!(!judged || now >= self.grace_until, "{cause:?} within the grace period");
        assert!(
            !machine.is_held(now) || fault || *cause == Cause::BootTimeout,
            "{cause:?} must not end a held machine"
        );
    }

    /// After a plan was recorded.
    pub fn recorded(&self, world: &World, plan: &Plan) {
        for planned in &plan.actions {
            let Action::Launch(launched) = &planned.action else { continue };
            let live = |of: &dyn Fn(&Instance) -> bool| world.instances().filter(|i| i.is_live() && of(i)).count();
            let max = world.settings().pools[&launched.pool].max_instances as usize;
            assert!(live(&|i| i.pool == launched.pool) <= max, "{} has more than {max}", launched.pool);
            let name = &launched.placement.name;
            if let Some(max) = world.settings().placements[name].max_instances {
                assert!(live(&|i| i.placement.name == *name) <= max as usize, "{name} has more than {max}");
            }
        }
        let mut handed_out = BTreeSet::new();
        for machine in world.instances().filter(|machine| machine.is_live()) {
            // One that was proved gone and is there after all had its GPUs given on.
            let back = matches!(machine.phase, Phase::Terminating { cause: Cause::Reappeared, .. });
            for gpu in machine.gpu_ids.iter().filter(|_| !back) {
                assert!(handed_out.insert(gpu), "{gpu} belongs to two machines");
            }
            exclusive(machine);
        }
        for job in world.jobs() {
            told_truly(world, job);
        }
    }
}

/// `Gone` is said of machines that are.
///
/// # Panics
/// When one is there.
pub fn proved_gone(world: &World, truth: &BTreeSet<InstanceId>) {
    for instance in world.instances().filter(|instance| !instance.is_live()) {
        assert!(!truth.contains(&instance.id), "said to be gone and is there");
    }
}

/// GPUs assigned never exceed GPUs present, and none has two jobs.
fn exclusive(machine: &Instance) {
    let mut used = BTreeSet::new();
    let mut cpu_jobs = 0;
    for (_, assignment) in machine.live_assignments() {
        // One that was over when it was adopted waits for a last word, and holds nothing.
        cpu_jobs += u32::from(assignment.gpu_ids.is_empty() && !assignment.adopted);
        for gpu in &assignment.gpu_ids {
            assert!(machine.gpu_ids.contains(gpu), "{gpu} is not the machine's");
            assert!(used.insert(gpu), "{gpu} belongs to two jobs");
        }
    }
    assert!(cpu_jobs <= machine.cpu_jobs);
    assert!(!machine.single_use || machine.assigned_total <= 1, "one job ever");
}

/// No job starts while an older equal one waits that could have started.
fn fair(world: &World, plan: &Plan, started: &Job) {
    for older in world.jobs().filter(|job| job.is_queued() && job.refusal.is_none()) {
        if (&older.label, older.priority) == (&started.label, started.priority) && older.queued_at < started.queued_at {
            let starts = |planned: &pilotlight_scaler::fleet::Planned| matches!(planned.action, Action::Assign { job, .. } if job == older.id);
            assert!(plan.actions.iter().any(starts), "a younger job of the same label starts before an older one");
        }
    }
}

/// A job is said to be lost only once its machine is gone.
fn told_truly(world: &World, job: &Job) {
    if let (Some(ended), Some(on)) = (job.ended(), job.instance)
        && ended.verdict == Verdict::Infrastructure
        && ended.reason.as_deref().is_some_and(|reason| reason.contains("machine is gone"))
    {
        let gone = |machine: &Instance| {
            // One that is listed again was proved gone all the same.
            !machine.is_live() || matches!(machine.phase, Phase::Terminating { cause: Cause::Reappeared, .. })
        };
        assert!(world.instance(on).is_none_or(gone), "lost, and its machine is there");
    }
    if let JobState::Placed { instance, assignment } = &job.state {
        let claim = world.instance(*instance).and_then(|machine| machine.assignments.get(assignment));
        let live = claim.is_some_and(|claim| !matches!(claim.state, AssignmentState::Ended { .. }));
        assert!(live, "on a machine that does not have it");
    }
}
