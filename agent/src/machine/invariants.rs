//! Whatever happens, in whatever order, with restarts anywhere: what must never be, and what must always come.

use pilotlight_wire::Verdict;
use proptest::prelude::*;

use super::{
    tables::{at, finished, id, policy, setup, start},
    *,
};

#[derive(Clone, Debug)]
enum Step {
    Start(u128, u64),
    Cancel(u128),
    Terminate,
    Gone,
    StaleAnswer(u128),
    Started(u128),
    Ends(u128, u64),
    Ack(u128),
    LogDone(u128),
    Wait(u64),
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    let job = 1..4_u128;
    prop_oneof![
        6 => (job.clone(), 1..5000_u64).prop_map(|(n, seconds)| Step::Start(n, seconds)),
        3 => job.clone().prop_map(Step::Cancel),
        1 => Just(Step::Terminate),
        1 => Just(Step::Gone),
        2 => job.clone().prop_map(Step::StaleAnswer),
        4 => job.clone().prop_map(Step::Started),
        5 => (job.clone(), 0..3_u64).prop_map(|(n, bytes)| Step::Ends(n, bytes)),
        6 => job.clone().prop_map(Step::Ack),
        6 => job.prop_map(Step::LogDone),
        4 => (1..4000_u64).prop_map(Step::Wait),
        2 => Just(Step::Restart),
    ]
}

/// The world around the machine: its disk, its tasks, and a scaler that remembers what it was told.
struct World {
    machine: Machine,
    run: u64,
    now: u64,
    disk: BTreeMap<AssignmentId, Found>,
    logs: BTreeMap<AssignmentId, LogEnd>,
    delivering: BTreeSet<AssignmentId>,
    running: BTreeMap<AssignmentId, Wish>,
    /// Jobs that ended, in any run of the agent.
    ended: BTreeSet<AssignmentId>,
    /// Assignments whose last event the scaler has: it starts them no more.
    over: BTreeSet<AssignmentId>,
    log_done: BTreeSet<AssignmentId>,
    cancelled: BTreeSet<AssignmentId>,
    told_to_leave: bool,
    left: bool,
}

impl World {
    fn new() -> Self {
        let (machine, effects) = Machine::new(setup(1, vec![]), at(0));
        assert_eq!(effects, []);
        let mut world = Self {
            machine,
            run: 1,
            now: 0,
            disk: BTreeMap::new(),
            logs: BTreeMap::new(),
            delivering: BTreeSet::new(),
            running: BTreeMap::new(),
            ended: BTreeSet::new(),
            over: BTreeSet::new(),
            log_done: BTreeSet::new(),
            cancelled: BTreeSet::new(),
            told_to_leave: false,
            left: false,
        };
        world.handle(Event::Enrolled(policy()));
        world
    }

    fn handle(&mut self, event: Event) {
        if !self.left {
            let effects = self.machine.handle(event, at(self.now));
            self.apply(effects);
        }
    }

    fn answer(&mut self, directives: Vec<Directive>) {
        let n = self.machine.sync_request(at(0)).seq.n;
        self.handle(Event::Synced { n, sent: at(self.now).boot, directives, lease_seconds: 600 });
    }

