//! The invariants of the fleet core (design 4), against random histories.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use pilotlight_scaler::{
    fleet::{
        Action, Applied, Cause, Event, Instance, Label, LocalPlacement, Phase, Placement, Plan, Pool, ProviderConfig,
        Settings, World,
        demand::JobState,
        event::{CreateFailure, Enrol, Submission, Synced},
        instance::{AssignmentState, Call},
        plan,
    },
    provider::Listed,
};
use pilotlight_wire::{
    GpuId, InstanceId, JobId, Usage, Verdict,
    agent::{AssignmentEvent, AssignmentEventKind, AssignmentReport, Finished, Gpu, Inventory, Seq, Stage},
    api::DrainTarget,
};
use proptest::prelude::*;
use uuid::Uuid;

const START: &str = "2026-01-01T00:00:00Z";

fn settings() -> Settings {
    let placement = |name: &str, gpus: u32, max: Option<u32>, ids: &str| Placement {
        name: name.parse().unwrap(),
        gpus,
        max_instances: max,
        price_per_hour: Some(8.0),
        provider: ProviderConfig::Local(LocalPlacement {
            gpu_ids: (0..16).map(|n| GpuId(format!("GPU-{ids}{n}"))).collect(),
            agent: None,
            host_image: true,
        }),
    };
    let pool = |name: &str, placements: &[&str], max, reuse, cpu_jobs| Pool {
        name: name.parse().unwrap(),
        placements: placements.iter().map(|name| name.parse().unwrap()).collect(),
        max_instances: max,
        min_idle: 0,
        idle_timeout: SignedDuration::from_mins(10),
        boot_timeout: SignedDuration::from_mins(20),
        max_lifetime: SignedDuration::from_hours(24),
        lost_after: SignedDuration::from_hours(1),
        reuse,
        cpu_jobs,
        volumes: Vec::new(),
    };
    let label = |name: &str, pool: &str, gpus, priority| Label {
        name: name.parse().unwrap(),
        pool: pool.parse().unwrap(),
        gpus,
        timeout: SignedDuration::from_hours(6),
        priority,
    };
    let map = |placements: Vec<Placement>| placements.into_iter().map(|one| (one.name.clone(), one)).collect();
    Settings {
        lease: SignedDuration::from_mins(10),
        placements: map(vec![
            placement("small", 4, Some(2), "s"),
            placement("large", 8, Some(2), "l"),
            placement("cpu", 0, None, "c"),
        ]),
        pools: [
            pool("gpu", &["small", "large"], 3, true, None),
            pool("once", &["large"], 2, false, Some(1)),
            pool("cpu", &["cpu"], 2, true, Some(2)),
        ]
        .map(|pool| (pool.name.clone(), pool))
        .into(),
        labels: [
            label("x1", "gpu", 1, 0),
            label("x4", "gpu", 4, 0),
            label("x8", "gpu", 8, 0),
            label("urgent", "gpu", 2, 5),
            label("once", "once", 2, 0),
            label("cpu", "cpu", 0, 0),
        ]
        .map(|label| (label.name.clone(), label))
        .into(),
    }
}

const LABELS: [&str; 6] = ["x1", "x4", "x8", "urgent", "once", "cpu"];

#[derive(Clone, Debug)]
enum Op {
    Submit(usize),
    Cancel(usize),
    Created(usize),
    CreateFailed(usize, u8),
    Enrol(usize, bool),
    Sync(usize),
    Started(usize),
    Finished(usize, bool),
    Refused(usize),
    LogClosed(usize),
    Destroyed(usize),
    DestroyFailed(usize),
    List,
    StaleList,
    ListWithout(usize),
    ListStopped(usize),
    ListFailed,
    Drain(usize, bool),
    DrainAll(bool),
    Resume,
    Advance(u32),
    Restart,
    ClockStepped,
}

