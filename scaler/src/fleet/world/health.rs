//! How placements do: what their provider refuses, and whether what it makes comes up.

use jiff::{SignedDuration, Timestamp};
use pilotlight_wire::PlacementName;

use super::{World, later};
use crate::fleet::{Instance, Placement};

/// How a placement does, by its provider's answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// It failed a moment ago and is tried again.
    Cooling {
        /// When it last failed.
        since: Timestamp,
        /// When it is tried again.
        until: Timestamp,
        /// How often in a row: the wait doubles.
        failures: u32,
        /// What the provider said.
        message: String,
    },
    /// It cannot work as configured.
    Stopped {
        /// Since when.
        since: Timestamp,
        /// What the provider said.
        message: String,
    },
}

/// Machines of a placement that were made and never enrolled, or enrolled broken. After the first, one machine at a
/// time is tried, ever more slowly, until one comes up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Breaker {
    /// When the last one was given up.
    pub since: Timestamp,
    /// When the next may be tried.
    pub until: Timestamp,
    /// How many in a row.
    pub failures: u32,
    /// What was wrong with the last one.
    pub message: String,
}

/// What boots are counted by: the placement, and what its machines boot from.
pub(in crate::fleet) type BootKey = (PlacementName, Option<String>);

/// So many boots that fail in a row are worth a look.
pub(in crate::fleet) const BOOTS_ALERT: u32 = 3;

impl Placement {
    pub(in crate::fleet) fn boot_key(&self) -> BootKey {
        (self.name.clone(), self.provider.image())
    }
}

/// The wait after so many failures in a row: 3 min, doubling to 30 (design 4).
fn pause(failures: u32) -> SignedDuration {
    SignedDuration::from_mins((3_i64 << failures.saturating_sub(1).min(4)).min(30))
}

impl World {
    /// How a placement's provider does; absent is well.
    #[must_use]
    pub fn health(&self, placement: &PlacementName) -> Option<&Health> {
        self.health.get(placement)
    }

    /// What came of a placement's last boots; absent is well.
    #[must_use]
    pub fn breaker(&self, placement: &Placement) -> Option<&Breaker> {
        self.breakers.get(&placement.boot_key())
    }

    /// Notes that a provider had no machine to give.
    pub(super) fn cool_down(&mut self, placement: &PlacementName, message: &str, now: Timestamp) {
        let failures = match self.health.get(placement) {
            Some(Health::Stopped { .. }) => return,
            // Several calls that fail in one breath are one failure.
            Some(Health::Cooling { failures, until, .. }) if now < *until => *failures,
            Some(Health::Cooling { failures, .. }) => failures.saturating_add(1),
            None => 1,
        };
        let until = later(now, pause(failures));
        let health = Health::Cooling { since: now, until, failures, message: message.to_owned() };
        self.health.insert(placement.clone(), health);
    }

    /// A create call that was begun after the last failure worked.
    pub(super) fn has_capacity(&mut self, instance: &Instance) {
        let name = &instance.placement.name;
        if let Some(Health::Cooling { since, .. }) = self.health.get(name)
            && instance.created_at >= *since
        {
            self.health.remove(name);
        }
    }

    /// Notes that a machine did not come up.
    pub(in crate::fleet) fn trip(&mut self, instance: &Instance, message: &str, now: Timestamp) {
        let breaker = self.tripped(instance, message, now);
        self.breakers.insert(instance.placement.boot_key(), breaker);
    }

    /// The breaker after one more machine that did not come up.
    pub(in crate::fleet) fn tripped(&self, instance: &Instance, message: &str, now: Timestamp) -> Breaker {
        match self.breakers.get(&instance.placement.boot_key()) {
            // It was asked for before the last failure was known: one fault, however many machines it hits.
            Some(last) if instance.created_at <= last.since => last.clone(),
            last => {
                let failures = last.map_or(0, |last| last.failures).saturating_add(1);
                Breaker { since: now, until: later(now, pause(failures)), failures, message: message.to_owned() }
            }
        }
    }

    /// A machine came up.
    pub(super) fn came_up(&mut self, placement: &Placement) {
        self.breakers.remove(&placement.boot_key());
    }
}