    fn apply(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Persist(id, record) => {
                    let new = self.disk.insert(id, Found { id, record, events: vec![], acked: 0 }).is_none();
                    assert!(new, "an assignment is accepted once");
                }
                Effect::Run(start) => {
                    let id = start.assignment;
                    assert!(self.disk.contains_key(&id), "the file comes first");
                    assert!(!self.ended.contains(&id), "a job never runs again after its end");
                    assert!(self.running.insert(id, Wish::Run).is_none(), "a job has one task");
                }
                Effect::Wish(id, wish) => {
                    let before = self.running.insert(id, wish).expect("only running jobs are told");
                    assert!(before == Wish::Run || wish == Wish::Terminate);
                    match wish {
                        Wish::Run => panic!("never back"),
                        Wish::Cancel => assert!(self.cancelled.contains(&id)),
                        Wish::Terminate => assert!(self.told_to_leave, "only the scaler ends jobs from above"),
                        Wish::Timeout => {
                            let Record::Started { deadline, .. } = &self.disk[&id].record else { panic!() };
                            assert!(deadline.remaining(at(self.now), "boot").is_zero(), "not before the deadline");
                        }
                    }
                }
                Effect::Emit(id, event) => {
                    let found = self.disk.get_mut(&id).expect("events live beside the file");
                    assert_eq!(event.n, found.events.len() as u64 + 1, "no gap and no number twice");
                    let over = found.events.iter().any(|e| !matches!(e.event, AssignmentEventKind::Started { .. }));
                    assert!(!over, "nothing after the last word");
                    found.events.push(event);
                }
                Effect::Deliver(id) => {
                    assert!(self.delivering.insert(id), "one delivery");
                }
                Effect::Log(id, end) => {
                    self.logs.insert(id, end);
                }
                Effect::Forget(id) => {
                    let found = self.disk.remove(&id).expect("forgotten once");
                    assert!(!self.running.contains_key(&id));
                    assert!(self.over.contains(&id), "the last event is acknowledged");
                    assert_eq!(found.acked, found.events.len() as u64);
                    assert!(self.log_done.contains(&id), "the scaler has the log");
                    self.delivering.remove(&id);
                }
                Effect::Leave(leave) => {
                    assert!(!self.left);
                    self.left = true;
                    match leave {
                        Leave::Terminated => assert!(self.told_to_leave),
                        Leave::Lapsed => assert!(self.running.is_empty(), "a lapsed agent leaves no job behind"),
                    }
                }
                Effect::Sync | Effect::SyncSoon => {}
            }
        }
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Start(n, seconds) => {
                if !self.over.contains(&id(n)) {
                    let start = Start { remaining_seconds: seconds, ..start(n, &["GPU-0"]) };
                    self.answer(vec![Directive::Start(Box::new(start))]);
                }
            }
            Step::Cancel(n) => {
                if !self.over.contains(&id(n)) {
                    self.cancelled.insert(id(n));
                    self.answer(vec![Directive::Cancel { assignment: id(n) }]);
                }
            }
            Step::Terminate => {
                self.told_to_leave = true;
                self.answer(vec![Directive::Terminate { reason: String::new() }]);
            }
            Step::Gone => {
                self.told_to_leave = true;
                self.handle(Event::Gone);
            }
            // An answer that was on its way while the job ended and was forgotten.
            Step::StaleAnswer(n) => {
                let asked_for = !self.over.contains(&id(n));
                let sync = self.machine.sync_request(at(0)).seq.n;
                for step in [Step::Ends(n, 0), Step::Ack(n), Step::LogDone(n)] {
                    self.take(step);
                }
                if asked_for {
                    let directives = vec![Directive::Start(Box::new(start(n, &[])))];
                    self.handle(Event::Synced { n: sync, sent: at(self.now).boot, directives, lease_seconds: 600 });
                }
            }
            Step::Started(n) => {
                if self.running.contains_key(&id(n)) {
                    let wall = at(self.now).wall;
                    let progress = Progress::Started { image_ready_at: wall, started_at: wall, image_id: None };
                    self.handle(Event::Progress(id(n), progress));
                }
            }
            Step::Ends(n, bytes) => {
                if self.running.remove(&id(n)).is_some() {
                    self.ended.insert(id(n));
                    self.handle(Event::Ended(id(n), finished(Verdict::Success), bytes));
                }
            }
            Step::Ack(n) => {
                let unacked = self.disk.get_mut(&id(n)).filter(|found| found.acked < found.events.len() as u64);
                if let Some(found) = unacked.filter(|found| self.delivering.contains(&found.id)) {
                    let event = &found.events[usize::try_from(found.acked).unwrap()];
                    found.acked += 1;
                    if !matches!(event.event, AssignmentEventKind::Started { .. }) {
                        self.over.insert(id(n));
                    }
                    let acked = found.acked;
                    self.handle(Event::Acked(id(n), acked, at(self.now).boot));
                }
            }
            Step::LogDone(n) => {
                if self.delivering.contains(&id(n)) && matches!(self.logs.get(&id(n)), Some(LogEnd::Confirm(_))) {
                    self.log_done.insert(id(n));
                    self.handle(Event::LogComplete(id(n)));
                }
            }
            Step::Wait(seconds) => self.wait(seconds),
            Step::Restart => {
                if !self.left {
                    self.run += 1;
                    self.running.clear();
                    self.delivering.clear();
                    self.logs.clear();
                    let found = self.disk.values().cloned().collect();
                    let (machine, effects) = Machine::new(setup(self.run, found), at(self.now));
                    self.machine = machine;
                    self.apply(effects);
                    self.handle(Event::Enrolled(policy()));
                    if self.told_to_leave {
                        self.answer(vec![Directive::Terminate { reason: String::new() }]);
                    }
                }
            }
        }
    }

    /// Lets time pass the way the loop does: it wakes when the machine asks for it.
    fn wait(&mut self, seconds: u64) {
        let end = self.now + seconds;
        while !self.left && self.now < end {
            let wake = self.machine.wake_after(at(self.now)).map_or(seconds, |after| after.as_secs().max(1));
            self.now = end.min(self.now + wake);
            self.handle(Event::Tick);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn nothing_is_run_twice_said_twice_or_lost(steps in prop::collection::vec(step(), 1..80)) {
        let mut world = World::new();
        for step in steps {
            world.take(step);
        }
        // From wherever that led: jobs end at their deadline or when told, and time alone then leads to the end.
        for _ in 0..3 {
            world.wait(6000);
            for n in 1..4 {
                if world.running.get(&id(n)).is_some_and(|wish| *wish != Wish::Run) {
                    world.take(Step::Ends(n, 1));
                }
            }
        }
        world.wait(6000);
        prop_assert!(world.left, "{:?}", world.machine);
    }

    #[test]
    fn told_to_leave_it_leaves_within_its_limits(steps in prop::collection::vec(step(), 0..40)) {
        let mut world = World::new();
        for step in steps {
            world.take(step);
        }
        world.take(Step::Terminate);
        world.wait(JOBS_END_LIMIT.as_secs() + FLUSH_LIMIT.as_secs());
        prop_assert!(world.left, "{:?}", world.machine);
    }
}