fn op() -> impl Strategy<Value = Op> {
    let n = 0..64_usize;
    prop_oneof![
        8 => (0..LABELS.len()).prop_map(Op::Submit),
        2 => n.clone().prop_map(Op::Cancel),
        4 => n.clone().prop_map(Op::Created),
        2 => (n.clone(), 0..3_u8).prop_map(|(n, class)| Op::CreateFailed(n, class)),
        8 => (n.clone(), prop::bool::weighted(0.9)).prop_map(|(n, healthy)| Op::Enrol(n, healthy)),
        6 => n.clone().prop_map(Op::Sync),
        5 => n.clone().prop_map(Op::Started),
        6 => (n.clone(), any::<bool>()).prop_map(|(n, good)| Op::Finished(n, good)),
        1 => n.clone().prop_map(Op::Refused),
        4 => n.clone().prop_map(Op::LogClosed),
        5 => n.clone().prop_map(Op::Destroyed),
        2 => n.clone().prop_map(Op::DestroyFailed),
        8 => Just(Op::List),
        1 => Just(Op::StaleList),
        2 => n.clone().prop_map(Op::ListWithout),
        1 => n.clone().prop_map(Op::ListStopped),
        2 => Just(Op::ListFailed),
        1 => (n, any::<bool>()).prop_map(|(n, now)| Op::Drain(n, now)),
        1 => any::<bool>().prop_map(Op::DrainAll),
        1 => Just(Op::Resume),
        8 => (0..7200_u32).prop_map(Op::Advance),
        1 => Just(Op::Restart),
        1 => Just(Op::ClockStepped),
    ]
}

/// A world with a provider that does what the operations say.
struct Rig {
    world: World,
    now: Timestamp,
    jobs: Vec<JobId>,
    listed: BTreeSet<InstanceId>,
    seed: u64,
}

impl Rig {
    fn new() -> Self {
        let now = START.parse().unwrap();
        let mut rig = Self {
            world: World::new(settings(), 1, now, [], []),
            now,
            jobs: Vec::new(),
            listed: BTreeSet::new(),
            seed: 1,
        };
        rig.list(&rig.listed.clone(), None);
        rig.pass();
        rig
    }

    fn advance(&mut self, by: SignedDuration) {
        self.now = self.now.saturating_add(by).unwrap();
    }

    fn apply(&mut self, event: Event) {
        let _refused_events_leave_the_world_as_it_was = self.world.apply(event, self.now);
    }

    fn list(&mut self, listed: &BTreeSet<InstanceId>, stopped: Option<InstanceId>) {
        self.advance(SignedDuration::from_millis(1));
        let listed = listed
            .iter()
            .map(|&instance| Listed {
                instance,
                alive: stopped != Some(instance),
                note: Some("stopped".to_owned()),
                tags: None,
            })
            .collect();
        self.apply(Event::ListRead { began_at: self.now, listed });
    }

    fn nth(&self, n: usize, of: impl Fn(&Instance) -> bool) -> Option<InstanceId> {
        let found: Vec<InstanceId> = self.world.instances().filter(|i| of(i)).map(|i| i.id).collect();
        (!found.is_empty()).then(|| found[n % found.len()])
    }

    fn nth_assignment(&self, n: usize) -> Option<(InstanceId, pilotlight_wire::AssignmentId, u64, JobId)> {
        let found: Vec<_> = self
            .world
            .instances()
            .flat_map(|i| i.live_assignments().map(move |(id, a)| (i.id, *id, a.last_event, a.job)))
            .collect();
        (!found.is_empty()).then(|| found[n % found.len()])
    }

    fn event(&mut self, n: usize, event: AssignmentEventKind) {
        if let Some((instance, assignment, last, _)) = self.nth_assignment(n) {
            let event = AssignmentEvent { n: last + 1, at: self.now, event };
            self.apply(Event::AssignmentEvent { instance, assignment, event });
        }
    }

