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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Anchor {
    wall: Timestamp,
    mono: Instant,
    /// What the system's clocks said then; `None` when nothing is to be compared with them.
    system: Option<Reading>,
}

/// The system's wall clock and the boot clock at one moment. The second cannot be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reading {
    wall: Timestamp,
    boot: Duration,
}

/// A wall clock further off than this has been stepped.
pub const STEP: SignedDuration = SignedDuration::from_secs(60);

/// A step of the system's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// How far it went from where it was expected, ahead or back.
    pub by: SignedDuration,
    /// How far our time goes with it that never passed: what was noted before is so much younger than it will look.
    /// Zero for a step back, which is not followed, and for the sleep of a suspended machine, which is real time.
    pub skipped: SignedDuration,
    anchor: Anchor,
}

impl Clock {
    /// Anchors at the system's wall time, but never below `floor` (the last persisted time).
    #[must_use]
    pub fn system(floor: Timestamp) -> Self {
        let system = Reading::now();
        Self::with(system.wall.max(floor), Some(system))
    }

    /// Goes on from the time that an earlier process reached, `age` ago by the boot clock (`None` after a reboot), and
    /// says how the system's clock was stepped in between, as far as that can be told.
    #[must_use]
    pub fn resumed(reached: Timestamp, age: Option<Duration>) -> (Self, Option<Step>) {
        let system = Reading::now();
        let expected = reached.saturating_add(age.unwrap_or_default()).unwrap_or(Timestamp::MAX);
        let by = system.wall.duration_since(expected);
        let clock = Self::with(system.wall.max(expected), Some(system));
        // After a reboot nobody knows how much of a later time has passed, only that an earlier one is wrong.
        let skipped = age.map_or(SignedDuration::ZERO, |_| by).max(SignedDuration::ZERO);
        let stepped = by < -STEP || skipped > STEP;
        let step = stepped.then(|| Step { by, skipped, anchor: clock.anchor() });
        (clock, step)
    }

    /// Anchors at a given time and follows no step; for tests under paused time.
    #[must_use]
    pub fn anchored(wall: Timestamp) -> Self {
        Self::with(wall, None)
    }

    fn with(wall: Timestamp, system: Option<Reading>) -> Self {
        Self(Arc::new(Mutex::new(Anchor { wall, mono: Instant::now(), system })))
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

    /// Looks whether somebody stepped the system's clock by more than [`STEP`] since the anchor was set. Each step is
    /// one: where the system's clock stays behind the time already reached, it has been stepped once, not for ever.
    #[must_use]
    pub fn step(&self) -> Option<Step> {
        let (anchor, now, system) = (self.anchor(), self.now(), Reading::now());
        let before = anchor.system?;
        let moved = system.wall.duration_since(before.wall);
        let by = moved.saturating_sub(signed(anchor.mono.elapsed()));
        if by.abs() <= STEP {
            return None;
        }
        let wall = system.wall.max(now);
        let set = moved.saturating_sub(signed(system.boot.saturating_sub(before.boot)));
        let skipped = wall.duration_since(now).min(set).max(SignedDuration::ZERO);
        Some(Step { by, skipped, anchor: Anchor { wall, mono: Instant::now(), system: Some(system) } })
    }

    /// Goes with a step: forward with the system's clock, or on from the time already reached.
    pub fn follow(&self, step: &Step) {
        *self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = step.anchor;
    }

    /// How far this time is ahead of the system's clock, which it never follows back.
    #[must_use]
    pub fn lead(&self) -> SignedDuration {
        self.now().duration_since(system_time())
    }

    fn anchor(&self) -> Anchor {
        *self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Reading {
    fn now() -> Self {
        Self { wall: system_time(), boot: boottime() }
    }
}

fn signed(duration: Duration) -> SignedDuration {
    SignedDuration::try_from(duration).unwrap_or(SignedDuration::MAX)
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

    /// A clock whose system's clock was stepped by so much since.
    fn stepped(by: SignedDuration, slept: Duration) -> Clock {
        let Reading { wall, boot } = Reading::now();
        let before = Reading { wall: wall - by, boot: boot - slept };
        Clock::with(before.wall, Some(before))
    }

    const TWO_HOURS: SignedDuration = SignedDuration::from_hours(2);
    const NEARLY: SignedDuration = SignedDuration::from_secs(7190);

    #[tokio::test]
    async fn a_step_ahead_is_followed_and_all_of_it_was_skipped() {
        let clock = stepped(TWO_HOURS, Duration::ZERO);
        let step = clock.step().unwrap();
        assert!(step.by > NEARLY && step.skipped > NEARLY, "{step:?}");
        assert!(clock.lead() < -NEARLY, "not followed yet");
        clock.follow(&step);
        assert!(clock.lead().abs() < STEP);
        assert_eq!(clock.step(), None);
    }

    #[tokio::test]
    async fn a_step_back_is_one_step_and_not_followed() {
        let clock = stepped(-TWO_HOURS, Duration::ZERO);
        let reached = clock.now();
        let step = clock.step().unwrap();
        assert!(step.by < -NEARLY && step.skipped.is_zero(), "{step:?}");
        clock.follow(&step);
        assert!(clock.now() >= reached, "never back");
        assert!(clock.lead() > NEARLY);
        assert_eq!(clock.step(), None, "the system's clock stays behind, and that is no second step");
    }

    #[tokio::test]
    async fn the_sleep_of_a_suspended_machine_is_time_that_passed() {
        let clock = stepped(TWO_HOURS, Duration::from_secs(7200));
        let step = clock.step().unwrap();
        assert!(step.by > NEARLY && step.skipped < STEP, "{step:?}");
    }

    #[tokio::test]
    async fn a_step_between_two_processes_is_seen_as_far_as_it_can_be() {
        let minute = Duration::from_secs(60);
        let (clock, step) = Clock::resumed(system_time() - SignedDuration::from_mins(1), Some(minute));
        assert_eq!(step, None, "a minute later");
        assert!(clock.lead().abs() < STEP);

        let (_, step) = Clock::resumed(system_time() - TWO_HOURS, Some(Duration::ZERO));
        assert!(step.unwrap().skipped > NEARLY);
        let (_, step) = Clock::resumed(system_time() - TWO_HOURS, None);
        assert_eq!(step, None, "the machine may have been off for so long");

        for age in [None, Some(minute)] {
            let (clock, step) = Clock::resumed(system_time() + TWO_HOURS, age);
            let step = step.unwrap();
            assert!(step.by < -NEARLY && step.skipped.is_zero(), "{step:?}");
            assert!(clock.lead() > NEARLY, "never below the time reached");
            assert_eq!(clock.step(), None);
        }
    }

    #[test]
    fn never_below_the_floor() {
        let floor = system_time() + SignedDuration::from_hours(1);
        assert!(Clock::system(floor).now() >= floor);
    }
}
