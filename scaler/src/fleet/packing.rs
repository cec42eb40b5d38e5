//! Which queued job goes onto which machine: ready ones first, then booting ones, then new ones down the ladder.
//!
//! Jobs go by priority, then age. A large job must not starve behind small ones: one that has waited longer than
//! [`STARVING`] and fits nowhere has the free GPUs of one machine kept for it.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use pilotlight_wire::{GpuId, InstanceId, JobId, PlacementName, PoolName};

use super::{
    Job, Placement, Pool, ProviderConfig,
    ids::IdGen,
    instance::{Instance, Phase},
    plan::Leaving,
    reason::Waiting,
    world::{Health, World, could_hold, cpu_jobs},
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
}

/// A machine to launch.
#[derive(Debug)]
pub(super) struct NewMachine {
    pub(super) id: InstanceId,
    pub(super) pool: PoolName,
    pub(super) placement: PlacementName,
    pub(super) gpu_ids: Vec<GpuId>,
}

/// A machine as packing sees it.
struct Bin {
    id: InstanceId,
    /// 0 ready, 1 booting, 2 to be launched: the order in which they are filled.
    rank: u8,
    gpus: u32,
    free: u32,
    free_cpu_jobs: u32,
    free_ids: Vec<GpuId>,
    single_use: bool,
    /// Its free GPUs are kept for a large job.
    kept: bool,
}

impl Bin {
    /// Ready machines by best fit: the fewest free GPUs that are enough, so that whole machines stay whole. The others
    /// in the order in which they were launched (the order of `bins`), ready or not: best fit over machines that are
    /// launched in the same plan would pack differently once they are recorded, and so plan again.
    fn preference(&self) -> (u8, u32, u32) {
        match self.rank {
            0 => (0, self.free, self.free_cpu_jobs),
            _ => (1, 0, 0),
        }
    }

    fn fits(&self, gpus: u32) -> bool {
        let room = if gpus == 0 { self.free_cpu_jobs > 0 } else { self.free >= gpus };
        room && !(self.kept && gpus > 0)
    }

    fn take(&mut self, gpus: u32) -> Vec<GpuId> {
        if self.single_use {
            self.free_cpu_jobs = 0;
            self.free = 0;
        } else if gpus == 0 {
            self.free_cpu_jobs -= 1;
        } else {
            self.free -= gpus;
        }
        let count = usize::try_from(gpus).unwrap_or(usize::MAX).min(self.free_ids.len());
        self.free_ids.drain(..count).collect()
    }
}

/// What is left to launch: counts per pool and placement, and GPUs of this box not handed out.
struct Room<'a> {
    world: &'a World,
    leaving: &'a Leaving,
    per_pool: BTreeMap<&'a PoolName, u32>,
    per_placement: BTreeMap<&'a PlacementName, u32>,
    taken_ids: BTreeSet<GpuId>,
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
            (-i64::from(a.priority), a.queued_at, a.id).cmp(&(-i64::from(b.priority), b.queued_at, b.id))
        });
        match world.settings.pools.get(pool) {
            Some(pool) => pack_pool(world, pool, &queue, &mut room, ids, now, &mut packed),
            None => packed.waiting.extend(queue.iter().map(|job| (job.id, Waiting::LabelRemoved))),
        }
    }
    packed
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
    let mut bins: Vec<Bin> = world
        .instances
        .values()
        .filter(|instance| instance.pool == pool.name && !room.leaving.instances.contains(&instance.id))
        .filter_map(|instance| bin(instance, now))
        .collect();
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
        let fit = bins.iter_mut().filter(|bin| bin.fits(job.gpus)).min_by_key(|bin| bin.preference());
        if let Some(bin) = fit {
            let gpu_ids = bin.take(job.gpus);
            match bin.rank {
                0 => packed.assignments.push((job.id, bin.id, gpu_ids)),
                1 => drop(packed.waiting.insert(job.id, Waiting::Boot(bin.id))),
                _ => drop(packed.waiting.insert(job.id, Waiting::Launch(bin.id))),
            }
            packed.reserved.insert(bin.id);
            continue;
        }
        match room.launch(pool, job.gpus, now) {
            Ok((placement, gpu_ids)) => {
                let id = ids.mint(now);
                let mut bin = new_bin(id, pool, placement, &gpu_ids);
                let _ids = bin.take(job.gpus);
                bins.push(bin);
                packed.waiting.insert(job.id, Waiting::Launch(id));
                packed.launches.push(NewMachine {
                    id,
                    pool: pool.name.clone(),
                    placement: placement.name.clone(),
                    gpu_ids,
                });
            }
            Err(waiting) => {
                let behind = job.gpus > 0 && bins.iter().any(|bin| bin.kept && bin.free >= job.gpus);
                packed.waiting.insert(job.id, if behind { Waiting::BehindLargeJob } else { waiting });
                if now.duration_since(job.queued_at) >= STARVING
                    && let Some(bin) = keep_for(&mut bins, job.gpus)
                {
                    bin.kept = true;
                    packed.reserved.insert(bin.id);
                }
            }
        }
    }
}