    fn sync(&mut self, instance: InstanceId) {
        let Some(machine) = self.world.instance(instance) else { return };
        let assignments = machine
            .live_assignments()
            .map(|(id, _)| AssignmentReport {
                id: *id,
                job: None,
                gpus: Vec::new(),
                deadline: None,
                stage: Stage::Running,
                detail: None,
            })
            .collect();
        self.apply(Event::Synced(Box::new(Synced {
            instance,
            nonce: "n".to_owned(),
            seq: Seq { run: 1, n: 1 },
            assignments,
            sample: None,
        })));
    }

    fn enrol(&mut self, instance: InstanceId, healthy: bool) {
        let gpus = self
            .world
            .instance(instance)
            .map(|i| i.gpu_ids.iter().map(|id| Gpu { uuid: id.clone(), model: String::new(), pci: String::new() }))
            .into_iter()
            .flatten()
            .collect();
        self.apply(Event::Enrolled(Box::new(Enrol {
            instance,
            nonce: "n".to_owned(),
            proven: false,
            agent_version: "1".to_owned(),
            agent_started_at: self.now,
            inventory: Inventory { gpus, ..Inventory::default() },
            problems: if healthy { Vec::new() } else { vec!["Docker does not answer".to_owned()] },
        })));
    }

    #[expect(clippy::too_many_lines, reason = "one arm per kind of event")]
    fn run(&mut self, op: &Op) {
        let requested = |i: &Instance| matches!(i.phase, Phase::Requested { .. });
        let unready = |i: &Instance| matches!(i.phase, Phase::Requested { .. } | Phase::Booting);
        let terminating = |i: &Instance| matches!(i.phase, Phase::Terminating { destroy: Call::Sent { .. }, .. });
        match *op {
            Op::Submit(label) => {
                let id = JobId::from_uuid(Uuid::from_u128(self.jobs.len() as u128 + 1));
                self.jobs.push(id);
                self.apply(Event::Submitted(Box::new(Submission {
                    id,
                    label: LABELS[label].parse().unwrap(),
                    name: String::new(),
                    body_hash: String::new(),
                    timeout: None,
                    priority: None,
                })));
            }
            Op::Cancel(n) if !self.jobs.is_empty() => {
                self.apply(Event::JobCancelled(self.jobs[n % self.jobs.len()]));
            }
            Op::Created(n) => {
                if let Some(id) = self.nth(n, requested) {
                    self.listed.insert(id);
                    self.apply(Event::Created(id));
                }
            }
            Op::CreateFailed(n, class) => {
                if let Some(instance) = self.nth(n, requested) {
                    let class = match class {
                        0 => CreateFailure::Capacity,
                        // The configuration of the test is right; the provider's "invalid" would stop it for good.
                        _ => CreateFailure::MayExist,
                    };
                    if class == CreateFailure::MayExist {
                        self.listed.insert(instance);
                    }
                    self.apply(Event::CreateFailed { instance, class, message: "no".to_owned() });
                }
            }
            Op::Enrol(n, healthy) => {
                if let Some(id) = self.nth(n, unready) {
                    self.listed.insert(id);
                    self.enrol(id, healthy);
                }
            }
            Op::Sync(n) => {
                if let Some(id) = self.nth(n, |i| i.enrolment.is_some()) {
                    self.sync(id);
                }
            }
            Op::Started(n) => {
                self.event(n, AssignmentEventKind::Started { image_ready_at: self.now, image_id: None });
            }
            Op::Finished(n, good) => {
                let verdict = if good { Verdict::Success } else { Verdict::Failure };
                self.event(
                    n,
                    AssignmentEventKind::Finished(Finished {
                        verdict,
                        exit_code: Some(i32::from(!good)),
                        reason: None,
                        log_bytes: 10,
                        log_gap: false,
                        usage: Some(Usage::default()),
                    }),
                );
            }
            Op::Refused(n) => self.event(n, AssignmentEventKind::Refused { reason: "disk full".to_owned() }),
            Op::LogClosed(n) => {
                let open: Vec<JobId> = self
                    .world
                    .jobs()
                    .filter(|job| job.ended().is_some() && !job.is_settled())
                    .map(|job| job.id)
                    .collect();
                if !open.is_empty() {
                    self.apply(Event::LogClosed(open[n % open.len()]));
                }
            }
            Op::Destroyed(n) => {
                if let Some(id) = self.nth(n, terminating) {
                    self.listed.remove(&id);
                    self.apply(Event::DestroyAccepted(id));
                }
            }
            Op::DestroyFailed(n) => {
                if let Some(instance) = self.nth(n, terminating) {
                    self.apply(Event::DestroyFailed { instance, message: "no".to_owned() });
                }
            }
            Op::List => self.list(&self.listed.clone(), None),
            Op::StaleList => {
                let began_at = self.now - SignedDuration::from_mins(5);
                self.apply(Event::ListRead { began_at, listed: Vec::new() });
            }
            Op::ListWithout(n) => {
                let mut listed = self.listed.clone();
                if let Some(id) = self.nth(n, Instance::is_live) {
                    listed.remove(&id);
                }
                self.list(&listed, None);
            }
            Op::ListStopped(n) => {
                let stopped = self.nth(n, Instance::is_live);
                self.list(&self.listed.clone(), stopped);
            }
            Op::ListFailed => self.apply(Event::ListFailed { message: "500".to_owned() }),
            Op::Drain(n, now) => {
                if let Some(id) = self.nth(n, Instance::is_live) {
                    self.apply(Event::Drain { target: DrainTarget::Instance(id), now });
                }
            }
            Op::DrainAll(now) => self.apply(Event::Drain { target: DrainTarget::All, now }),
            Op::Resume => self.apply(Event::Resumed),
            Op::Advance(seconds) => self.advance(SignedDuration::from_secs(seconds.into())),
            Op::Restart => self.restart(),
            Op::ClockStepped => self.apply(Event::ClockStepped),
            Op::Cancel(_) => {}
        }
    }

