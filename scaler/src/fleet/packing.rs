//! Which queued job goes onto which machine: ready ones first, then booting ones, then new ones down the ladder.
//!
//! Jobs go by priority, then age. A large job must not starve behind small ones: one that has waited longer than
//! [`STARVING`] and fits nowhere has the free GPUs of one machine kept for it.

mod bins;
mod room;

pub(super) use self::bins::HEARD;

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use pilotlight_wire::{GpuId, InstanceId, JobId, PlacementName, PoolName};

use self::{
    bins::{Bin, Bins, Standing, bin, new_bin},
    room::Room,
};
use super::{
    Job, Pool,
    ids::IdGen,
    instance::Instance,
    mutant::{Mutant, planted},
    plan::Leaving,
    reason::Waiting,
    world::World,
};

/// How long a job waits before GPUs are kept free for it.
pub(super) const STARVING: SignedDuration = SignedDuration::from_mins(10);

/// What packing decided.
#[derive(Debug, Default)]
pub(super) struct Packed {
    /// Machines to launch: where, and their GPUs where the placement names them.
    pub(super) launches: Vec<NewMachine>,
    /// Jobs to give to ready machines now.
    pub(super) assignments: Vec<(JobId, InstanceId, Vec<GpuId>)>,
    /// Jobs that stay queued.
    pub(super) waiting: BTreeMap<JobId, Waiting>,
    /// Machines that some job counts on: they are not idle.
    pub(super) reserved: BTreeSet<InstanceId>,
    /// Machines that have no work, or will have none once they are up, and would take some.
    pub(super) spare: BTreeSet<InstanceId>,
    /// How many of them each pool has, those of this plan included.
    pub(super) spare_of: BTreeMap<PoolName, u32>,
    /// Pools in which a job waits for a bound: machines that do not suit it make room, `min_idle` or not.
    pub(super) crowded: BTreeSet<PoolName>,
    /// Whether some pool has fewer machines without work than its `min_idle`.
    pub(super) short: bool,
}

/// A machine to launch.
#[derive(Debug)]
pub(super) struct NewMachine {
    pub(super) id: InstanceId,
    pub(super) pool: PoolName,
    pub(super) placement: PlacementName,
    pub(super) gpu_ids: Vec<GpuId>,
    /// Launched for no job, but because the pool keeps `min_idle` ready.
    pub(super) spare: bool,
}

pub(super) fn pack(world: &World, leaving: &Leaving, ids: &mut IdGen, now: Timestamp) -> Packed {
    let mut packed = Packed::default();
    let mut room = Room::new(world, leaving);
    let mut queues: BTreeMap<&PoolName, Vec<&Job>> = BTreeMap::new();
    for job in world.jobs.values().filter(|job| job.is_queued()) {
        queues.entry(&job.pool).or_default().push(job);
    }
    for (pool, mut queue) in queues {
        queue.sort_by(|a, b| {
            let age = if planted(Mutant::YoungestFirst) {
                b.queued_at.cmp(&a.queued_at)
            } else {
                a.queued_at.cmp(&b.queued_at)
            };
            b.priority.cmp(&a.priority).then(age).then(a.id.cmp(&b.id))
        });
        match world.settings.pools.get(pool) {
            Some(pool) => pack_pool(world, pool, &queue, &mut room, ids, now, &mut packed),
            None => packed.waiting.extend(queue.iter().map(|job| (job.id, Waiting::LabelRemoved))),
        }
    }
    keep_spare(world, &mut room, ids, now, &mut packed);
    packed
}

