//! The scaler's shell in small: the order of apply, plan, commit, reply and effect is that of `control.rs`, what follows
//! from actions that of `effects.rs`, what is kept that of `store.rs` and `logs.rs`.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use pilotlight_scaler::fleet::{
    Action, Applied, Dirty, Event as FleetEvent, Instance, Job, Plan, ProviderConfig, Refusal, Settings, World,
    demand::Log, plan, view,
};
use pilotlight_wire::{InstanceId, JobId};
use serde::{Serialize, de::DeserializeOwned};

use crate::{Event, Failure, Fault, HOUR, SECOND, Sim, checks::Checks, link::Held, provider::CloudEvent, short, wall};

/// How often the provider's list is read.
const LIST_EVERY: u64 = 30 * SECOND;
/// How often while something is to be proved gone.
const LIST_SOON: u64 = SECOND;

/// A scaler, running or not.
pub(crate) struct Scaler {
    pub(crate) world: World,
    pub(crate) settings: Settings,
    pub(crate) up: bool,
    /// Which of the scalers it is: what an earlier one asked for is nobody's any more.
    pub(crate) epoch: u64,
    /// How far the system's clock was set ahead, milliseconds.
    lead: u64,
    /// A step of the clock of which the store does not tell yet: how far, and how far our time goes with it.
    step: Option<(SignedDuration, SignedDuration)>,
    pub(crate) held: BTreeMap<InstanceId, Held>,
    wake: Option<Timestamp>,
    soon: bool,
    /// The list call under way or due next.
    list_turn: u64,
    /// Its plan at the last pass.
    last: Option<Plan>,
    pub(crate) checks: Checks,
    /// Machines of databases that were lost: whatever becomes of them, their jobs may be.
    pub(crate) strangers: BTreeSet<InstanceId>,
}

/// What outlives a scaler.
#[derive(Debug, Default)]
pub(crate) struct Disk {
    instances: BTreeMap<InstanceId, Instance>,
    pub(crate) jobs: BTreeMap<JobId, Job>,
    /// What jobs run; an adopted one has none.
    pub(crate) payloads: BTreeSet<JobId>,
    pub(crate) logs: BTreeMap<JobId, LogFile>,
}

/// One job's log.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LogFile {
    pub(crate) size: u64,
    pub(crate) closed: bool,
    /// Whether it says that something is missing.
    pub(crate) notice: bool,
}

/// What happens to or at the scaler.
#[derive(Debug)]
pub(crate) enum ScalerEvent {
    /// It starts; `lost`: with an empty database.
    Up { lost: bool },
    /// The plan wakes.
    Wake { epoch: u64, at: Timestamp },
    /// It calls for the list.
    List { epoch: u64, turn: u64 },
    /// The list is read, or not.
    Listed { epoch: u64, began_at: Timestamp, listed: Option<Vec<pilotlight_scaler::provider::Listed>> },
    /// A result of a call arrives.
    Told { epoch: u64, event: Box<FleetEvent> },
    /// A log is closed.
    CloseLog { epoch: u64, job: JobId, incomplete: bool },
    /// A held sync is woken, or its time is over.
    Held { epoch: u64, instance: InstanceId, number: u64, over: bool },
}

impl Scaler {
    pub(crate) fn new(settings: Settings) -> Self {
        Self {
            world: World::new(settings.clone(), 0, wall(0), [], []),
            settings,
            up: false,
            epoch: 0,
            lead: 0,
            step: None,
            held: BTreeMap::new(),
            wake: None,
            soon: false,
            list_turn: 0,
            last: None,
            checks: Checks::new(wall(0)),
            strangers: BTreeSet::new(),
        }
    }
}

impl Sim {
    /// The scaler's time.
    pub(crate) fn time(&self) -> Timestamp {
        wall(self.now + self.scaler.lead)
    }

