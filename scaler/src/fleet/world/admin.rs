//! What admins order: drain, hold, release, a new config.

use jiff::{SignedDuration, Timestamp};
use pilotlight_wire::{
    InstanceId,
    api::{DrainTarget, MAX_HOLD_SECONDS},
};

use super::{Health, Settings, World, later};
use crate::fleet::{
    event::{Applied, Refusal},
    instance::{Phase, Step},
    reason::Cause,
};

impl World {
    pub(super) fn drain(&mut self, target: &DrainTarget, at_once: bool, now: Timestamp) -> Result<Applied, Refusal> {
        match target {
            DrainTarget::Instance(id) if !self.instances.contains_key(id) => return Err(Refusal::UnknownInstance),
            DrainTarget::Pool(pool)
                if !self.settings.pools.contains_key(pool)
                    && !self.instances.values().any(|instance| instance.pool == *pool) =>
            {
                return Err(Refusal::UnknownPool);
            }
            DrainTarget::All => self.paused = self.paused.or(Some(now)),
            DrainTarget::Instance(_) | DrainTarget::Pool(_) => {}
        }
        let concerned: Vec<InstanceId> = self
            .instances
            .values()
            .filter(|instance| instance.is_live())
            .filter(|instance| match target {
                DrainTarget::Instance(id) => instance.id == *id,
                DrainTarget::Pool(pool) => instance.pool == *pool,
                DrainTarget::All => true,
            })
            .map(|instance| instance.id)
            .collect();
        for &id in &concerned {
            let Some(instance) = self.instances.get(&id) else { continue };
            // A machine that boots holds nobody's job: it need not become ready first.
            let unready = matches!(instance.phase, Phase::Requested { .. } | Phase::Booting);
            let step = if unready { Step::Terminate(Cause::Drained) } else { Step::Drain(Cause::Drained) };
            self.step(id, &step, now);
            if at_once && let Some(instance) = self.instance_mut(id) {
                instance.held_until = None;
                for assignment in instance.assignments.values_mut().filter(|assignment| assignment.is_live()) {
                    assignment.cancel = true;
                }
            }
        }
        Ok(Applied::Instances(concerned))
    }

    /// Keeps a machine for debugging: it takes no new job, and nothing but a fault ends it before the hold is over.
    pub(super) fn hold(
        &mut self,
        id: InstanceId,
        duration: SignedDuration,
        now: Timestamp,
    ) -> Result<Applied, Refusal> {
        let instance = self.instances.get(&id).ok_or(Refusal::UnknownInstance)?;
        if matches!(instance.phase, Phase::Terminating { .. } | Phase::Gone { .. }) {
            return Err(Refusal::Leaving);
        }
        if duration.as_secs() > MAX_HOLD_SECONDS.cast_signed() {
            return Err(Refusal::HoldTooLong);
        }
        if let Some(instance) = self.instance_mut(id) {
            instance.held_until = Some(later(now, duration));
        }
        Ok(Applied::Instances(vec![id]))
    }

    pub(super) fn release(&mut self, id: InstanceId) -> Result<Applied, Refusal> {
        let instance = self.instances.get(&id).ok_or(Refusal::UnknownInstance)?;
        if instance.held_until.is_some()
            && let Some(instance) = self.instance_mut(id)
        {
            instance.held_until = None;
        }
        Ok(Applied::Instances(vec![id]))
    }

    /// Takes in a new config. It never kills: machines of a removed pool drain by the next plan, jobs of a removed
    /// label stay queued, and running jobs keep the values they were given.
    pub(super) fn reload(&mut self, settings: Settings) {
        self.reload_error = None;
        let old = std::mem::replace(&mut self.settings, settings);
        let (placements, labels) = (&self.settings.placements, &self.settings.labels);
        // What is changed is tried at once; and a stopped placement may have been mended outside the file.
        self.health.retain(|name, health| {
            matches!(health, Health::Cooling { .. }) && old.placements.get(name) == placements.get(name)
        });
        self.breakers.retain(|(name, _), _| old.placements.get(name) == placements.get(name));
        for job in self.jobs.values_mut().filter(|job| job.is_queued()) {
            if let Some(label) = labels.get(&job.label)
                && job.pool != label.pool
            {
                job.pool = label.pool.clone();
                self.dirty.jobs.insert(job.id);
            }
        }
    }
}
