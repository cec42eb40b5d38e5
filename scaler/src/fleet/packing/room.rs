//! What may still be launched, and where: bounds, placement health, GPUs of this box.

use std::{
    cell::OnceCell,
    collections::{BTreeMap, HashSet},
};

use jiff::Timestamp;
use pilotlight_wire::{GpuId, PlacementName, PoolName};

use super::Census;
use crate::fleet::{
    Placement, Pool, ProviderConfig,
    mutant::{Mutant, planted},
    plan::Leaving,
    reason::Waiting,
    world::{Breaker, Health, World, could_hold},
};

/// What is left to launch: counts per pool and placement, and GPUs of this box not handed out.
pub(super) struct Room<'a> {
    pub(super) world: &'a World,
    pub(super) now: Timestamp,
    pub(super) leaving: &'a Leaving,
    per_pool: BTreeMap<&'a PoolName, u32>,
    per_placement: BTreeMap<&'a PlacementName, u32>,
    /// Machines of each pool that still count and are being destroyed.
    on_the_way_out: BTreeMap<&'a PoolName, u32>,
    /// Machines of each placement that are not up yet.
    unready: BTreeMap<&'a PlacementName, u32>,
    /// GPUs of this box that are handed out; gathered when a placement that names GPUs is asked.
    taken_ids: OnceCell<HashSet<&'a GpuId>>,
    /// Those handed out by this plan.
    given_ids: Vec<GpuId>,
}

impl<'a> Room<'a> {
    pub(super) fn new(world: &'a World, census: &Census<'a>, leaving: &'a Leaving, now: Timestamp) -> Self {
        let (pools, placements) = (&census.pools, &census.placements);
        let mut room = Self {
            world,
            now,
            leaving,
            per_pool: pools.iter().map(|pool| (pool.name, pool.live)).collect(),
            per_placement: placements.iter().map(|placement| (placement.name, placement.live)).collect(),
            on_the_way_out: pools.iter().map(|pool| (pool.name, pool.leaving)).collect(),
            unready: placements.iter().map(|placement| (placement.name, placement.unready)).collect(),
            taken_ids: OnceCell::new(),
            given_ids: Vec::new(),
        };
        // What nobody knows yet costs money too.
        for tags in world.orphans.values().filter_map(|orphan| orphan.tags.as_ref()) {
            *room.per_pool.entry(&tags.pool).or_default() += 1;
            *room.per_placement.entry(&tags.placement).or_default() += 1;
        }
        room
    }

    /// The first rung of the pool's ladder that can give a machine for so many GPUs (`None`: any machine), or why none
    /// can.
    pub(super) fn launch(&mut self, pool: &'a Pool, gpus: Option<u32>) -> Result<(&'a Placement, Vec<GpuId>), Waiting> {
        let in_pool = self.per_pool.entry(&pool.name).or_default();
        if *in_pool >= pool.max_instances && !planted(Mutant::IgnoresPoolBound) {
            let leaving = self.on_the_way_out.get(&pool.name).copied().unwrap_or(0);
            return Err(Waiting::PoolFull { max: pool.max_instances, leaving });
        }
        let mut waiting = Waiting::TooLarge;
        for name in &pool.placements {
            let Some(placement) = self.world.settings.placements.get(name) else { continue };
            if gpus.is_some_and(|gpus| !could_hold(placement, pool.cpu_jobs, gpus)) {
                continue;
            }
            let in_placement = self.per_placement.get(name).copied().unwrap_or(0);
            match self.refusal(placement, in_placement) {
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
                    *self.unready.entry(&placement.name).or_default() += 1;
                    self.given_ids.extend(gpu_ids.iter().cloned());
                    return Ok((placement, gpu_ids));
                }
            }
        }
        Err(waiting)
    }

    fn refusal(&self, placement: &Placement, live: u32) -> Option<Waiting> {
        let now = self.now;
        let name = || placement.name.clone();
        match self.world.health.get(&placement.name) {
            Some(Health::Cooling { until, message, .. }) if now < *until => {
                return Some(Waiting::Cooling { placement: name(), until: *until, message: message.clone() });
            }
            Some(Health::Stopped { message, .. }) => {
                return Some(Waiting::PlacementStopped { placement: name(), message: message.clone() });
            }
            Some(Health::Cooling { .. }) | None => {}
        }
        let breaker = self.leaving.breakers.get(&placement.boot_key()).or_else(|| self.world.breaker(placement));
        if let Some(Breaker { until, message, .. }) = breaker {
            if now < *until {
                return Some(Waiting::Cooling { placement: name(), until: *until, message: message.clone() });
            }
            if self.unready.get(&placement.name).is_some_and(|unready| *unready > 0) {
                return Some(Waiting::Probing { placement: name(), message: message.clone() });
            }
        }
        // Unknown is not empty: machines of ours may be there that would break the bound.
        let known = self.world.list.read_at.is_some() && self.world.list.failing.is_none();
        if !known && !planted(Mutant::TakesUnknownForEmpty) {
            return Some(Waiting::ProviderUnknown(name()));
        }
        let full = placement.max_instances.is_some_and(|max| live >= max && !planted(Mutant::IgnoresPlacementBound))
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
                let tags = || self.world.orphans.values().filter_map(|orphan| orphan.tags.as_ref());
                let taken = self.taken_ids.get_or_init(|| {
                    live().flat_map(|known| &known.gpu_ids).chain(tags().flat_map(|tags| &tags.gpu_ids)).collect()
                });
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