    pub(crate) fn scaler_event(&mut self, event: ScalerEvent) -> Failure {
        let mine = |epoch: u64| self.scaler.up && epoch == self.scaler.epoch;
        match event {
            ScalerEvent::Up { lost } => self.start_scaler(lost),
            ScalerEvent::Wake { epoch, at } if mine(epoch) && self.scaler.wake == Some(at) => {
                self.scaler.wake = None;
                self.pass()
            }
            ScalerEvent::List { epoch, turn } if mine(epoch) && turn == self.scaler.list_turn => {
                let (began_at, listed) = (self.time(), self.list());
                let delay = self.between(5, SECOND);
                self.after(delay, Event::Scaler(ScalerEvent::Listed { epoch, began_at, listed }));
                Ok(())
            }
            ScalerEvent::Listed { epoch, began_at, listed } if mine(epoch) => {
                let event = match listed {
                    Some(listed) => FleetEvent::ListRead { began_at, listed },
                    None => FleetEvent::ListFailed { message: "no answer".to_owned() },
                };
                self.next_list(None);
                self.apply(event).map(drop)
            }
            ScalerEvent::Told { epoch, event } if mine(epoch) => {
                self.say(|_| format!("scaler is told {event:?}"));
                self.apply(*event).map(drop)
            }
            ScalerEvent::CloseLog { epoch, job, incomplete } if mine(epoch) => {
                let log = self.disk.logs.entry(job).or_default();
                log.closed = true;
                log.notice |= incomplete;
                self.apply(FleetEvent::LogClosed(job)).map(drop)
            }
            ScalerEvent::Held { epoch, instance, number, over } if mine(epoch) => {
                self.held_again(instance, number, over)
            }
            _ => Ok(()),
        }
    }

    fn start_scaler(&mut self, lost: bool) -> Failure {
        if self.scaler.up {
            return Ok(());
        }
        if lost {
            self.struck(Fault::DatabaseLost, "");
            for job in self.disk.jobs.values().filter(|job| !job.is_settled()) {
                if let Some(truth) = self.truth.jobs.get_mut(&job.id) {
                    truth.forgotten = true;
                }
            }
            self.scaler.strangers.extend(self.disk.instances.keys());
            self.disk.instances.clear();
            self.disk.jobs.clear();
            self.disk.payloads.clear();
        }
        // As the store does it; not each time, for the simulator's sake.
        let written = self.one_in(4);
        let copy = |of: &Instance| if written { stored(of) } else { Ok(of.clone()) };
        let instances = self.disk.instances.values().map(copy).collect::<Result<Vec<Instance>, _>>()?;
        let jobs = self.disk.jobs.values().filter(|job| !job.is_settled());
        let jobs =
            jobs.map(|job| if written { stored(job) } else { Ok(job.clone()) }).collect::<Result<Vec<Job>, _>>()?;
        self.scaler.epoch += 1;
        let (settings, seed, now) = (self.scaler.settings.clone(), self.scaler.epoch, self.time());
        let grace = now.saturating_add(settings.lease).unwrap_or(Timestamp::MAX);
        if lost {
            self.scaler.checks.forget(grace);
        } else {
            self.scaler.checks.restart(grace);
        }
        // As `run.rs`: a scaler that died before it had committed a step leaves it to the next to find.
        self.scaler.world = match self.scaler.step {
            Some(step) => World::stepped(settings, seed, now, step, instances, jobs),
            None => World::new(settings, seed, now, instances, jobs),
        };
        self.scaler.up = true;
        self.scaler.wake = None;
        self.scaler.last = None;
        self.say(|sim| format!("scaler {} starts", sim.scaler.epoch));
        self.next_list(Some(0));
        self.pass()
    }

    /// The scaler dies, and another starts after a while.
    pub(crate) fn kill_scaler(&mut self, away: u64, lost: bool) {
        if !self.scaler.up {
            return;
        }
        self.say(|_| "scaler killed".to_owned());
        self.scaler.up = false;
        for (instance, held) in std::mem::take(&mut self.scaler.held) {
            self.answer(instance, held.context, crate::agent::Reply::None);
        }
        self.after(away, Event::Scaler(ScalerEvent::Up { lost }));
    }

