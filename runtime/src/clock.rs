//! Time: wall time that follows tokio's clock, and the boot clock.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};

use jiff::{SignedDuration, Timestamp};
use tokio::time::Instant;

/// Wall time anchored to the monotonic clock (link 8): it never jumps by itself, and paused tokio time moves it.
#[derive(Clone, Debug)]
pub struct Clock(Arc<Mutex<Anchor>>);

#[derive(Clone, Copy, Debug)]
struct Anchor {
    wall: Timestamp,
    mono: Instant,
}

/// A wall clock further off than this has been stepped.
pub const STEP: SignedDuration = SignedDuration::from_secs(60);

impl Clock {
    /// Anchors at the system's wall time, but never below `floor` (the last persisted time).
    #[must_use]
    pub fn system(floor: Timestamp) -> Self {
        Self::anchored(system_time().max(floor))
    }

    /// Anchors at a given time; for tests under paused time.
    #[must_use]
    pub fn anchored(wall: Timestamp) -> Self {
        Self(Arc::new(Mutex::new(Anchor { wall, mono: Instant::now() })))
    }

    /// Now.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        let anchor = self.anchor();
        anchor.wall.saturating_add(anchor.mono.elapsed()).unwrap_or(Timestamp::MAX)
    }

    /// How long from now to `at`; zero when it has passed.
    #[must_use]
    pub fn until(&self, at: Timestamp) -> Duration {
        Duration::try_from(at.duration_since(self.now())).unwrap_or(Duration::ZERO)
    }

    /// Looks whether somebody stepped the system's clock by more than [`STEP`] and, if so, follows it forward.
    ///
    /// Returns the step. A step backwards is followed by standing on the time already reached.
    #[must_use]
    pub fn follow_step(&self) -> Option<SignedDuration> {
        let (now, system) = (self.now(), system_time());
        let step = system.duration_since(now);
        if step.abs() <= STEP {
            return None;
        }
        let mut anchor = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *anchor = Anchor { wall: system.max(now), mono: Instant::now() };
        Some(step)
    }

    fn anchor(&self) -> Anchor {
        *self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

fn system_time() -> Timestamp {
    #[expect(clippy::disallowed_methods, reason = "this is the one place that reads the system's clock")]
    let now = SystemTime::now();
    Timestamp::try_from(now).unwrap_or(Timestamp::UNIX_EPOCH)
}

/// Time since boot, suspend included (CLOCK_BOOTTIME): deadlines survive both a restart and a stepped wall clock.
#[must_use]
pub fn boottime() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// The kernel's id of this boot; [`boottime`] means nothing across two of them.
///
/// # Errors
/// When `/proc` cannot be read.
pub fn boot_id() -> std::io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn wall_time_follows_paused_time() {
        let clock = Clock::anchored(Timestamp::UNIX_EPOCH);
        tokio::time::sleep(Duration::from_secs(3600)).await;
        assert_eq!(clock.now().as_second(), 3600);
        assert_eq!(clock.until("1970-01-01T02:00:00Z".parse().unwrap()), Duration::from_secs(3600));
        assert_eq!(clock.until(Timestamp::UNIX_EPOCH), Duration::ZERO);
    }

    #[tokio::test]
    async fn a_step_is_followed_forward_and_never_back() {
        let now = system_time();
        let behind = Clock::anchored(now - SignedDuration::from_hours(2));
        assert!(behind.follow_step().unwrap() > SignedDuration::from_secs(7190));
        assert!(behind.now() >= now, "followed forward");

        let ahead_of_system = now + SignedDuration::from_hours(2);
        let ahead = Clock::anchored(ahead_of_system);
        assert!(ahead.follow_step().unwrap() < SignedDuration::from_secs(-7190));
        assert!(ahead.now() >= ahead_of_system, "never back");
    }

    #[test]
    fn never_below_the_floor() {
        let floor = system_time() + SignedDuration::from_hours(1);
        assert!(Clock::system(floor).now() >= floor);
    }
}