/// The machine whose GPUs are kept for a starving job: the one that lacks the fewest.
fn keep_for(bins: &mut [Bin], gpus: u32) -> Option<&mut Bin> {
    bins.iter_mut()
        .filter(|bin| gpus > 0 && bin.gpus >= gpus && !bin.kept && !bin.single_use)
        .min_by_key(|bin| (u32::MAX - bin.free, bin.id))
}

/// A machine that takes new work, if it does.
fn bin(instance: &Instance, now: Timestamp) -> Option<Bin> {
    let rank = match instance.phase {
        Phase::Ready { .. } => 0,
        Phase::Requested { .. } | Phase::Booting => 1,
        Phase::Draining { .. } | Phase::Terminating { .. } | Phase::Gone { .. } => return None,
    };
    if now >= instance.lifetime_end || (instance.single_use && instance.assigned_total > 0) {
        return None;
    }
    let used: usize = instance.live_assignments().map(|(_, assignment)| assignment.gpu_ids.len()).sum();
    Some(Bin {
        id: instance.id,
        rank,
        gpus: instance.gpus(),
        free: instance.gpus().saturating_sub(u32::try_from(used).unwrap_or(u32::MAX)),
        free_cpu_jobs: instance.free_cpu_jobs(),
        free_ids: instance.free_gpu_ids().cloned().collect(),
        single_use: instance.single_use,
        kept: false,
    })
}

fn new_bin(id: InstanceId, pool: &Pool, placement: &Placement, gpu_ids: &[GpuId]) -> Bin {
    Bin {
        id,
        rank: 2,
        gpus: placement.gpus,
        free: placement.gpus,
        free_cpu_jobs: cpu_jobs(placement, pool.cpu_jobs),
        free_ids: gpu_ids.to_vec(),
        single_use: !pool.reuse,
        kept: false,
    }
}

impl<'a> Room<'a> {
    fn new(world: &'a World, leaving: &'a Leaving) -> Self {
        let (per_pool, per_placement) = (BTreeMap::new(), BTreeMap::new());
        let mut room = Self { world, leaving, per_pool, per_placement, taken_ids: BTreeSet::new() };
        for instance in world.instances.values().filter(|instance| instance.is_live()) {
            *room.per_pool.entry(&instance.pool).or_default() += 1;
            *room.per_placement.entry(&instance.placement.name).or_default() += 1;
            room.taken_ids.extend(instance.gpu_ids.iter().cloned());
        }
        room
    }

    /// The first rung of the pool's ladder that can give a machine for so many GPUs, or why none can.
    fn launch(&mut self, pool: &'a Pool, gpus: u32, now: Timestamp) -> Result<(&'a Placement, Vec<GpuId>), Waiting> {
        let in_pool = self.per_pool.entry(&pool.name).or_default();
        if *in_pool >= pool.max_instances {
            return Err(Waiting::PoolFull { max: pool.max_instances });
        }
        let mut waiting = Waiting::TooLarge;
        for name in &pool.placements {
            let Some(placement) = self.world.settings.placements.get(name) else { continue };
            if !could_hold(placement, pool.cpu_jobs, gpus) {
                continue;
            }
            let in_placement = self.per_placement.get(name).copied().unwrap_or(0);
            match self.refusal(placement, in_placement, now) {
                Some(refusal) => {
                    // The first rung is the one the admin would rather have: its reason is the one to show.
                    if waiting == Waiting::TooLarge {
                        waiting = refusal;
                    }
                }
                None => {
                    let gpu_ids = self.gpu_ids(placement);
                    *self.per_pool.entry(&pool.name).or_default() += 1;
                    *self.per_placement.entry(&placement.name).or_default() += 1;
                    self.taken_ids.extend(gpu_ids.iter().cloned());
                    return Ok((placement, gpu_ids));
                }
            }
        }
        Err(waiting)
    }

    fn refusal(&self, placement: &Placement, live: u32, now: Timestamp) -> Option<Waiting> {
        let name = || placement.name.clone();
        let health = self.leaving.placements.get(&placement.name).or_else(|| self.world.health.get(&placement.name));
        match health {
            Some(Health::Cooling { until, message, .. }) if now < *until => {
                return Some(Waiting::Cooling { placement: name(), until: *until, message: message.clone() });
            }
            Some(Health::Stopped { message, .. }) => {
                return Some(Waiting::PlacementStopped { placement: name(), message: message.clone() });
            }
            Some(Health::Cooling { .. }) | None => {}
        }
        // Unknown is not empty: machines of ours may be there that would break the bound.
        if self.world.list.read_at.is_none() || self.world.list.failing.is_some() {
            return Some(Waiting::ProviderUnknown(name()));
        }
        let full = placement.max_instances.is_some_and(|max| live >= max)
            || self.gpu_ids(placement).len() < usize::try_from(placement.gpus).unwrap_or(usize::MAX);
        full.then(|| Waiting::PlacementFull(name()))
    }

    /// GPUs of this box for a new machine, disjoint from all that are handed out.
    fn gpu_ids(&self, placement: &Placement) -> Vec<GpuId> {
        match &placement.provider {
            ProviderConfig::Local(local) => local
                .gpu_ids
                .iter()
                .filter(|gpu| !self.taken_ids.contains(gpu))
                .take(usize::try_from(placement.gpus).unwrap_or(usize::MAX))
                .cloned()
                .collect(),
        }
    }
}