    /// What a new scaler makes of what the last one committed.
    fn restart(&mut self) {
        self.seed += 1;
        let copy = |text: String| serde_json::from_str(&text).unwrap();
        let instances: Vec<Instance> =
            self.world.instances().map(|i| copy(serde_json::to_string(i).unwrap())).collect();
        let jobs: Vec<pilotlight_scaler::fleet::Job> =
            self.world.jobs().map(|job| serde_json::from_str(&serde_json::to_string(job).unwrap()).unwrap()).collect();
        self.world = World::new(settings(), self.seed, self.now, instances, jobs);
    }

    /// One pass as the control task makes it, with the invariants checked on the way.
    fn pass(&mut self) -> Plan {
        let planned = plan(&self.world, self.now);
        for action in planned.actions.iter().map(|planned| &planned.action) {
            self.check_kill(action);
        }
        self.world.record(&planned, self.now);
        let again = plan(&self.world, self.now);
        assert!(again.actions.is_empty(), "planning again after recording: {:?}", again.actions);
        let dirty = self.world.take_dirty();
        self.world.forget_settled(&dirty);
        self.check_bounds();
        planned
    }

    /// A machine with a running job is never terminated for idleness, drain, reload or missing demand.
    fn check_kill(&self, action: &Action) {
        let Action::Terminate { instance, cause } = action else { return };
        let machine = self.world.instance(*instance).unwrap();
        if !machine.is_vacant() {
            assert!(
                matches!(
                    cause,
                    Cause::Lost | Cause::Overdue | Cause::HardEnd | Cause::Vanished | Cause::Stopped { .. }
                ),
                "{cause:?} must not end a running job"
            );
        }
    }

