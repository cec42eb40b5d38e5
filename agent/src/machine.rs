//! What the agent decides, and nothing that acts: an [`Event`] and the time go in, [`Effect`]s come out (design 5).
//!
//! ```text
//!               Start                    End                 finished acked, and
//!  (no file) ──────────▶ Preparing ─▶ Running ─▶ Finished ──────────────────────▶ (no file)
//!      │       persist, run                        ▲  emit      the scaler has the whole log
//!      └───────────── Cancel, or Start refused ────┘
//!
//!  Serving ── Terminate, 410 instance_gone ──▶ Ending ── jobs over or 30 s ──▶ Left
//!     └────── lease lapsed, no job, nothing unsent or result_grace over ─────────▲
//! ```
//!
//! Effects are carried out in order and each is over before the next begins, so `Persist` before `Run` means that the
//! file is on the disk before anything is done. An effect that fails ends the process: what is in memory never gets
//! ahead of the disk, and jobs do not need the process.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use pilotlight_wire::{
    AssignmentId, GpuId,
    agent::{
        AssignmentEvent, AssignmentEventKind, AssignmentReport, Directive, Finished, HostSample, Policy, Seq, Stage,
        Start, SyncRequest,
    },
};

pub use crate::assignment::Moment;
use crate::{
    assignment::{Deadline, Found, Record},
    job::{End, Progress, Wish},
};

mod assigned;
mod ending;
#[cfg(test)]
mod invariants;
#[cfg(test)]
mod tables;

use assigned::{Assignment, cancelled_before_arrival, log_bytes};
pub use ending::{FLUSH_LIMIT, JOBS_END_LIMIT, Leave};

/// A machine with less free disk than this takes no new job.
pub const MIN_DISK_FREE: u64 = 256 * 1024 * 1024;

/// Something that happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Time passed; see [`Machine::wake_after`].
    Tick,
    /// The scaler took the agent in.
    Enrolled(Policy),
    /// The scaler will never take this agent in: it knows another machine by this name.
    EnrolRefused,
    /// A sync was answered.
    Synced {
        /// Which.
        n: u64,
        /// When it was sent, on the boot clock: the lease counts from there.
        sent: Duration,
        /// What to do.
        directives: Vec<Directive>,
        /// The new lease, seconds.
        lease_seconds: u64,
    },
    /// Some route answered 410 `instance_gone`.
    Gone,
    /// A job's task told something.
    Progress(AssignmentId, Progress),
    /// A job's task is over, with this many bytes in the spool.
    Ended(AssignmentId, End, u64),
    /// The scaler has acknowledged the events up to this number, the last of them sent then on the boot clock.
    Acked(AssignmentId, u64, Duration),
    /// The scaler said, after it acknowledged the last event, that it has the whole log.
    LogComplete(AssignmentId),
    /// The host was looked at.
    Sampled(HostSample),
}

/// Something to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Make the assignment exist on disk.
    Persist(AssignmentId, Record),
    /// Start the job's task, or start it again.
    Run(Box<Start>),
    /// Tell the job's task.
    Wish(AssignmentId, Wish),
    /// Put an event in the outbox.
    Emit(AssignmentId, AssignmentEvent),
    /// Send events and log from now on.
    Deliver(AssignmentId),
    /// How long the log is, or will be.
    Log(AssignmentId, LogEnd),
    /// Delete all there is of the assignment.
    Forget(AssignmentId),
    /// Sync at once: the scaler must know.
    Sync,
    /// Sync within a second: the scaler would like to know.
    SyncSoon,
    /// Stop and leave the machine.
    Leave(Leave),
}

/// What is known about the end of a job's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogEnd {
    /// The job may still write.
    Open,
    /// It has this many bytes.
    At(u64),
    /// It has this many bytes, and the scaler has closed or is about to close it: ask once more whether all are there.
    Confirm(u64),
}

