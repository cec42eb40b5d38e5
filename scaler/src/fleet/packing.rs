//! Which queued job goes onto which machine: ready ones first, then booting ones, then new ones down the ladder.
//!
//! Jobs go by priority, then age. A large job must not starve behind small ones: one that has waited longer than
//! [`STARVING`] and fits nowhere has the free GPUs of one machine kept for it.

use std::{
    cell::OnceCell,
    collections::{BTreeMap, BTreeSet, HashSet},
};

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
#[derive(Clone, Copy, Debug)]
struct Bin {
    id: InstanceId,
    standing: Standing,
    gpus: u32,
    free: u32,
    free_cpu_jobs: u32,
    /// GPUs that this plan has given away.
    given: usize,
    single_use: bool,
    /// Its free GPUs are kept for a large job.
    kept: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    Ready,
    Booting,
    /// To be launched by this plan.
    New,
}

/// The machines of a pool, found by what they have free.
///
/// Ready ones by best fit: the fewest free GPUs that are enough, so that whole machines stay whole. The others in the
/// order of their launch: best fit over machines that are launched in the same plan would pack differently once they
/// are recorded, and so plan again.
#[derive(Default)]
struct Bins {
    all: Vec<Bin>,
    /// Ready machines with free GPUs that are not kept: (free, index).
    ready: BTreeSet<(u32, usize)>,
    /// Ready machines with room for a job without GPUs: (room, index).
    ready_cpu: BTreeSet<(u32, usize)>,
    /// Machines that are not ready, in order.
    later: Vec<usize>,
    /// No machine that is not ready has so many GPUs free (`None` for a job without GPUs: room for one). It only gets
    /// worse until one is launched.
    full: [Option<u32>; 2],
    /// The most GPUs that are free on one machine and kept.
    kept: u32,
}

impl Bins {
    fn push(&mut self, bin: Bin) -> usize {
        let index = self.all.len();
        self.all.push(bin);
        if bin.standing == Standing::Ready {
            self.index(index);
        } else {
            self.later.push(index);
            self.full = [None; 2];
        }
        index
    }

    /// Enters a ready machine under what it has free.
    fn index(&mut self, index: usize) {
        let bin = self.all[index];
        if bin.free > 0 && !bin.kept {
            self.ready.insert((bin.free, index));
        }
        if bin.free_cpu_jobs > 0 {
            self.ready_cpu.insert((bin.free_cpu_jobs, index));
        }
    }

    /// The machine for a job with so many GPUs.
    fn find(&mut self, gpus: u32) -> Option<usize> {
        let ready = if gpus == 0 { self.ready_cpu.first() } else { self.ready.range((gpus, 0)..).next() };
        if let Some((_, index)) = ready {
            return Some(*index);
        }
        let full = &mut self.full[usize::from(gpus == 0)];
        if full.is_some_and(|full| gpus >= full) {
            return None;
        }
        let all = &self.all;
        let found = self.later.iter().copied().find(|index| {
            let bin = all[*index];
            if gpus == 0 { bin.free_cpu_jobs > 0 } else { bin.free >= gpus && !bin.kept }
        });
        if found.is_none() {
            *full = Some(gpus);
        }
        found
    }

    /// Takes room on a machine; returns how many of its GPUs were given before.
    fn take(&mut self, index: usize, gpus: u32) -> usize {
        let before = self.all[index];
        let bin = &mut self.all[index];
        if bin.single_use {
            (bin.free, bin.free_cpu_jobs) = (0, 0);
        } else if gpus == 0 {
            bin.free_cpu_jobs -= 1;
        } else {
            bin.free -= gpus;
        }
        bin.given += usize::try_from(gpus).unwrap_or(usize::MAX);
        if before.standing == Standing::Ready {
            self.ready.remove(&(before.free, index));
            self.ready_cpu.remove(&(before.free_cpu_jobs, index));
            self.index(index);
        }
        before.given
    }

    /// Keeps the free GPUs of the machine that lacks the fewest for a starving job.
    fn keep_for(&mut self, gpus: u32) -> Option<InstanceId> {
        let fits = |bin: &Bin| bin.gpus >= gpus && !bin.kept && !bin.single_use;
        let ready = self.ready.iter().rev().map(|(_, index)| *index).find(|index| fits(&self.all[*index]));
        let later = self.later.iter().copied().filter(|index| fits(&self.all[*index]));
        let index = ready.into_iter().chain(later).min_by_key(|index| u32::MAX - self.all[*index].free)?;
        let bin = &mut self.all[index];
        bin.kept = true;
        self.kept = self.kept.max(bin.free);
        self.ready.remove(&(bin.free, index));
        Some(bin.id)
    }
}

