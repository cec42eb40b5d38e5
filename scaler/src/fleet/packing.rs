//! Which queued job goes onto which machine: ready ones first, then booting ones, then new ones down the ladder.
//!
//! Jobs go by priority, then age. A large job must not starve behind small ones: one that has waited longer than
//! [`STARVING`] and fits nowhere has the free GPUs of one machine kept for it.

mod bins;
mod census;
mod room;

pub(super) use self::census::Census;

use std::collections::{BTreeMap, BTreeSet, HashSet};

use jiff::{SignedDuration, Timestamp};
use pilotlight_wire::{GpuId, InstanceId, JobId, PlacementName, PoolName};

use self::{
    bins::{Bin, Bins, Standing, new_bin},
    room::Room,
};
use super::{
    Pool,
    asks::Ask,
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
pub(super) struct Packed<'a> {
    /// Machines to launch: where, and their GPUs where the placement names them.
    pub(super) launches: Vec<NewMachine>,
    /// Who is to be given a place on a ready machine now.
    pub(super) assignments: Vec<(Ask<'a>, InstanceId, Vec<GpuId>)>,
    /// Jobs that stay queued.
    pub(super) waiting: BTreeMap<JobId, Waiting>,
    /// Machines that some job counts on: they are not idle.
    pub(super) reserved: HashSet<InstanceId>,
    /// Machines that have no work, or will have none once they are up, and would take some.
    pub(super) spare: HashSet<InstanceId>,
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

pub(super) fn pack<'a>(
    world: &'a World,
    asks: &[Ask<'a>],
    census: &mut Census<'a>,
    leaving: &'a Leaving,
    ids: &mut IdGen,
    now: Timestamp,
) -> Packed<'a> {
    let mut packed = Packed::default();
    let mut room = Room::new(world, census, leaving, now);
    let mut queue: Vec<&Ask<'a>> = asks.iter().collect();
    queue.sort_by(|a, b| {
        let age =
            if planted(Mutant::YoungestFirst) { b.queued_at.cmp(&a.queued_at) } else { a.queued_at.cmp(&b.queued_at) };
        a.pool.cmp(b.pool).then(b.priority.cmp(&a.priority)).then(age).then(a.id.cmp(&b.id))
    });
    for queue in queue.chunk_by(|a, b| a.pool == b.pool) {
        match world.settings.pools.get(queue[0].pool) {
            Some(pool) => {
                let bins = &mut census.pool(&pool.name).bins;
                pack_pool(pool, queue, bins, &mut room, ids, &mut packed);
            }
            None => packed.waiting.extend(queue.iter().map(|ask| (ask.id, Waiting::LabelRemoved))),
        }
    }
    for pool in &census.pools {
        // What is launched by this very plan is launched for somebody.
        for bin in pool.bins.all.iter().filter(|bin| bin.instance.is_some()) {
            if bin.reserved {
                packed.reserved.insert(bin.id);
            } else if bin.vacant {
                packed.spare.insert(bin.id);
                *packed.spare_of.entry(pool.name.clone()).or_default() += 1;
            }
        }
    }
    keep_spare(&mut room, ids, &mut packed);
    packed
}

/// Launches what `min_idle` lacks.
fn keep_spare(room: &mut Room<'_>, ids: &mut IdGen, packed: &mut Packed<'_>) {
    let (world, now) = (room.world, room.now);
    for pool in world.settings.pools.values() {
        let count = packed.spare_of.entry(pool.name.clone()).or_default();
        if world.paused.is_some() || packed.crowded.contains(&pool.name) {
            continue;
        }
        while *count < pool.min_idle && !planted(Mutant::IgnoresMinIdle) {
            let Ok((placement, gpu_ids)) = room.launch(pool, None) else {
                packed.short = true;
                break;
            };
            *count += 1;
            let (pool, placement) = (pool.name.clone(), placement.name.clone());
            packed.launches.push(NewMachine { id: ids.mint(now), pool, placement, gpu_ids, spare: true });
        }
    }
}

fn pack_pool<'a>(
    pool: &'a Pool,
    queue: &[&Ask<'a>],
    bins: &mut Bins<'a>,
    room: &mut Room<'a>,
    ids: &mut IdGen,
    packed: &mut Packed<'a>,
) {
    let (world, now) = (room.world, room.now);
    let mut label = None;
    for ask in queue {
        // Jobs of one label come in long runs.
        if label != Some(ask.label) {
            label = world.settings.labels.get_key_value(ask.label).map(|(name, _)| name);
        }
        if label.is_none() {
            packed.waiting.insert(ask.id, Waiting::LabelRemoved);
            continue;
        }
        if world.paused.is_some() {
            packed.waiting.insert(ask.id, Waiting::Paused);
            continue;
        }
        if let Some(refused) = ask.refusal.filter(|refused| now < refused.until) {
            let (until, reason) = (refused.until, refused.reason.clone());
            packed.waiting.insert(ask.id, Waiting::Refused { until, reason });
            continue;
        }
        if let Some(index) = bins.find(ask.gpus) {
            let given = bins.take(index, ask.gpus);
            let Bin { id, standing, instance, .. } = bins.all[index];
            match standing {
                Standing::Ready => packed.assignments.push((**ask, id, free_ids(instance, given, ask.gpus))),
                Standing::Booting => drop(packed.waiting.insert(ask.id, Waiting::Boot(id))),
                Standing::Unheard => drop(packed.waiting.insert(ask.id, Waiting::Unheard(id))),
                Standing::New => drop(packed.waiting.insert(ask.id, Waiting::Launch(id))),
            }
            continue;
        }
        match room.launch(pool, Some(ask.gpus)) {
            Ok((placement, gpu_ids)) => {
                let id = ids.mint(now);
                let index = bins.push(new_bin(id, pool, placement));
                bins.take(index, ask.gpus);
                packed.waiting.insert(ask.id, Waiting::Launch(id));
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
                let behind = ask.gpus > 0 && bins.kept >= ask.gpus;
                packed.waiting.insert(ask.id, if behind { Waiting::BehindLargeJob } else { waiting });
                let starving = ask.gpus > 0 && now.duration_since(ask.queued_at) >= STARVING;
                if starving && !planted(Mutant::StarvesLargeJobs) {
                    bins.keep_for(ask.gpus);
                }
            }
        }
    }
}

/// The next free GPUs of a machine, behind those that this plan has given away.
fn free_ids(instance: Option<&Instance>, given: usize, gpus: u32) -> Vec<GpuId> {
    let count = usize::try_from(gpus).unwrap_or(usize::MAX);
    let free = instance.into_iter().flat_map(Instance::free_gpu_ids);
    free.skip(given).take(count).cloned().collect()
}