/// What a starting agent knows.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The number of this start of the agent.
    pub run: u64,
    /// The kernel's id of this boot.
    pub boot_id: String,
    /// The GPUs that are really there.
    pub gpus: BTreeSet<GpuId>,
    /// How to behave, when an earlier start was enrolled.
    pub policy: Option<Policy>,
    /// The assignments on disk.
    pub found: Vec<Found>,
    /// Free bytes on the agent's disk.
    pub disk_free: u64,
}

/// The agent's state.
#[derive(Clone, Debug)]
pub struct Machine {
    boot_id: String,
    gpus: BTreeSet<GpuId>,
    policy: Option<Policy>,
    sent: Seq,
    answered: u64,
    enrolled: bool,
    lease: ending::Lease,
    mode: ending::Mode,
    /// When the last job ended, or the agent started.
    quiet_since: Duration,
    /// Taken since the last sync.
    sample: Option<HostSample>,
    /// By the last sample, or the inventory.
    disk_free: u64,
    assignments: BTreeMap<AssignmentId, Assignment>,
    /// Deleted assignments, with the last sync sent before: an answer to that or an older one may still ask for them.
    forgotten: BTreeMap<AssignmentId, u64>,
}

impl Machine {
    /// The state of an agent that starts, and what it does first: every job without an outcome is run again, which
    /// takes it up where it is.
    #[must_use]
    pub fn new(setup: Setup, now: Moment) -> (Self, Vec<Effect>) {
        let mut machine = Self {
            boot_id: setup.boot_id,
            gpus: setup.gpus,
            lease: ending::Lease::at_start(setup.policy.as_ref(), now),
            policy: setup.policy,
            sent: Seq { run: setup.run, n: 0 },
            answered: 0,
            enrolled: false,
            mode: ending::Mode::Serving,
            quiet_since: now.boot,
            sample: None,
            disk_free: setup.disk_free,
            assignments: BTreeMap::new(),
            forgotten: BTreeMap::new(),
        };
        let mut effects = Vec::new();
        for found in setup.found {
            machine.take_up(found, now, &mut effects);
        }
        (machine, effects)
    }

    /// Decides.
    #[must_use]
    pub fn handle(&mut self, event: Event, now: Moment) -> Vec<Effect> {
        let mut effects = Vec::new();
        match event {
            Event::Tick => {}
            Event::Enrolled(policy) => {
                self.enrolled = true;
                self.lease.renew(now.boot, policy.lease_seconds);
                self.policy = Some(policy);
                for (&id, assignment) in &self.assignments {
                    effects.extend([Effect::Deliver(id), Effect::Log(id, assignment.log)]);
                }
                effects.push(Effect::Sync);
            }
            Event::EnrolRefused => self.lease = ending::Lease::Refused,
            Event::Synced { n, sent, directives, lease_seconds } => {
                // Superseded syncs return late. What they say is old, and whatever still holds is repeated.
                if n > self.answered {
                    self.answered = n;
                    self.lease.renew(sent, lease_seconds);
                    for directive in directives {
                        self.obey(directive, now, &mut effects);
                    }
                    self.forgotten.retain(|_, &mut last_before| last_before >= n);
                }
            }
            Event::Gone => self.end(now, false, "the scaler says that this instance is gone", &mut effects),
            Event::Progress(id, progress) => self.progress(id, progress, &mut effects),
            Event::Ended(id, end, log_bytes) => self.ended(id, end, log_bytes, now, &mut effects),
            Event::Acked(id, n, sent) => {
                // As good as a sync's: after a cut longer than the lease, events may be through before the next sync,
                // and the machine that is free then already has its next job.
                if let Some(policy) = &self.policy {
                    self.lease.renew(sent, policy.lease_seconds);
                }
                if let Some(assignment) = self.assignments.get_mut(&id) {
                    assignment.acked = assignment.acked.max(n);
                    if let LogEnd::At(bytes) = assignment.log
                        && assignment.acked >= assignment.events
                    {
                        assignment.log = LogEnd::Confirm(bytes);
                        effects.push(Effect::Log(id, assignment.log));
                    }
                }
            }
            Event::LogComplete(id) => {
                let done = self.assignments.get_mut(&id).is_some_and(|assignment| {
                    assignment.log_complete = true;
                    matches!(assignment.log, LogEnd::Confirm(_)) && assignment.acked >= assignment.events
                });
                if done {
                    self.assignments.remove(&id);
                    self.forgotten.insert(id, self.sent.n);
                    effects.extend([Effect::Forget(id), Effect::Sync]);
                }
            }
            Event::Sampled(sample) => {
                self.disk_free = sample.disk_free_bytes;
                self.sample = Some(sample);
                effects.push(Effect::Sync);
            }
        }
        self.settle(now, &mut effects);
        effects
    }

