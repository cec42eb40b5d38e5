//! What the provider says: creates, destroys, lists.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use pilotlight_wire::InstanceId;

use super::{Health, Orphan, World, later};
use crate::{
    fleet::{
        event::{Applied, CreateFailure, Refusal},
        instance::{Call, Phase, Step},
        mutant::{Mutant, planted},
        reason::Cause,
    },
    provider::Listed,
};

/// How many lists in a row must not show a machine before its absence counts (link 7).
const ABSENCES: u8 = 2;

/// How long a machine may be listed after its destroy was accepted before the call is made again.
const LINGER: SignedDuration = SignedDuration::from_mins(1);

/// Whether a list that shows a machine says that its destroy did nothing: it was accepted when the machine was not there
/// yet, as a create call that was given up may take effect at any time, or it was only said to be accepted.
fn in_vain(destroy: Call, began_at: Timestamp) -> bool {
    matches!(destroy, Call::Accepted { at } if later(at, LINGER) < began_at)
}

impl World {
    pub(super) fn created(&mut self, id: InstanceId, now: Timestamp) -> Result<Applied, Refusal> {
        let instance = self.instances.get(&id).cloned().ok_or(Refusal::UnknownInstance)?;
        self.has_capacity(&instance);
        self.step(id, &Step::Created, now);
        Ok(Applied::Done)
    }

    pub(super) fn create_failed(
        &mut self,
        id: InstanceId,
        class: CreateFailure,
        message: String,
        now: Timestamp,
    ) -> Result<Applied, Refusal> {
        let instance = self.instances.get(&id).ok_or(Refusal::UnknownInstance)?;
        let Phase::Requested { create } = instance.phase else {
            // It enrolled, or is being destroyed: what the create call says no longer matters (link 1).
            return Ok(Applied::Done);
        };
        let placement = instance.placement.name.clone();
        match class {
            CreateFailure::MayExist => {
                if let Some(instance) = self.instance_mut(id) {
                    instance.phase = Phase::Requested { create: create.failed(now) };
                }
                return Ok(Applied::Done);
            }
            CreateFailure::Capacity => self.cool_down(&placement, &message, now),
            CreateFailure::Invalid => {
                self.health.insert(placement, Health::Stopped { since: now, message: message.clone() });
            }
        }
        self.step(id, &Step::Terminate(Cause::CreateFailed { message }), now);
        Ok(Applied::Done)
    }

    pub(super) fn destroy_accepted(&mut self, id: InstanceId, now: Timestamp) -> Result<Applied, Refusal> {
        let instance = self.instance_mut(id).ok_or(Refusal::UnknownInstance)?;
        if let Phase::Terminating { destroy, absent, .. } = &mut instance.phase {
            *destroy = Call::Accepted { at: now };
            *absent = 0;
        }
        if planted(Mutant::TakesAcceptedForGone) {
            self.step(id, &Step::ProvedGone, now);
        }
        Ok(Applied::Done)
    }

    pub(super) fn destroy_failed(&mut self, id: InstanceId, message: &str, now: Timestamp) -> Result<Applied, Refusal> {
        self.destroy_errors.insert(id, message.to_owned());
        let instance = self.instance_mut(id).ok_or(Refusal::UnknownInstance)?;
        if let Phase::Terminating { destroy, .. } = &mut instance.phase {
            *destroy = destroy.failed(now);
        }
        Ok(Applied::Done)
    }

    /// Takes in a list. It says nothing about instances that changed after the call began.
    pub(super) fn list_read(&mut self, began_at: Timestamp, listed: &[Listed], now: Timestamp) {
        self.list.read_at = Some(began_at);
        self.list.failing = None;
        let listed: BTreeMap<InstanceId, &Listed> = listed.iter().map(|listed| (listed.instance, listed)).collect();
        let known: Vec<InstanceId> = self.instances.keys().copied().collect();
        for id in known {
            match listed.get(&id) {
                Some(listed) => self.listed(id, listed, began_at, now),
                None => self.not_listed(id, began_at, now),
            }
        }
        let unknown = listed.into_iter().filter(|(id, _)| !self.instances.contains_key(id));
        self.orphans = unknown
            .map(|(id, listed)| {
                let since = self.orphans.get(&id).map_or(now, |orphan| orphan.since);
                (id, Orphan { since, tags: listed.tags.clone() })
            })
            .collect();
    }

    fn listed(&mut self, id: InstanceId, listed: &Listed, began_at: Timestamp, now: Timestamp) {
        let Some(instance) = self.instances.get_mut(&id) else { return };
        if instance.changed_at >= began_at {
            return;
        }
        let seen = self.seen.entry(id).or_default();
        seen.absent = 0;
        seen.stopped = (!listed.alive).then(|| listed.note.clone().unwrap_or_default());
        match &mut instance.phase {
            Phase::Requested { .. } => self.step(id, &Step::Created, now),
            Phase::Gone { .. } => self.step(id, &Step::Terminate(Cause::Reappeared), now),
            Phase::Terminating { absent, destroy, .. } => {
                *absent = 0;
                if in_vain(*destroy, began_at) {
                    *destroy = destroy.failed(now);
                    self.dirty.instances.insert(id);
                }
            }
            Phase::Booting | Phase::Ready { .. } | Phase::Draining { .. } => {}
        }
    }

    fn not_listed(&mut self, id: InstanceId, began_at: Timestamp, now: Timestamp) {
        let grace = now < self.grace_until && !planted(Mutant::IgnoresGrace);
        let Some(instance) = self.instances.get_mut(&id) else { return };
        if instance.changed_at >= began_at && !planted(Mutant::BelievesStaleList) {
            return;
        }
        match &mut instance.phase {
            // The create call may be on its way; the boot deadline ends it.
            Phase::Requested { .. } | Phase::Gone { .. } => {}
            Phase::Booting | Phase::Ready { .. } | Phase::Draining { .. } => {
                let seen = self.seen.entry(id).or_default();
                // A machine whose agent is heard is not absent, whatever the list says.
                if grace || seen.heard_at.is_some_and(|heard| heard >= began_at) {
                    seen.absent = 0;
                    return;
                }
                seen.absent = seen.absent.saturating_add(1);
                if seen.absent >= ABSENCES || planted(Mutant::BelievesOneList) {
                    self.step(id, &Step::Terminate(Cause::Vanished), now);
                }
            }
            Phase::Terminating { destroy: Call::Accepted { at }, absent, .. } if *at < began_at => {
                *absent = absent.saturating_add(1);
                if *absent >= ABSENCES {
                    self.step(id, &Step::ProvedGone, now);
                    self.seen.remove(&id);
                    self.destroy_errors.remove(&id);
                    self.settle_gone(id, now);
                }
            }
            Phase::Terminating { .. } => {}
        }
    }

    /// What the provider said when destroying a machine last failed.
    #[must_use]
    pub fn destroy_error(&self, id: InstanceId) -> Option<&str> {
        self.destroy_errors.get(&id).map(String::as_str)
    }
}
