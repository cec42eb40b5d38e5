//! What there is: instances, jobs, and what was seen of them.
//!
//! The world is changed by [`World::apply`] (what happened) and [`World::record`] (what was decided), nowhere else.
//! What those two touched is remembered in [`Dirty`], and the shell commits exactly that.

mod admin;
mod adoption;
mod agent;
mod clock;
mod forge;
mod health;
mod jobs;
mod provider;

pub use self::{
    adoption::Orphan,
    health::{Breaker, Health},
};
pub(super) use self::{
    forge::title,
    health::{BOOTS_ALERT, BootKey},
    jobs::{could_hold, cpu_jobs, log_bound},
};

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use pilotlight_wire::{
    AssignmentId, ForgeName, InstanceId, JobId, LabelName, PlacementName, PoolName,
    agent::{AssignmentReport, HostSample, Seq},
};

use super::{
    Forge, Job, Label, Placement, Pool,
    demand::Log,
    event::{Applied, Event, Refusal},
    forge::{Demand, Registration},
    ids::IdGen,
    instance::{Call, Instance, Phase, Step},
};

/// Gone machines are remembered this long: one that is listed again is destroyed again (link 7).
pub(super) const TOMBSTONE: SignedDuration = SignedDuration::from_hours(30 * 24);

/// An agent that was not heard for so long may be out of reach. It syncs every 25 s at least, and a call may take as long
/// again; what is given to it now might be heard by nobody until its lease is over.
pub(super) const HEARD: SignedDuration = SignedDuration::from_secs(60);

/// The scaler counts an agent's lease from its own reply plus this much (design 5, fencing).
pub(super) const LEASE_MARGIN: SignedDuration = SignedDuration::from_secs(60);

/// How long an agent keeps unsent results and logs, and so the longest that an open log holds a machine.
pub const RESULT_GRACE: SignedDuration = SignedDuration::from_hours(1);

/// What the admin configured, in its valid form.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// How long an agent lives without an answer; also the grace after a restart.
    pub lease: SignedDuration,
    /// What jobs may ask for.
    pub labels: BTreeMap<LabelName, Label>,
    /// Pools.
    pub pools: BTreeMap<PoolName, Pool>,
    /// Placements.
    pub placements: BTreeMap<PlacementName, Placement>,
    /// Forges, besides the built-in queue.
    pub forges: BTreeMap<ForgeName, Forge>,
}

/// What was seen of a machine since the scaler's start. Not persisted: a sync that changes no phase writes nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seen {
    /// When its agent was last heard, or last answered.
    pub heard_at: Option<Timestamp>,
    /// Its newest sync: one that comes after it and is older says nothing any more.
    pub seq: Option<Seq>,
    /// What it listed in its last sync.
    pub reports: BTreeMap<AssignmentId, AssignmentReport>,
    /// How the machine is.
    pub sample: Option<HostSample>,
    /// List calls in a row that did not show it.
    pub absent: u8,
    /// Why the provider says it has stopped for good.
    pub stopped: Option<String>,
    /// An agent with another nonce tried to enrol.
    pub intruder_at: Option<Timestamp>,
}

/// An instance and what was seen of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Machine<'a> {
    pub(super) instance: &'a Instance,
    /// As the config has it now.
    pub(super) pool: Option<&'a Pool>,
    pub(super) seen: Option<&'a Seen>,
}

impl Machine<'_> {
    /// Whether its agent was heard a moment ago.
    pub(super) fn is_heard(&self, now: Timestamp) -> bool {
        is_heard(self.seen, now)
    }

    /// Why the provider says that it has stopped for good.
    pub(super) fn stopped(&self) -> Option<String> {
        self.seen?.stopped.clone()
    }
}

fn is_heard(seen: Option<&Seen>, now: Timestamp) -> bool {
    seen.and_then(|seen| seen.heard_at).is_some_and(|heard| now < later(heard, HEARD))
}

/// What is known of the provider's list. Absence is not emptiness.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListState {
    /// When the last good call began.
    pub read_at: Option<Timestamp>,
    /// Since when calls fail, and what the provider says.
    pub failing: Option<(Timestamp, String)>,
}

/// What `apply` and `record` touched since the last commit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dirty {
    /// Instances changed, added, or removed.
    pub instances: BTreeSet<InstanceId>,
    /// Jobs changed or added.
    pub jobs: BTreeSet<JobId>,
}

impl Dirty {
    /// Whether there is nothing to commit.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.instances.is_empty() && self.jobs.is_empty()
    }
}