    fn next_list(&mut self, after: Option<u64>) {
        self.scaler.list_turn += 1;
        let delay = after.unwrap_or(if self.scaler.soon { LIST_SOON } else { LIST_EVERY });
        let event = ScalerEvent::List { epoch: self.scaler.epoch, turn: self.scaler.list_turn };
        self.after(delay, Event::Scaler(event));
    }

    /// Applies an event and makes a pass. `None`: the scaler died before it replied.
    pub(crate) fn apply(&mut self, event: FleetEvent) -> Result<Option<Result<Applied, Refusal>>, String> {
        let now = self.time();
        let routine = matches!(event, FleetEvent::Synced(_) | FleetEvent::SyncAnswered(_));
        let result = self.scaler.world.apply(event, now);
        let epoch = self.scaler.epoch;
        self.pass_after(routine)?;
        Ok((self.scaler.up && self.scaler.epoch == epoch).then_some(result))
    }

    fn pass(&mut self) -> Failure {
        self.pass_after(false)
    }

    /// As `Control::pass`: without news the last plan holds.
    fn pass_after(&mut self, routine: bool) -> Failure {
        let now = self.time();
        let mut dirty = self.scaler.world.take_dirty();
        let news = !routine | !dirty.is_empty() | self.scaler.world.take_heard_again();
        let holds = |last: &Plan| last.wake_at.is_none_or(|at| now < at);
        if !news && self.scaler.last.as_ref().is_some_and(holds) {
            return Ok(());
        }
        let planned = plan(&self.scaler.world, now);
        self.scaler.checks.planned(&self.scaler.world, &planned, now);
        self.just(&planned)?;
        self.scaler.world.record(&planned, now);
        self.scaler.checks.recorded(&self.scaler.world, &planned);
        if self.one_in(4) {
            let again = plan(&self.scaler.world, now);
            if let Some(first) = again.actions.first() {
                return Err(format!("planning again after recording: {first:?}"));
            }
        }
        let Dirty { instances, jobs } = self.scaler.world.take_dirty();
        dirty.instances.extend(instances);
        dirty.jobs.extend(jobs);
        if !dirty.is_empty() {
            if self.fails(Fault::KilledBeforeCommit, 1) {
                let away = self.between(SECOND, 60 * SECOND);
                self.kill_scaler(away, false);
                return Ok(());
            }
            self.commit(&dirty)?;
            if self.fails(Fault::KilledAfterCommit, 1) {
                let away = self.between(SECOND, 60 * SECOND);
                self.kill_scaler(away, false);
                return Ok(());
            }
        }
        for planned in &planned.actions {
            self.say(|_| format!("scaler: {}", view::action_line(&planned.action, &planned.reason).text));
            self.act(&planned.action);
        }
        if planned.list_soon && !self.scaler.soon {
            self.scaler.soon = true;
            self.next_list(Some(LIST_SOON));
        }
        self.scaler.soon = planned.list_soon;
        self.scaler.world.forget_settled(&dirty);
        self.wake_held(&dirty);
        if let Some(at) = planned.wake_at
            && self.scaler.wake != Some(at)
        {
            self.scaler.wake = Some(at);
            let wait = at.duration_since(now).as_millis().clamp(1, i128::from(1000 * HOUR));
            let event = ScalerEvent::Wake { epoch: self.scaler.epoch, at };
            self.after(u64::try_from(wait).unwrap_or(1), Event::Scaler(event));
        }
        self.scaler.last = Some(planned);
        Ok(())
    }