    /// The next sync: everything that has a file, and the newest sample once.
    #[must_use]
    pub fn sync_request(&mut self, now: Moment) -> SyncRequest {
        self.sent.n += 1;
        SyncRequest {
            seq: self.sent,
            assignments: self
                .assignments
                .iter()
                .map(|(&id, assignment)| AssignmentReport {
                    id,
                    job: assignment.start().map(|start| start.job.clone()),
                    gpus: assignment.start().map_or_else(Vec::new, |start| start.gpus.clone()),
                    remaining_seconds: match &assignment.record {
                        Record::Started { deadline, .. } => Some(deadline.remaining(now, &self.boot_id).as_secs()),
                        Record::NeverArrived => None,
                    },
                    stage: assignment.stage,
                    detail: assignment.detail.clone(),
                })
                .collect(),
            sample: self.sample.take(),
            note: self.note(),
        }
    }

    /// The number of the last sync sent.
    #[must_use]
    pub fn last_sent(&self) -> u64 {
        self.sent.n
    }

    /// The number of the newest sync that was answered.
    #[must_use]
    pub fn last_answered(&self) -> u64 {
        self.answered
    }

    /// How many jobs without GPUs may run at once; jobs share the machine's memory out by it.
    #[must_use]
    pub fn cpu_jobs(&self) -> u32 {
        self.policy.as_ref().map_or(1, |policy| policy.cpu_jobs)
    }

    fn take_up(&mut self, found: Found, now: Moment, effects: &mut Vec<Effect>) {
        let Found { id, record, events, acked } = found;
        let mut assignment = Assignment::new(record);
        assignment.events = events.last().map_or(0, |event| event.n);
        assignment.acked = acked;
        for event in &events {
            match &event.event {
                AssignmentEventKind::Started { .. } => assignment.started = true,
                last => {
                    let bytes = log_bytes(last);
                    assignment.stage = Stage::Finished;
                    assignment.log =
                        if acked >= assignment.events { LogEnd::Confirm(bytes) } else { LogEnd::At(bytes) };
                }
            }
        }
        if assignment.active() {
            match &assignment.record {
                Record::Started { start, deadline } => {
                    assignment.stage = Stage::Preparing;
                    let left = deadline.remaining(now, &self.boot_id);
                    effects
                        .push(Effect::Run(Box::new(Start { remaining_seconds: left.as_secs(), ..(**start).clone() })));
                }
                Record::NeverArrived => assignment.finish(id, now.wall, cancelled_before_arrival(), effects),
            }
        }
        self.assignments.insert(id, assignment);
    }

    fn obey(&mut self, directive: Directive, now: Moment, effects: &mut Vec<Effect>) {
        match directive {
            Directive::Terminate { reason } => self.end(now, true, &reason, effects),
            Directive::Start(start) => self.start(*start, now, effects),
            // Only runners can be withdrawn, and this agent refuses those.
            Directive::Withdraw { .. } => {}
            Directive::Cancel { assignment: id } => {
                if self.assignments.contains_key(&id) {
                    self.wish(id, Wish::Cancel, effects);
                } else if !self.forgotten.contains_key(&id) {
                    self.accept(id, Record::NeverArrived, effects).finish(
                        id,
                        now.wall,
                        cancelled_before_arrival(),
                        effects,
                    );
                }
            }
        }
    }