/// What is left to launch: counts per pool and placement, and GPUs of this box not handed out.
struct Room<'a> {
    world: &'a World,
    leaving: &'a Leaving,
    per_pool: BTreeMap<&'a PoolName, u32>,
    per_placement: BTreeMap<&'a PlacementName, u32>,
    /// GPUs of this box that are handed out; gathered when a placement that names GPUs is asked.
    taken_ids: OnceCell<HashSet<&'a GpuId>>,
    /// Those handed out by this plan.
    given_ids: Vec<GpuId>,
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
    let mut bins = Bins::default();
    for instance in world.instances.values() {
        if instance.pool == pool.name
            && !room.leaving.instances.contains(&instance.id)
            && let Some(bin) = bin(instance, now)
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
                Standing::New => drop(packed.waiting.insert(job.id, Waiting::Launch(id))),
            }
            packed.reserved.insert(id);
            continue;
        }
        match room.launch(pool, job.gpus, now) {
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
                });
            }
            Err(waiting) => {
                let behind = job.gpus > 0 && bins.kept >= job.gpus;
                packed.waiting.insert(job.id, if behind { Waiting::BehindLargeJob } else { waiting });
                if job.gpus > 0 && now.duration_since(job.queued_at) >= STARVING {
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

/// A machine that takes new work, if it does.
fn bin(instance: &Instance, now: Timestamp) -> Option<Bin> {
    let standing = match instance.phase {
        Phase::Ready { .. } => Standing::Ready,
        Phase::Requested { .. } | Phase::Booting => Standing::Booting,
        Phase::Draining { .. } | Phase::Terminating { .. } | Phase::Gone { .. } => return None,
    };
    if now >= instance.lifetime_end || (instance.single_use && instance.assigned_total > 0) {
        return None;
    }
    let used: usize = instance.live_assignments().map(|(_, assignment)| assignment.gpu_ids.len()).sum();
    Some(Bin {
        id: instance.id,
        standing,
        gpus: instance.gpus(),
        free: instance.gpus().saturating_sub(u32::try_from(used).unwrap_or(u32::MAX)),
        free_cpu_jobs: instance.free_cpu_jobs(),
        given: 0,
        single_use: instance.single_use,
        kept: false,
    })
}

fn new_bin(id: InstanceId, pool: &Pool, placement: &Placement) -> Bin {
    Bin {
        id,
        standing: Standing::New,
        gpus: placement.gpus,
        free: placement.gpus,
        free_cpu_jobs: cpu_jobs(placement, pool.cpu_jobs),
        given: 0,
        single_use: !pool.reuse,
        kept: false,
    }
}

impl<'a> Room<'a> {
    fn new(world: &'a World, leaving: &'a Leaving) -> Self {
        let (per_pool, per_placement) = (BTreeMap::new(), BTreeMap::new());
        let (taken_ids, given_ids) = (OnceCell::new(), Vec::new());
        let mut room = Self { world, leaving, per_pool, per_placement, taken_ids, given_ids };
        for instance in world.instances.values().filter(|instance| instance.is_live()) {
            *room.per_pool.entry(&instance.pool).or_default() += 1;
            *room.per_placement.entry(&instance.placement.name).or_default() += 1;
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
                    self.given_ids.extend(gpu_ids.iter().cloned());
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
            // Elsewhere the machine brings its own.
            ProviderConfig::Local(local) if local.gpu_ids.is_empty() => Vec::new(),
            ProviderConfig::Local(local) => {
                let live = || self.world.instances.values().filter(|instance| instance.is_live());
                let taken = self.taken_ids.get_or_init(|| live().flat_map(|instance| &instance.gpu_ids).collect());
                local
                    .gpu_ids
                    .iter()
                    .filter(|gpu| !taken.contains(gpu) && !self.given_ids.contains(gpu))
                    .take(usize::try_from(placement.gpus).unwrap_or(usize::MAX))
                    .cloned()
                    .collect()
            }
        }
    }
}