/// Counts the machines without work, and launches what `min_idle` lacks.
fn keep_spare<'a>(world: &'a World, room: &mut Room<'a>, ids: &mut IdGen, now: Timestamp, packed: &mut Packed) {
    let spare = world.instances.values().filter(|instance| {
        instance.is_vacant()
            && bin(world, instance, now).is_some()
            && !room.leaving.instances.contains(&instance.id)
            && !packed.reserved.contains(&instance.id)
    });
    let mut counts: BTreeMap<PoolName, u32> = BTreeMap::new();
    let mut found = BTreeSet::new();
    for instance in spare {
        *counts.entry(instance.pool.clone()).or_default() += 1;
        found.insert(instance.id);
    }
    packed.spare = found;
    for pool in world.settings.pools.values() {
        let count = counts.entry(pool.name.clone()).or_default();
        if world.paused.is_some() || packed.crowded.contains(&pool.name) {
            continue;
        }
        while *count < pool.min_idle && !planted(Mutant::IgnoresMinIdle) {
            let Ok((placement, gpu_ids)) = room.launch(pool, None, now) else {
                packed.short = true;
                break;
            };
            *count += 1;
            let (pool, placement) = (pool.name.clone(), placement.name.clone());
            packed.launches.push(NewMachine { id: ids.mint(now), pool, placement, gpu_ids, spare: true });
        }
    }
    packed.spare_of = counts;
}

fn pack_pool<'a>(
    world: &'a World,
    pool: &'a Pool,
    queue: &[&Job],
    room: &mut Room<'a>,
    ids: &mut IdGen,
    now: Timestamp,
    packed: &mut Packed,
) {
    let mut bins = Bins::default();
    for instance in world.instances.values() {
        if instance.pool == pool.name
            && !room.leaving.instances.contains(&instance.id)
            && let Some(bin) = bin(world, instance, now)
        {
            bins.push(bin);
        }
    }
    for job in queue {
        if !world.settings.labels.contains_key(&job.label) {
            packed.waiting.insert(job.id, Waiting::LabelRemoved);
            continue;
        }
        if world.paused.is_some() {
            packed.waiting.insert(job.id, Waiting::Paused);
            continue;
        }
        if let Some(refused) = job.refusal.as_ref().filter(|refused| now < refused.until) {
            let (until, reason) = (refused.until, refused.reason.clone());
            packed.waiting.insert(job.id, Waiting::Refused { until, reason });
            continue;
        }
        if let Some(index) = bins.find(job.gpus) {
            let given = bins.take(index, job.gpus);
            let Bin { id, standing, .. } = bins.all[index];
            match standing {
                Standing::Ready => packed.assignments.push((job.id, id, free_ids(world, id, given, job.gpus))),
                Standing::Booting => drop(packed.waiting.insert(job.id, Waiting::Boot(id))),
                Standing::Unheard => drop(packed.waiting.insert(job.id, Waiting::Unheard(id))),
                Standing::New => drop(packed.waiting.insert(job.id, Waiting::Launch(id))),
            }
            packed.reserved.insert(id);
            continue;
        }
        match room.launch(pool, Some(job.gpus), now) {
            Ok((placement, gpu_ids)) => {
                let id = ids.mint(now);
                let index = bins.push(new_bin(id, pool, placement));
                bins.take(index, job.gpus);
                packed.waiting.insert(job.id, Waiting::Launch(id));
                packed.launches.push(NewMachine {
                    id,
                    pool: pool.name.clone(),
                    placement: placement.name.clone(),
                    gpu_ids,
                    spare: false,
                });
            }
            Err(waiting) => {
                if matches!(waiting, Waiting::PoolFull { .. } | Waiting::PlacementFull(_)) {
                    packed.crowded.insert(pool.name.clone());
                }
                let behind = job.gpus > 0 && bins.kept >= job.gpus;
                packed.waiting.insert(job.id, if behind { Waiting::BehindLargeJob } else { waiting });
                let starving = job.gpus > 0 && now.duration_since(job.queued_at) >= STARVING;
                if starving && !planted(Mutant::StarvesLargeJobs) {
                    packed.reserved.extend(bins.keep_for(job.gpus));
                }
            }
        }
    }
}

/// The next free GPUs of a machine, behind those that this plan has given away.
fn free_ids(world: &World, id: InstanceId, given: usize, gpus: u32) -> Vec<GpuId> {
    let count = usize::try_from(gpus).unwrap_or(usize::MAX);
    let free = world.instances.get(&id).into_iter().flat_map(Instance::free_gpu_ids);
    free.skip(given).take(count).cloned().collect()
}
