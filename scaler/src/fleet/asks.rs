//! Who waits for a machine: queued jobs of the built-in queue, and queued jobs of forges for which no runner stands
//! ready.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use pilotlight_wire::{ForgeName, JobId, LabelName, PoolName};

use super::{
    Job,
    demand::{JobState, Log, Refused},
    forge::{Demand, Forge, Key, Wanted},
    instance::Assignment,
    world::{World, later},
};

/// How long the last word of a forge that cannot be read any more counts. Until then its machines stay and boot on.
const STALE: SignedDuration = SignedDuration::from_mins(30);

/// Somebody who waits for GPUs. A copy of what packing asks for: at ten thousand jobs the planner's time is that of
/// fetching them from memory, and so it does that once.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ask<'a> {
    pub(super) id: JobId,
    pub(super) label: &'a LabelName,
    pub(super) pool: &'a PoolName,
    pub(super) gpus: u32,
    pub(super) priority: i32,
    pub(super) queued_at: Timestamp,
    pub(super) refusal: Option<&'a Refused>,
    /// For a forge's job, what a runner is to be granted for.
    pub(super) wanted: Option<(&'a Forge, &'a Wanted)>,
}

/// What jobs want of the planner.
#[derive(Debug, Default)]
pub(super) struct Asks<'a> {
    pub(super) all: Vec<Ask<'a>>,
    /// Jobs that are over and to whose logs nothing more will come, and whether some of it may be missing.
    pub(super) over: Vec<(JobId, bool)>,
    /// Runners whose registrations are not known to be gone, in the order of their grants.
    pub(super) runners: Vec<&'a Job>,
    /// How many runners of each key stand ready for nothing.
    pub(super) surplus: BTreeMap<(&'a ForgeName, Key), u32>,
}

pub(super) fn asks(world: &World, now: Timestamp) -> Asks<'_> {
    let mut asks = Asks::default();
    for job in world.jobs.values() {
        match &job.state {
            JobState::Queued => asks.all.push(Ask {
                id: job.id,
                label: &job.label,
                pool: &job.pool,
                gpus: job.gpus,
                priority: job.priority,
                queued_at: job.queued_at,
                refusal: job.refusal.as_ref(),
                wanted: None,
            }),
            JobState::Finished(ended) => {
                if let Log::Over { incomplete } = ended.log {
                    asks.over.push((job.id, incomplete));
                }
                asks.runners.extend(job.runner.is_some().then_some(job));
            }
            JobState::Placed { .. } => asks.runners.extend(job.runner.is_some().then_some(job)),
        }
    }
    for (name, demand) in &world.demand {
        if let Some(forge) = world.settings.forges.get(name) {
            of_forge(world, forge, demand, now, &mut asks);
        }
    }
    asks
}

/// Whether a runner may still take a job.
pub(super) fn stands_ready(job: &Job, assignment: &Assignment) -> bool {
    job.runner.as_ref().is_some_and(|runner| !runner.has_picked())
        && assignment.is_live()
        && !assignment.cancel
        && !assignment.withdrawn
}

fn of_forge<'a>(world: &'a World, forge: &'a Forge, demand: &'a Demand, now: Timestamp, asks: &mut Asks<'a>) {
    let (mut standing, taken) = runners(world, &asks.runners, forge, demand);
    if demand.failing.as_ref().is_none_or(|(since, _)| now < later(*since, STALE)) {
        let mut wanted: Vec<&Wanted> = demand.wanted.iter().filter(|wanted| !taken.contains(&wanted.job.id)).collect();
        wanted.sort_by_key(|wanted| (wanted.queued_at, wanted.job.id));
        for wanted in wanted {
            let Some(label) = world.settings.labels.get(&wanted.label) else { continue };
            if let Some(ready) = standing.get_mut(&wanted.key(forge)).filter(|ready| **ready > 0) {
                *ready -= 1;
                continue;
            }
            asks.all.push(Ask {
                id: wanted.id(&forge.name),
                label: &label.name,
                pool: &label.pool,
                gpus: label.gpus,
                priority: label.priority,
                queued_at: wanted.queued_at,
                refusal: demand.refusals.iter().find(|(refused, _)| *refused == wanted.label).map(|(_, why)| why),
                wanted: Some((forge, wanted)),
            });
        }
    }
    // Unknown is not empty: of a forge that cannot be read nobody knows that it needs nothing.
    if demand.read_at.is_some() && demand.failing.is_none() {
        let spare = standing.into_iter().filter(|(_, ready)| *ready > 0);
        asks.surplus.extend(spare.map(|(key, ready)| ((&forge.name, key), ready)));
    }
}

/// How many runners of each key are still to take a job, and which jobs are known to be taken.
fn runners(world: &World, all: &[&Job], forge: &Forge, demand: &Demand) -> (BTreeMap<Key, u32>, BTreeSet<i64>) {
    let mut standing = BTreeMap::new();
    let mut taken = BTreeSet::new();
    for job in all.iter().filter(|job| job.forge == forge.name) {
        let (Some(runner), Some((_, _, assignment))) = (&job.runner, world.placed(job)) else { continue };
        if runner.has_picked() {
            taken.insert(runner.job.id);
        } else if stands_ready(job, assignment) {
            let key = Key { label: job.label.clone(), repository: runner.repository.clone() };
            *standing.entry(key).or_default() += 1;
        }
    }
    // A job that was taken since the last reading began may still be among those it shows.
    for (key, _) in &demand.picks {
        if demand.wanted.iter().any(|wanted| wanted.key(forge) == *key) {
            *standing.entry(key.clone()).or_default() += 1;
        }
    }
    (standing, taken)
}
