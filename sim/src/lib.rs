//! The simulator: months of a fleet in a second, from a seed, with every fault that the design names.
//!
//! What decides is the production code: the scaler's [`World`](pilotlight_scaler::fleet::World) and planner, and the
//! agent's [`Machine`](pilotlight_agent::machine::Machine). Played is what lies between and around them: the network,
//! disks, containers, the provider, clients and admins. Where a decision sits in an asynchronous shell (the order of
//! apply, commit, reply and effect; held syncs; when a log is closed), it is mirrored here in as few lines as it takes;
//! each place says which.
//!
//! One seed is one history: some hours of work and faults, then all faults end and time runs on until nothing is left.
//! At the end every job has ended once, with its own result or a reported reason, every log is whole or says that it
//! is not, and no machine is left. The same seed gives the same history, to the letter of its trace.

mod admin;
mod agent;
pub mod checks;
mod ends;
mod fault;
mod host;
mod jobs;
mod link;
mod provider;
mod scaler;
mod settings;
mod truth;

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};

use jiff::{SignedDuration, Timestamp};
use pilotlight_wire::InstanceId;
use rand::{RngExt, SeedableRng, rngs::SmallRng};

pub use self::fault::{Fault, Tally};
use self::{
    agent::{Call, Context, Reply},
    host::{Host, HostEvent},
    provider::{CloudEvent, Provider},
    scaler::{Disk, Scaler, ScalerEvent},
    settings::Shape,
    truth::Truth,
};

/// Milliseconds, the simulator's unit of time.
const SECOND: u64 = 1000;
const MINUTE: u64 = 60 * SECOND;
const HOUR: u64 = 60 * MINUTE;

/// How long after the last fault everything must be over: holds last a day, machines live one, jobs take six hours.
const CALM: u64 = 80 * HOUR;

/// How a seed ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// How often each kind of fault struck.
    pub tally: Tally,
    /// Jobs submitted.
    pub jobs: usize,
    /// Machines made.
    pub machines: usize,
    /// What was wrong; empty when all was well.
    pub failure: Option<String>,
    /// What happened, one line each, when it was asked for.
    pub trace: String,
}

/// Runs a seed. With `trace` it says what happens, which takes longer.
#[must_use]
pub fn run(seed: u64, trace: bool) -> Outcome {
    let mut sim = Sim::new(seed, trace);
    let ended = catch_unwind(AssertUnwindSafe(|| sim.run()));
    let failure = match ended {
        Ok(Ok(())) => None,
        Ok(Err(failure)) => Some(failure),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            Some(text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default())
        }
    };
    Outcome {
        tally: sim.tally,
        jobs: sim.truth.jobs.len(),
        machines: sim.provider.made,
        failure,
        trace: sim.trace.unwrap_or_default(),
    }
}

/// What was wrong.
type Failure = Result<(), String>;

/// Something that is to happen.
#[derive(Debug)]
enum Event {
    Scaler(ScalerEvent),
    Cloud(CloudEvent),
    Host(InstanceId, HostEvent),
    /// A call of an agent arrives at the scaler.
    Call(InstanceId, Context, Box<Call>),
    /// An answer, or its absence, arrives at an agent.
    Answer(InstanceId, Context, Box<Reply>),
    /// Somebody does something.
    Chaos,
    /// Clients submit jobs.
    Submit,
    /// All faults end.
    Calm,
    /// Whether everything is over.
    Look,
}

struct Sim {
    rng: SmallRng,
    /// Milliseconds since the beginning.
    now: u64,
    /// By time, then by the order in which they were thought of.
    queue: BTreeMap<(u64, u64), Box<Event>>,
    thought_of: u64,
    scaler: Scaler,
    disk: Disk,
    provider: Provider,
    hosts: BTreeMap<InstanceId, Host>,
    truth: Truth,
    shape: Shape,
    /// How likely a call goes wrong, in thousandths; none once it is calm.
    trouble: u32,
    chaos_every: u64,
    calm_at: u64,
    is_calm: bool,
    over: bool,
    tally: Tally,
    trace: Option<String>,
}