    /// What is committed is what a scaler that starts finds.
    fn commit(&mut self, dirty: &Dirty) -> Failure {
        self.scaler.step = None;
        let world = &self.scaler.world;
        for id in &dirty.instances {
            match world.instance(*id) {
                Some(instance) => drop(self.disk.instances.insert(*id, instance.clone())),
                None => drop(self.disk.instances.remove(id)),
            }
        }
        for job in dirty.jobs.iter().filter_map(|id| world.job(*id)) {
            if let Some(before) = self.disk.jobs.get(&job.id).and_then(Job::ended)
                && job.ended().is_none_or(|ended| ended.verdict != before.verdict)
            {
                return Err(format!("job {} had ended: {before:?}, and now {:?}", job.id, job.state));
            }
            if job.ended().is_some() {
                self.disk.payloads.remove(&job.id);
            }
            if job.is_settled()
                && let Some(truth) = self.truth.jobs.get_mut(&job.id)
            {
                truth.settled = job.ended().cloned();
            }
            self.disk.jobs.insert(job.id, job.clone());
        }
        Ok(())
    }

    /// As `Effects::start`.
    fn act(&mut self, action: &Action) {
        let epoch = self.scaler.epoch;
        let slow = if self.one_in(10) { 60 * SECOND } else { 2 * SECOND };
        let delay = self.between(1, slow);
        match action {
            Action::Launch(instance) => {
                let ProviderConfig::Local(_) = &instance.placement.provider;
                self.after(delay, Event::Cloud(CloudEvent::Create { epoch, instance: instance.clone() }));
            }
            Action::Create(id) => {
                if let Some(instance) = self.scaler.world.instance(*id).cloned() {
                    let instance = Box::new(instance);
                    self.after(delay, Event::Cloud(CloudEvent::Create { epoch, instance }));
                }
            }
            Action::Terminate { instance, .. } | Action::Destroy(instance) | Action::Reap(instance) => {
                self.after(delay, Event::Cloud(CloudEvent::Destroy { epoch, instance: *instance }));
            }
            Action::CloseLog { job, incomplete } => {
                let event = ScalerEvent::CloseLog { epoch, job: *job, incomplete: *incomplete };
                self.after(delay, Event::Scaler(event));
            }
            Action::Assign { .. } | Action::Drain { .. } | Action::Forget(_) => {}
            // No forge is played.
            Action::Grant { .. } | Action::Mint(_) | Action::Withdraw { .. } | Action::EndRegistration(_) => {}
        }
    }

    /// As `close_if_complete` in `http/agent.rs`.
    pub(crate) fn close_if_complete(&mut self, job: JobId) -> Failure {
        let expected = match self.scaler.world.job(job).and_then(Job::ended).map(|ended| ended.log) {
            Some(Log::Expected { bytes }) => bytes,
            _ => return Ok(()),
        };
        let log = self.disk.logs.entry(job).or_default();
        if log.size >= expected {
            log.closed = true;
            self.apply(FleetEvent::LogClosed(job))?;
        }
        Ok(())
    }

    /// The system's clock is set, and the scaler notices.
    pub(crate) fn step_clock(&mut self, by: SignedDuration) -> Failure {
        let (ahead, skipped) = (by.is_positive(), by.max(SignedDuration::ZERO));
        self.struck(if ahead { Fault::ClockAhead } else { Fault::ClockBack }, &format!("by {by:#}"));
        self.scaler.lead += u64::try_from(skipped.as_millis()).unwrap_or(0);
        let grace = self.time().saturating_add(self.scaler.settings.lease).unwrap_or(Timestamp::MAX);
        self.scaler.checks.grace(grace);
        self.scaler.step = Some((by, skipped));
        self.apply(FleetEvent::ClockStepped { by, skipped }).map(drop)
    }

    /// A line on an instance.
    pub(crate) fn named(&self, id: InstanceId) -> String {
        let phase = self.scaler.world.instance(id).map_or("unknown", |instance| instance.phase.word());
        format!("{} ({phase})", short(&id))
    }
}

/// What a scaler reads of what another wrote.
fn stored<T: Serialize + DeserializeOwned>(of: &T) -> Result<T, String> {
    let text = serde_json::to_string(of).map_err(|error| error.to_string())?;
    serde_json::from_str(&text).map_err(|error| format!("what was stored is not readable: {error}: {text}"))
}