    fn check_bounds(&self) {
        let settings = settings();
        let mut per_pool: BTreeMap<_, u32> = BTreeMap::new();
        let mut per_placement: BTreeMap<_, u32> = BTreeMap::new();
        let mut handed_out = BTreeSet::new();
        for machine in self.world.instances().filter(|machine| machine.is_live()) {
            *per_pool.entry(&machine.pool).or_default() += 1;
            *per_placement.entry(&machine.placement.name).or_default() += 1;
            for gpu in &machine.gpu_ids {
                assert!(handed_out.insert(gpu.clone()), "{gpu} belongs to two machines");
            }
            let mut used = BTreeSet::new();
            let mut cpu_jobs = 0;
            for (_, assignment) in machine.live_assignments() {
                cpu_jobs += u32::from(assignment.gpu_ids.is_empty());
                for gpu in &assignment.gpu_ids {
                    assert!(machine.gpu_ids.contains(gpu), "{gpu} is not the machine's");
                    assert!(used.insert(gpu.clone()), "{gpu} belongs to two jobs");
                }
            }
            assert!(cpu_jobs <= machine.cpu_jobs);
            assert!(!machine.single_use || machine.assigned_total <= 1, "one job ever");
        }
        for (pool, count) in per_pool {
            assert!(count <= settings.pools[pool].max_instances, "{pool} has {count}");
        }
        for (placement, count) in per_placement {
            assert!(settings.placements[placement].max_instances.is_none_or(|max| count <= max));
        }
    }