impl Sim {
    fn new(seed: u64, trace: bool) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        // One seed in 500 is large: thousands of jobs on hundreds of machines.
        let large = seed % 500 == 499;
        let shape = Shape::random(&mut rng, large);
        let hours = if large { 2 } else { rng.random_range(1..6) };
        // Each restart of a large one reads all of it again.
        let trouble = if large { 3 } else { [0, 5, 25, 100][rng.random_range(0..4)] };
        let chaos_every = [HOUR, 20 * MINUTE, 5 * MINUTE, MINUTE][rng.random_range(0..4)];
        let truth = Truth { wanted: if large { 1_500 } else { rng.random_range(1..60) }, ..Truth::default() };
        let mut sim = Self {
            now: 0,
            queue: BTreeMap::new(),
            thought_of: 0,
            scaler: Scaler::new(shape.settings(0, true)),
            disk: Disk::default(),
            provider: Provider::default(),
            hosts: BTreeMap::new(),
            truth,
            shape,
            trouble,
            chaos_every,
            calm_at: u64::try_from(hours).unwrap_or(1) * HOUR,
            is_calm: false,
            over: false,
            tally: Tally::default(),
            trace: trace.then(String::new),
            rng,
        };
        sim.after(0, Event::Scaler(ScalerEvent::Up { lost: false }));
        sim.after(1, Event::Submit);
        let first = sim.between(0, sim.chaos_every);
        sim.after(first, Event::Chaos);
        sim.after(sim.calm_at, Event::Calm);
        sim
    }

    fn run(&mut self) -> Failure {
        while let Some(((at, _), event)) = self.queue.pop_first() {
            self.now = at;
            match *event {
                Event::Scaler(event) => self.scaler_event(event)?,
                Event::Cloud(event) => self.cloud(event)?,
                Event::Host(id, event) => self.host_event(id, event),
                Event::Call(from, context, call) => self.call_arrives(from, context, *call)?,
                Event::Answer(to, context, reply) => self.answer_arrives(to, context, *reply),
                Event::Chaos => self.chaos()?,
                Event::Submit => self.submit()?,
                Event::Calm => self.calm()?,
                Event::Look => self.look()?,
            }
            if self.over {
                return Ok(());
            }
            if self.now > self.calm_at + CALM {
                return Err(self.what_is_left());
            }
        }
        Err("nothing is to happen any more, and it is not over".to_owned())
    }

    fn after(&mut self, delay: u64, event: Event) {
        self.thought_of += 1;
        self.queue.insert((self.now + delay, self.thought_of), Box::new(event));
    }

    fn between(&mut self, least: u64, most: u64) -> u64 {
        self.rng.random_range(least..=most.max(least))
    }

    /// One of so many.
    fn one_in(&mut self, many: u32) -> bool {
        self.rng.random_ratio(1, many)
    }

    /// Whether a call goes wrong in a way: so many times as likely as others.
    fn fails(&mut self, fault: Fault, times: u32) -> bool {
        let strikes = self.trouble > 0 && self.rng.random_ratio((self.trouble * times).min(1000), 1000);
        if strikes {
            self.tally.count(fault);
        }
        strikes
    }

    fn say(&mut self, what: impl FnOnce(&Self) -> String) {
        if self.trace.is_none() {
            return;
        }
        let (line, seconds) = (what(self), self.now / SECOND);
        let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
        if let Some(trace) = &mut self.trace {
            let _infallible = writeln!(trace, "{hours:>3}:{minutes:02}:{seconds:02}.{:03} {line}", self.now % SECOND);
        }
    }

    fn struck(&mut self, fault: Fault, whom: &str) {
        self.tally.count(fault);
        self.say(|_| format!("FAULT {} {whom}", fault.text()));
    }
}

/// Wall time when so many milliseconds have passed.
fn wall(milliseconds: u64) -> Timestamp {
    let begin = Timestamp::from_second(1_767_225_600).unwrap_or(Timestamp::UNIX_EPOCH);
    let passed = SignedDuration::from_millis(i64::try_from(milliseconds).unwrap_or(i64::MAX));
    begin.saturating_add(passed).unwrap_or(Timestamp::MAX)
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// An id, short enough to read.
fn short<K>(id: &pilotlight_wire::Id<K>) -> String {
    let text = id.to_string();
    text[text.len() - 6..].to_owned()
}