    fn start(&mut self, start: Start, now: Moment, effects: &mut Vec<Effect>) {
        let id = start.assignment;
        let known = self.assignments.contains_key(&id) || self.forgotten.contains_key(&id);
        if known || !self.serving() {
            return;
        }
        let refusal = self.why_not(&start);
        let deadline = Deadline::after(now, &self.boot_id, Duration::from_secs(start.remaining_seconds));
        let record = Record::Started { start: Box::new(start.clone()), deadline };
        let assignment = self.accept(id, record, effects);
        if let Some(reason) = refusal {
            assignment.finish(id, now.wall, AssignmentEventKind::Refused { reason }, effects);
        } else {
            assignment.stage = Stage::Preparing;
            effects.extend([Effect::Run(Box::new(start)), Effect::Sync]);
        }
    }

    /// Why another machine had better take this job (link 3).
    fn why_not(&self, start: &Start) -> Option<String> {
        if let Some(gpu) = start.gpus.iter().find(|gpu| !self.gpus.contains(gpu)) {
            return Some(format!("{gpu} is not on this machine, or its driver does not list it"));
        }
        for (id, other) in self.assignments.iter().filter(|(_, other)| other.active()) {
            let held = other.start().map_or(&[][..], |other| &other.gpus);
            if let Some(gpu) = start.gpus.iter().find(|gpu| held.contains(gpu)) {
                return Some(format!("{gpu} is held by assignment {id}"));
            }
        }
        let free = self.disk_free;
        (free < MIN_DISK_FREE).then(|| format!("the disk is full: {free} bytes free, {MIN_DISK_FREE} needed"))
    }

    /// Gives an assignment its file. Events and log are delivered from here on.
    fn accept(&mut self, id: AssignmentId, record: Record, effects: &mut Vec<Effect>) -> &mut Assignment {
        effects.extend([Effect::Persist(id, record.clone()), Effect::Deliver(id)]);
        self.assignments.entry(id).or_insert(Assignment::new(record))
    }

    fn wish(&mut self, id: AssignmentId, wish: Wish, effects: &mut Vec<Effect>) {
        let Some(assignment) = self.assignments.get_mut(&id).filter(|assignment| assignment.active()) else { return };
        // A machine that goes away does not wait for the grace of a cancel or timeout that came before.
        let forward = assignment.wish == Wish::Run || (wish == Wish::Terminate && assignment.wish != wish);
        if forward {
            assignment.wish = wish;
            effects.push(Effect::Wish(id, wish));
        }
    }

    fn progress(&mut self, id: AssignmentId, progress: Progress, effects: &mut Vec<Effect>) {
        let Some(assignment) = self.assignments.get_mut(&id).filter(|assignment| assignment.active()) else { return };
        match progress {
            Progress::Detail(line) => {
                assignment.detail = Some(line);
                effects.push(Effect::SyncSoon);
            }
            Progress::Started { image_ready_at, started_at, image_id } => {
                assignment.stage = Stage::Running;
                assignment.detail = None;
                // A job that was taken up again tells it again.
                if !assignment.started {
                    assignment.started = true;
                    let event = AssignmentEventKind::Started { image_ready_at, image_id };
                    assignment.emit(id, started_at, event, effects);
                }
                effects.push(Effect::Sync);
            }
        }
    }

    fn ended(&mut self, id: AssignmentId, end: End, log_bytes: u64, now: Moment, effects: &mut Vec<Effect>) {
        let Some(assignment) = self.assignments.get_mut(&id).filter(|assignment| assignment.active()) else { return };
        let (at, event) = match end {
            End::Refused { reason } => (now.wall, AssignmentEventKind::Refused { reason }),
            End::Finished { verdict, exit_code, reason, log_gap, usage, finished_at } => {
                let finished = Finished { verdict, exit_code, reason, log_bytes, log_gap, usage };
                (finished_at, AssignmentEventKind::Finished(finished))
            }
        };
        assignment.finish(id, at, event, effects);
        self.quiet_since = now.boot;
    }
}
