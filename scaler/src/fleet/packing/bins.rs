//! The machines of one pool as packing sees them, found by what they have free.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use pilotlight_wire::InstanceId;

use crate::fleet::{
    Placement, Pool,
    instance::{Instance, Phase},
    world::{HEARD, Machine, World, cpu_jobs, later},
};

/// A machine as packing sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bin<'a> {
    pub(super) id: InstanceId,
    /// None for one that is to be launched by this plan.
    pub(super) instance: Option<&'a Instance>,
    /// Whether it has no work.
    pub(super) vacant: bool,
    /// Whether somebody who waits counts on it.
    pub(super) reserved: bool,
    pub(super) standing: Standing,
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
pub(super) enum Standing {
    Ready,
    /// Ready, and not heard since the scaler's start.
    Unheard,
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
pub(super) struct Bins<'a> {
    pub(super) all: Vec<Bin<'a>>,
    /// Ready machines with free GPUs that are not kept: (free, index).
    ready: BTreeSet<(u32, usize)>,
    /// Ready machines with room for a job without GPUs: (room, index).
    ready_cpu: BTreeSet<(u32, usize)>,
    /// Machines that are not ready, in order.
    later: Vec<usize>,
    /// For each number of GPUs, how many of those in `later` were found to have too little free. What is free only gets
    /// less, so they need not be looked at again.
    passed: BTreeMap<u32, usize>,
    /// The most GPUs that are free on one machine and kept.
    pub(super) kept: u32,
}

impl<'a> Bins<'a> {
    pub(super) fn push(&mut self, bin: Bin<'a>) -> usize {
        let index = self.all.len();
        self.all.push(bin);
        if bin.standing == Standing::Ready {
            self.index(index);
        } else {
            self.later.push(index);
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
    pub(super) fn find(&mut self, gpus: u32) -> Option<usize> {
        let ready = if gpus == 0 { self.ready_cpu.first() } else { self.ready.range((gpus, 0)..).next() };
        if let Some((_, index)) = ready {
            return Some(*index);
        }
        let passed = self.passed.entry(gpus).or_default();
        let too_full = |index: &&usize| {
            let bin = self.all[**index];
            if gpus == 0 { bin.free_cpu_jobs == 0 } else { bin.free < gpus || bin.kept }
        };
        *passed += self.later[*passed..].iter().take_while(too_full).count();
        self.later.get(*passed).copied()
    }

    /// Takes room on a machine; returns how many of its GPUs were given before.
    pub(super) fn take(&mut self, index: usize, gpus: u32) -> usize {
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
        bin.reserved = true;
        let bin = *bin;
        if before.standing == Standing::Ready && bin.free != before.free {
            self.ready.remove(&(before.free, index));
            if bin.free > 0 && !bin.kept {
                self.ready.insert((bin.free, index));
            }
        }
        if before.standing == Standing::Ready && bin.free_cpu_jobs != before.free_cpu_jobs {
            self.ready_cpu.remove(&(before.free_cpu_jobs, index));
            if bin.free_cpu_jobs > 0 {
                self.ready_cpu.insert((bin.free_cpu_jobs, index));
            }
        }
        before.given
    }

    /// Keeps the free GPUs of the machine that lacks the fewest for a starving job.
    pub(super) fn keep_for(&mut self, gpus: u32) {
        let fits = |bin: &Bin<'_>| bin.gpus >= gpus && !bin.kept && !bin.single_use;
        let ready = self.ready.iter().rev().map(|(_, index)| *index).find(|index| fits(&self.all[*index]));
        let later = self.later.iter().copied().filter(|index| fits(&self.all[*index]));
        let Some(index) = ready.into_iter().chain(later).min_by_key(|index| u32::MAX - self.all[*index].free) else {
            return;
        };
        let bin = &mut self.all[index];
        (bin.kept, bin.reserved) = (true, true);
        self.kept = self.kept.max(bin.free);
        self.ready.remove(&(bin.free, index));
    }
}

/// A machine that takes new work, if it does. One that is ready and silent takes none; right after the scaler's start it
/// will soon be heard, and is waited for.
pub(super) fn bin<'a>(world: &World, machine: &Machine<'a>, now: Timestamp) -> Option<Bin<'a>> {
    let instance = machine.instance;
    let standing = match instance.phase {
        Phase::Ready { .. } if machine.is_heard(now) => Standing::Ready,
        Phase::Ready { .. } if now < later(world.started_at, HEARD) => Standing::Unheard,
        Phase::Ready { .. } => return None,
        Phase::Requested { .. } | Phase::Booting => Standing::Booting,
        Phase::Draining { .. } | Phase::Terminating { .. } | Phase::Gone { .. } => return None,
    };
    if now >= instance.lifetime_end || instance.is_held(now) || (instance.single_use && instance.assigned_total > 0) {
        return None;
    }
    let (mut used, mut cpu_jobs) = (0, 0);
    for (_, assignment) in instance.live_assignments() {
        used += assignment.gpu_ids.len();
        cpu_jobs += u32::from(assignment.gpu_ids.is_empty());
    }
    Some(Bin {
        id: instance.id,
        instance: Some(instance),
        standing,
        gpus: instance.gpus(),
        free: instance.gpus().saturating_sub(u32::try_from(used).unwrap_or(u32::MAX)),
        free_cpu_jobs: instance.cpu_jobs.saturating_sub(cpu_jobs),
        vacant: used == 0 && cpu_jobs == 0,
        reserved: false,
        given: 0,
        single_use: instance.single_use,
        kept: false,
    })
}

pub(super) fn new_bin(id: InstanceId, pool: &Pool, placement: &Placement) -> Bin<'static> {
    Bin {
        id,
        instance: None,
        vacant: true,
        reserved: false,
        standing: Standing::New,
        gpus: placement.gpus,
        free: placement.gpus,
        free_cpu_jobs: cpu_jobs(placement, pool.cpu_jobs),
        given: 0,
        single_use: !pool.reuse,
        kept: false,
    }
}