/// What there is.
#[derive(Clone, Debug)]
pub struct World {
    pub(super) settings: Settings,
    pub(super) started_at: Timestamp,
    /// Nothing is judged dead before this.
    pub(super) grace_until: Timestamp,
    pub(super) ids: IdGen,
    pub(super) instances: BTreeMap<InstanceId, Instance>,
    pub(super) seen: BTreeMap<InstanceId, Seen>,
    pub(super) jobs: BTreeMap<JobId, Job>,
    /// What forges ask for.
    pub(super) demand: BTreeMap<ForgeName, Demand>,
    pub(super) health: BTreeMap<PlacementName, Health>,
    /// Boots that failed, per placement and image.
    pub(super) breakers: BTreeMap<BootKey, Breaker>,
    pub(super) list: ListState,
    pub(super) orphans: BTreeMap<InstanceId, Orphan>,
    /// What the provider said when a destroy last failed.
    pub(super) destroy_errors: BTreeMap<InstanceId, String>,
    /// Since when the config file has errors, and which.
    pub(super) reload_error: Option<(Timestamp, String)>,
    /// When the system's clock was last stepped, and how far.
    pub(super) clock_stepped: Option<(Timestamp, SignedDuration)>,
    /// Since when `drain --all` is in force.
    pub(super) paused: Option<Timestamp>,
    /// Whether a machine is heard again that was silent: it takes work, and nothing else tells the planner.
    pub(super) heard_again: bool,
    pub(super) dirty: Dirty,
}

impl World {
    /// A world as the store has it, at the scaler's start. `seed` must differ from start to start: ids never repeat.
    #[must_use]
    pub fn new(
        settings: Settings,
        seed: u64,
        now: Timestamp,
        instances: impl IntoIterator<Item = Instance>,
        jobs: impl IntoIterator<Item = Job>,
    ) -> Self {
        let grace_until = later(now, settings.lease);
        let mut world = Self {
            settings,
            started_at: now,
            grace_until,
            ids: IdGen::seeded(seed),
            instances: instances.into_iter().map(|instance| (instance.id, instance)).collect(),
            seen: BTreeMap::new(),
            jobs: jobs.into_iter().map(|job| (job.id, job)).collect(),
            demand: BTreeMap::new(),
            health: BTreeMap::new(),
            breakers: BTreeMap::new(),
            list: ListState::default(),
            orphans: BTreeMap::new(),
            destroy_errors: BTreeMap::new(),
            reload_error: None,
            clock_stepped: None,
            paused: None,
            heard_again: false,
            dirty: Dirty::default(),
        };
        if let Some(last) = world.instances.keys().next_back() {
            world.ids.begin_behind(*last);
        }
        world.recall_calls(now);
        world
    }

    /// What was outstanding when the last scaler died is done again: calls are idempotent by instance id, and so is
    /// the closing of a log.
    fn recall_calls(&mut self, now: Timestamp) {
        for job in self.jobs.values_mut() {
            if let super::demand::JobState::Finished(ended) = &mut job.state
                && let Log::Closing { incomplete } = ended.log
            {
                ended.log = Log::Over { incomplete };
            }
            if let Some(runner) = &mut job.runner
                && let Registration::Minting(call) | Registration::Ending(call) = &mut runner.registration
                && let Call::Sent { failures } = *call
            {
                *call = Call::Due { at: now, failures };
            }
        }
        for instance in self.instances.values_mut() {
            if let Phase::Requested { create: call } | Phase::Terminating { destroy: call, .. } = &mut instance.phase
                && let Call::Sent { failures } = *call
            {
                *call = Call::Due { at: now, failures };
            }
        }
    }

    /// Takes in what happened.
    ///
    /// # Errors
    /// When the event cannot be: the world is then as it was.
    pub fn apply(&mut self, event: Event, now: Timestamp) -> Result<Applied, Refusal> {
        match event {
            Event::Submitted(submission) => self.submit(*submission, now),
            Event::JobCancelled(job) => self.cancel_job(job, now),
            Event::LogClosed(job) => {
                self.log_closed(job);
                Ok(Applied::Done)
            }
            Event::Enrolled(enrol) => self.enrol(*enrol, now),
            Event::Synced(synced) => self.synced(*synced, now),
            Event::SyncAnswered(instance) => self.sync_answered(instance, now),
            Event::AssignmentEvent { instance, assignment, event } => {
                self.assignment_event(instance, assignment, event, now)
            }
            Event::Created(instance) => self.created(instance, now),
            Event::CreateFailed { instance, class, message } => self.create_failed(instance, class, message, now),
            Event::DestroyAccepted(instance) => self.destroy_accepted(instance, now),
            Event::DestroyFailed { instance, message } => self.destroy_failed(instance, &message, now),
            Event::ListRead { began_at, listed } => {
                self.list_read(began_at, &listed, now);
                Ok(Applied::Done)
            }
            Event::ListFailed { message } => {
                let since = self.list.failing.take().map_or(now, |(since, _)| since);
                self.list.failing = Some((since, message));
                Ok(Applied::Done)
            }
            Event::Drain { target, now: at_once } => self.drain(&target, at_once, now),
            Event::Resumed => {
                self.paused = None;
                Ok(Applied::Done)
            }
            Event::Held { instance, duration } => self.hold(instance, duration, now),
            Event::Released(instance) => self.release(instance),
            Event::Reloaded(settings) => {
                self.reload(*settings);
                Ok(Applied::Done)
            }
            Event::ReloadFailed { message } => {
                self.reload_error = Some((now, message));
                Ok(Applied::Done)
            }
            Event::ReapOrphans => Ok(Applied::Orphans(self.reap_orphans(now))),
            Event::DemandRead(reading) => {
                self.demand_read(*reading, now);
                Ok(Applied::Done)
            }
            Event::DemandFailed { forge, message } => {
                self.demand_failed(forge, message, now);
                Ok(Applied::Done)
            }
            Event::Granted { job, id } => self.granted(job, id, now),
            Event::GrantFailed { job, message } => self.grant_failed(job, message, now),
            Event::RegistrationOver(job) => self.registration_over(job),
            Event::RegistrationFailed { job, message } => self.registration_failed(job, &message, now),
            Event::ClockStepped { by, skipped } => {
                self.clock_stepped(by, skipped, now);
                Ok(Applied::Done)
            }
        }
    }