    /// From here the provider answers, nobody submits and no agent says a word.
    fn settle(&mut self) {
        self.apply(Event::Resumed);
        for job in self.jobs.clone() {
            self.apply(Event::JobCancelled(job));
        }
        for _ in 0..2000 {
            let planned = self.pass();
            let calls: Vec<InstanceId> = self
                .world
                .instances()
                .filter(|i| matches!(i.phase, Phase::Terminating { destroy: Call::Sent { .. }, .. }))
                .map(|i| i.id)
                .collect();
            let logs: Vec<JobId> = self
                .world
                .jobs()
                .filter(|job| {
                    matches!(
                        job.ended().map(|ended| ended.log),
                        Some(pilotlight_scaler::fleet::demand::Log::Closing { .. })
                    )
                })
                .map(|job| job.id)
                .collect();
            let busy = !calls.is_empty() || !logs.is_empty() || planned.list_soon;
            for id in calls {
                self.listed.remove(&id);
                self.apply(Event::DestroyAccepted(id));
            }
            for job in logs {
                self.apply(Event::LogClosed(job));
            }
            self.list(&self.listed.clone(), None);
            let all_gone = self.world.instances().all(|i| !i.is_live());
            if all_gone && self.world.jobs().next().is_none() {
                return;
            }
            if !busy {
                let wake = planned.wake_at.expect("something is left, so there is a time to look again");
                self.now = self.now.max(wake);
            }
        }
        let left: Vec<_> = self.world.instances().filter(|i| i.is_live()).collect();
        panic!("time did not end it: {left:#?} {:#?}", self.world.jobs().collect::<Vec<_>>());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, max_shrink_iters: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn invariants_hold_in_every_history(ops in prop::collection::vec(op(), 1..120)) {
        let mut rig = Rig::new();
        for op in &ops {
            rig.run(op);
            rig.pass();
        }
        rig.settle();
    }

    #[test]
    fn the_order_of_submissions_does_not_matter(labels in prop::collection::vec(0..LABELS.len(), 1..20), rotate in 0..20_usize) {
        let outcome = |order: &[usize]| {
            let mut rig = Rig::new();
            for &n in order {
                let submission = Submission {
                    id: JobId::from_uuid(Uuid::from_u128(n as u128 + 1)),
                    label: LABELS[labels[n]].parse().unwrap(),
                    name: String::new(), body_hash: String::new(), timeout: None, priority: None,
                };
                rig.apply(Event::Submitted(Box::new(submission)));
            }
            let planned = rig.pass();
            let waiting: BTreeMap<JobId, String> = planned.waiting.iter().map(|(job, why)| (*job, why.to_string())).collect();
            (planned.actions.len(), waiting)
        };
        let order: Vec<usize> = (0..labels.len()).collect();
        let mut other = order.clone();
        other.rotate_left(rotate % labels.len());
        other.reverse();
        prop_assert_eq!(outcome(&order), outcome(&other));
    }
}

/// Runs a stream of small jobs that would fill every gap, and says when the large one started.
#[test]
fn a_large_job_starts_though_small_ones_keep_coming() {
    let mut rig = Rig::new();
    let mut settings = settings();
    for pool in settings.pools.values_mut() {
        pool.max_instances = 1;
        pool.placements.retain(|name| name.as_str() != "small");
    }
    rig.world = World::new(settings, 3, rig.now, [], []);
    rig.list(&BTreeSet::new(), None);
    for _ in 0..8 {
        rig.run(&Op::Submit(0));
    }
    rig.pass();
    rig.run(&Op::Enrol(0, true));
    rig.pass();
    rig.run(&Op::Submit(2));
    let large = *rig.jobs.last().unwrap();
    let started = (0..120).find(|_| {
        rig.advance(SignedDuration::from_mins(1));
        // Each minute one small job ends and two new ones are there.
        rig.run(&Op::Finished(0, true));
        rig.run(&Op::Submit(0));
        rig.run(&Op::Submit(0));
        for id in rig.world.instances().map(|i| i.id).collect::<Vec<_>>() {
            rig.sync(id);
        }
        rig.pass();
        rig.world.job(large).is_some_and(|job| matches!(job.state, JobState::Placed { .. }))
    });
    let minutes = started.expect("it starts");
    assert!(minutes < 30, "ten minutes of waiting and eight for the small ones to end, not {minutes}");
}

#[test]
fn a_repeated_event_changes_nothing_and_a_gap_is_named() {
    let mut rig = Rig::new();
    rig.run(&Op::Submit(0));
    rig.pass();
    rig.run(&Op::Enrol(0, true));
    rig.pass();
    let (instance, assignment, _, job) = rig.nth_assignment(0).unwrap();
    let started = |n| Event::AssignmentEvent {
        instance,
        assignment,
        event: AssignmentEvent {
            n,
            at: rig_time(),
            event: AssignmentEventKind::Started { image_ready_at: rig_time(), image_id: None },
        },
    };
    let gap = rig.world.apply(started(2), rig.now).unwrap_err();
    assert_eq!(gap.to_string(), "event 1 is expected next");
    assert_eq!(rig.world.apply(started(1), rig.now), Ok(Applied::Done));
    let before = rig.world.job(job).cloned();
    rig.advance(SignedDuration::from_secs(5));
    assert_eq!(rig.world.apply(started(1), rig.now), Ok(Applied::Done));
    assert_eq!(rig.world.job(job).cloned(), before);
    let machine = rig.world.instance(instance).unwrap();
    assert_eq!(machine.assignments[&assignment].state, AssignmentState::Running);
}

fn rig_time() -> Timestamp {
    START.parse().unwrap()
}

/// Found by the property test: after a restart within the same millisecond a new machine sorted before an older one, so
/// that jobs were packed another way and one more machine was launched.
#[test]
fn a_restart_within_a_millisecond_packs_the_same() {
    for seed in 0..64 {
        let mut rig = Rig::new();
        rig.seed = seed;
        rig.restart();
        rig.list(&rig.listed.clone(), None);
        rig.run(&Op::Submit(0));
        rig.pass();
        rig.restart();
        rig.apply(Event::ListRead { began_at: rig.now, listed: Vec::new() });
        // A small one is there; these need a large one each.
        for label in [2, 0, 2] {
            rig.run(&Op::Submit(label));
            rig.pass();
        }
    }
}
