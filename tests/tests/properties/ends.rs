//! What time alone leads to, whatever happened before.

use jiff::SignedDuration;
use pilotlight_scaler::fleet::{Event, Phase, Plan, Pool, demand::Log, instance::Call};
use pilotlight_wire::{InstanceId, JobId, PoolName};

use crate::rig::Rig;

impl Rig {
    /// The provider answers and logs are closed. Says whether there was anything to answer.
    fn answer(&mut self) -> bool {
        let destroying = |phase: &Phase| matches!(phase, Phase::Terminating { destroy: Call::Sent { .. }, .. });
        let calls: Vec<InstanceId> =
            self.world.instances().filter(|i| destroying(&i.phase)).map(|instance| instance.id).collect();
        let lingering = |phase: &Phase| matches!(phase, Phase::Terminating { destroy: Call::Accepted { .. }, .. });
        let late: Vec<InstanceId> =
            self.world.instances().filter(|i| lingering(&i.phase)).map(|instance| instance.id).collect();
        let logs = self.world.jobs().filter(|job| matches!(job.ended().map(|e| e.log), Some(Log::Closing { .. })));
        let logs: Vec<JobId> = logs.map(|job| job.id).collect();
        let busy = !calls.is_empty() || !logs.is_empty();
        for id in late {
            self.listed.remove(&id);
        }
        for id in calls {
            self.listed.remove(&id);
            self.apply(Event::DestroyAccepted(id));
        }
        for job in logs {
            self.apply(Event::LogClosed(job));
        }
        busy
    }

    fn step(&mut self) -> (Plan, bool) {
        let planned = self.pass();
        let busy = self.answer() || planned.list_soon;
        self.list();
        (planned, busy)
    }

    /// From here the provider answers, nobody submits and no agent says a word: from every phase time alone leads to
    /// `Gone`.
    pub(crate) fn settle(&mut self) {
        // Machines that are kept ready would be launched for ever.
        self.shape.min_idle = 0;
        self.no_demand();
        self.list();
        for _ in 0..2000 {
            let (planned, busy) = self.step();
            let orphans = self.world.orphans().next().is_some();
            if !orphans && self.world.instances().all(|i| !i.is_live()) && self.world.jobs().next().is_none() {
                return;
            }
            if !busy {
                let wake = planned.wake_at.expect("something is left, so there is a time to look again");
                self.now = self.now.max(wake);
            }
        }
        let left: Vec<_> = self.world.instances().filter(|i| i.is_live()).collect();
        panic!("time did not end it: {left:#?} {:#?}", self.world.jobs().collect::<Vec<_>>());
    }

    /// From here the provider answers, nobody submits and every agent does as it is told: demand zero and time lead to
    /// `min_idle` instances.
    pub(crate) fn calm(&mut self) {
        self.no_demand();
        for id in self.world.instances().map(|instance| instance.id).collect::<Vec<_>>() {
            self.apply(Event::Released(id));
        }
        // Longer than any boot, cool-down and idle timeout and than a log's grace, and shorter than most lifetimes.
        for _ in 0..120 {
            self.obey();
            self.step();
            self.advance(SignedDuration::from_mins(2));
        }
        // While one is replaced at the end of its lifetime there may be one more or less, for a moment.
        let reached = (0..30).any(|_| {
            self.obey();
            self.step();
            self.advance(SignedDuration::from_mins(1));
            self.settings().pools.values().all(|pool| self.spare(&pool.name) == self.wanted(pool))
        });
        let live: Vec<_> = self.world.instances().filter(|instance| instance.is_live()).collect();
        assert!(reached, "calm did not lead to min_idle: {live:#?}");
    }

    fn spare(&self, pool: &PoolName) -> u32 {
        let there = self.world.instances().filter(|i| i.is_live() && i.pool == *pool);
        u32::try_from(there.count()).unwrap()
    }

    /// `min_idle`, as far as the placements have machines to give.
    fn wanted(&self, pool: &Pool) -> u32 {
        let settings = self.settings();
        let rungs = pool.placements.iter().map(|name| settings.placements[name].max_instances.unwrap_or(u32::MAX));
        pool.min_idle.min(rungs.fold(0, u32::saturating_add))
    }

    /// Every machine boots, and every agent syncs and ends what it is to cancel.
    fn obey(&mut self) {
        let all: Vec<InstanceId> = self.world.instances().filter(|i| i.is_live()).map(|i| i.id).collect();
        for id in all {
            match self.world.instance(id).map(|instance| &instance.phase) {
                Some(Phase::Requested { .. } | Phase::Booting) => {
                    self.listed.insert(id);
                    self.enrol(id, true);
                }
                Some(Phase::Ready { .. } | Phase::Draining { .. }) => self.sync(id),
                _ => {}
            }
        }
        while self.nth_assignment(0).is_some() {
            self.event(0, crate::ops::finished(true));
        }
        let ended = self.world.jobs().filter(|job| job.ended().is_some() && !job.is_settled());
        for job in ended.map(|job| job.id).collect::<Vec<_>>() {
            self.apply(Event::LogClosed(job));
        }
    }

    fn no_demand(&mut self) {
        self.apply(Event::Resumed);
        self.variant = 2;
        self.run(&crate::ops::Op::Reload);
        for job in self.jobs.clone() {
            self.apply(Event::JobCancelled(job));
        }
    }
}
