//! All machines, counted and sorted in one pass: at ten thousand of them the planner's time is that of fetching them
//! from memory.

use jiff::Timestamp;
use pilotlight_wire::{PlacementName, PoolName};

use super::bins::{Bins, bin};
use crate::fleet::{
    instance::Phase,
    mutant::{Mutant, planted},
    world::{Machine, World},
};

/// What packing needs to know of the machines.
#[derive(Default)]
pub(in crate::fleet) struct Census<'a> {
    pub(super) pools: Vec<InPool<'a>>,
    pub(super) placements: Vec<InPlacement<'a>>,
    /// Ready machines without work that no plan takes away.
    pub(in crate::fleet) vacant: Vec<Machine<'a>>,
    /// Where the last machine was counted: those of one pool and placement come in long runs.
    last_pool: usize,
    last_placement: usize,
}

/// The machines of a pool.
pub(super) struct InPool<'a> {
    pub(super) name: &'a PoolName,
    /// Those that count against its bound.
    pub(super) live: u32,
    /// Those of them that are on their way out.
    pub(super) leaving: u32,
    /// Those that take new work.
    pub(super) bins: Bins<'a>,
}

/// The machines of a placement.
pub(super) struct InPlacement<'a> {
    pub(super) name: &'a PlacementName,
    /// Those that count against its bound.
    pub(super) live: u32,
    /// Those of them that are not up yet.
    pub(super) unready: u32,
}

impl<'a> Census<'a> {
    /// Counts a machine. `leaves`: whether this plan takes it away.
    pub(in crate::fleet) fn count(&mut self, world: &World, machine: Machine<'a>, leaves: bool, now: Timestamp) {
        let instance = machine.instance;
        if !instance.is_live() {
            return;
        }
        let in_pool = self.pool(&instance.pool);
        in_pool.live += 1;
        in_pool.leaving += u32::from(leaves || matches!(instance.phase, Phase::Terminating { .. }));
        if !leaves {
            let bin = bin(world, &machine, now);
            let vacant = bin.map_or_else(|| instance.is_vacant(), |bin| bin.vacant);
            if let Some(bin) = bin {
                in_pool.bins.push(bin);
            }
            let ready = matches!(instance.phase, Phase::Ready { .. });
            if ready && (vacant || planted(Mutant::IdleEndsJobs)) {
                self.vacant.push(machine);
            }
        }
        let in_placement = self.placement(&instance.placement.name);
        in_placement.live += 1;
        let unready = matches!(instance.phase, Phase::Requested { .. } | Phase::Booting);
        in_placement.unready += u32::from(unready && !leaves);
    }

    /// The machines of a pool; there may be none.
    pub(super) fn pool(&mut self, name: &'a PoolName) -> &mut InPool<'a> {
        if self.pools.get(self.last_pool).is_none_or(|pool| pool.name != name) {
            self.last_pool = self.pools.iter().position(|pool| pool.name == name).unwrap_or_else(|| {
                self.pools.push(InPool { name, live: 0, leaving: 0, bins: Bins::default() });
                self.pools.len() - 1
            });
        }
        &mut self.pools[self.last_pool]
    }

    fn placement(&mut self, name: &'a PlacementName) -> &mut InPlacement<'a> {
        if self.placements.get(self.last_placement).is_none_or(|placement| placement.name != name) {
            self.last_placement =
                self.placements.iter().position(|placement| placement.name == name).unwrap_or_else(|| {
                    self.placements.push(InPlacement { name, live: 0, unready: 0 });
                    self.placements.len() - 1
                });
        }
        &mut self.placements[self.last_placement]
    }
}
