//! Ids minted inside the plan from a seeded generator, so that a plan can be replayed.

use jiff::Timestamp;
use pilotlight_wire::Id;
use rand::{Rng, SeedableRng, rngs::SmallRng};
use uuid::Builder;

/// Twelve bits stand between the time and the random part of a UUID of version 7.
const MAX_COUNT: u16 = 0x0fff;

/// Mints ids; a copy of it mints the same ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct IdGen {
    random: SmallRng,
    millis: u64,
    count: u16,
}

impl IdGen {
    pub(super) fn seeded(seed: u64) -> Self {
        Self { random: SmallRng::seed_from_u64(seed), millis: 0, count: 0 }
    }

    /// Mints only what sorts behind an id that an earlier generator minted.
    pub(super) fn begin_behind<K>(&mut self, last: Id<K>) {
        // The first 48 bits are the time.
        let millis = u64::try_from(last.uuid().as_u128() >> 80).unwrap_or(0);
        if millis >= self.millis {
            (self.millis, self.count) = (millis, MAX_COUNT);
        }
    }

    /// A UUID of version 7. Ids sort in the order in which they are minted, within a millisecond too: packing fills
    /// machines in the order of their launch.
    pub(super) fn mint<K>(&mut self, now: Timestamp) -> Id<K> {
        let millis = u64::try_from(now.as_millisecond()).unwrap_or(0);
        if millis > self.millis {
            (self.millis, self.count) = (millis, 0);
        } else if self.count == MAX_COUNT {
            (self.millis, self.count) = (self.millis + 1, 0);
        } else {
            self.count += 1;
        }
        let mut random = [0; 10];
        self.random.fill_bytes(&mut random);
        random[..2].copy_from_slice(&self.count.to_be_bytes());
        Id::from_uuid(Builder::from_unix_timestamp_millis(self.millis, &random).into_uuid())
    }
}

#[cfg(test)]
mod tests {
    use pilotlight_wire::InstanceId;

    use super::*;

    #[test]
    fn ids_sort_as_minted_and_replay() {
        let now = Timestamp::from_second(1_767_225_600).unwrap();
        let mut ids = IdGen::seeded(7);
        let mut copy = ids.clone();
        let minted: Vec<InstanceId> = (0..10_000).map(|_| ids.mint(now)).collect();
        assert!(minted.is_sorted());
        assert!(minted.iter().all(|id| *id == copy.mint(now)), "a copy mints the same");
        let mut next = IdGen::seeded(8);
        next.begin_behind(minted[9_999]);
        assert!(next.mint(now) > minted[9_999], "so do those of the next scaler");
        let earlier: InstanceId = ids.mint(Timestamp::UNIX_EPOCH);
        assert!(earlier > minted[9_999], "time that stands still or goes back does not matter");
    }
}
