//! Ids minted inside the plan from a seeded generator, so that a plan can be replayed.

use jiff::Timestamp;
use pilotlight_wire::Id;
use rand::{Rng, SeedableRng, rngs::SmallRng};
use uuid::Builder;

/// Mints ids; a copy of it mints the same ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct IdGen {
    random: SmallRng,
    minted: u16,
}

impl IdGen {
    pub(super) fn seeded(seed: u64) -> Self {
        Self { random: SmallRng::seed_from_u64(seed), minted: 0 }
    }

    /// Begins a new plan: ids of one plan sort in the order in which they are minted.
    pub(super) fn begin(&mut self) {
        self.minted = 0;
    }

    /// A UUID of version 7: it sorts by time, then by its place in the plan.
    pub(super) fn mint<K>(&mut self, now: Timestamp) -> Id<K> {
        let millis = u64::try_from(now.as_millisecond()).unwrap_or(0);
        let mut random = [0; 10];
        self.random.fill_bytes(&mut random);
        // Twelve bits stand between the time and the random part.
        random[..2].copy_from_slice(&self.minted.to_be_bytes());
        self.minted = (self.minted + 1).min(0x0fff);
        Id::from_uuid(Builder::from_unix_timestamp_millis(millis, &random).into_uuid())
    }
}

#[cfg(test)]
mod tests {
    use pilotlight_wire::InstanceId;

    use super::*;

    #[test]
    fn ids_of_one_plan_sort_as_minted_and_replay() {
        let mut ids = IdGen::seeded(7);
        let mut copy = ids.clone();
        let minted: Vec<InstanceId> = (0..3000).map(|_| ids.mint(Timestamp::UNIX_EPOCH)).collect();
        assert!(minted.is_sorted());
        assert!(minted.iter().all(|id| *id == copy.mint(Timestamp::UNIX_EPOCH)));
        ids.begin();
        assert!(!minted.contains(&ids.mint(Timestamp::UNIX_EPOCH)), "the random part goes on");
    }
}