    /// What `apply` and `record` touched since the last call.
    pub fn take_dirty(&mut self) -> Dirty {
        std::mem::take(&mut self.dirty)
    }

    /// Whether a machine that was silent has been heard since the last call: the last plan holds no longer.
    pub fn take_heard_again(&mut self) -> bool {
        std::mem::take(&mut self.heard_again)
    }

    /// Forgets jobs that nothing can change any more; call it once their last change is committed.
    pub fn forget_settled(&mut self, committed: &Dirty) {
        for id in &committed.jobs {
            if self.jobs.get(id).is_some_and(Job::is_settled) {
                self.jobs.remove(id);
            }
        }
    }

    /// An instance.
    #[must_use]
    pub fn instance(&self, id: InstanceId) -> Option<&Instance> {
        self.instances.get(&id)
    }

    /// All instances, tombstones included.
    pub fn instances(&self) -> impl Iterator<Item = &Instance> {
        self.instances.values()
    }

    /// All instances in the order of their ids, each with its pool and what was seen of it.
    pub(super) fn machines(&self) -> impl Iterator<Item = Machine<'_>> {
        // Both maps have the same order: side by side costs a tenth of looking each up. So does the pool of the last.
        let mut seen = self.seen.iter().peekable();
        let mut last: Option<(&PoolName, Option<&Pool>)> = None;
        self.instances.values().map(move |instance| {
            while seen.next_if(|(id, _)| **id < instance.id).is_some() {}
            let seen = seen.next_if(|(id, _)| **id == instance.id).map(|(_, seen)| seen);
            let pool = match last {
                Some((name, pool)) if *name == instance.pool => pool,
                _ => self.settings.pools.get(&instance.pool),
            };
            last = Some((&instance.pool, pool));
            Machine { instance, pool, seen }
        })
    }

    /// A job that is not settled.
    #[must_use]
    pub fn job(&self, id: JobId) -> Option<&Job> {
        self.jobs.get(&id)
    }

    /// All jobs that are not settled.
    pub fn jobs(&self) -> impl Iterator<Item = &Job> {
        self.jobs.values()
    }

    /// What was seen of a machine since the scaler's start.
    #[must_use]
    pub fn seen(&self, id: InstanceId) -> Option<&Seen> {
        self.seen.get(&id)
    }

    /// What the admin configured.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// What is known of a forge.
    #[must_use]
    pub fn demand(&self, forge: &ForgeName) -> Option<&Demand> {
        self.demand.get(forge)
    }

    /// What is known of the provider's list.
    #[must_use]
    pub fn list_state(&self) -> &ListState {
        &self.list
    }

    pub(super) fn instance_mut(&mut self, id: InstanceId) -> Option<&mut Instance> {
        let instance = self.instances.get_mut(&id)?;
        self.dirty.instances.insert(id);
        Some(instance)
    }

    pub(super) fn job_mut(&mut self, id: JobId) -> Option<&mut Job> {
        let job = self.jobs.get_mut(&id)?;
        self.dirty.jobs.insert(id);
        Some(job)
    }

    /// Moves an instance's phase; a step that does not apply changes nothing.
    pub(super) fn step(&mut self, id: InstanceId, step: &Step, now: Timestamp) {
        let Some(instance) = self.instances.get_mut(&id) else { return };
        let phase = instance.phase.transition(step, now);
        if phase != instance.phase {
            instance.phase = phase;
            instance.changed_at = now;
            self.dirty.instances.insert(id);
        }
    }
}

/// A time after another, saturating: a deadline beyond the calendar never comes.
pub(super) fn later(at: Timestamp, by: SignedDuration) -> Timestamp {
    at.saturating_add(by).unwrap_or(Timestamp::MAX)
}
