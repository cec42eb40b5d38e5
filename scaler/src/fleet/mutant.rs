//! Faults planted in the planner, one line each, to see that the test of each invariant can fail (design 9).
//!
//! Without the feature `mutants`, which only tests have, [`planted`] is the constant `false`.

/// A fault, named by what the wrong planner does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// Hands out GPUs that a job holds.
    SharesGpus,
    /// Launches beyond a pool's `max_instances`.
    IgnoresPoolBound,
    /// Launches beyond a placement's `max_instances`.
    IgnoresPlacementBound,
    /// Launches while the provider's list is not known.
    TakesUnknownForEmpty,
    /// Ends a machine with a running job for idleness.
    IdleEndsJobs,
    /// Ends a machine with a running job when it is drained.
    DrainEndsJobs,
    /// Ends a machine with a running job when its pool is removed.
    ReloadEndsJobs,
    /// Ends a booting machine for which nobody waits any more.
    EndsBootWithoutDemand,
    /// Ends a machine that an admin holds.
    IgnoresHold,
    /// Does not write a drain down.
    ForgetsDrain,
    /// Never finds a machine idle.
    NeverIdle,
    /// Keeps no machine ready.
    IgnoresMinIdle,
    /// Lets small jobs fill every gap.
    StarvesLargeJobs,
    /// Gives machines to the youngest of equal jobs.
    YoungestFirst,
    /// Takes jobs in the order in which they happen to come in one breath.
    OrderOfArrival,
    /// Waits for ever for a machine to enrol.
    NeverGivesUpBoot,
    /// Takes an accepted destroy for a machine that is gone.
    TakesAcceptedForGone,
    /// Takes one list without a machine for its end.
    BelievesOneList,
    /// Believes a list about machines that changed after the call began.
    BelievesStaleList,
    /// Judges machines dead right after a restart or a stepped clock.
    IgnoresGrace,
    /// Says that a job is lost while its machine may still run it.
    LosesJobsEarly,
    /// Destroys a machine that nobody knows at first sight.
    ReapsAtFirstSight,
}

impl Mutant {
    /// All of them.
    pub const ALL: [Self; 22] = [
        Self::SharesGpus,
        Self::IgnoresPoolBound,
        Self::IgnoresPlacementBound,
        Self::TakesUnknownForEmpty,
        Self::IdleEndsJobs,
        Self::DrainEndsJobs,
        Self::ReloadEndsJobs,
        Self::EndsBootWithoutDemand,
        Self::IgnoresHold,
        Self::ForgetsDrain,
        Self::NeverIdle,
        Self::IgnoresMinIdle,
        Self::StarvesLargeJobs,
        Self::YoungestFirst,
        Self::OrderOfArrival,
        Self::NeverGivesUpBoot,
        Self::TakesAcceptedForGone,
        Self::BelievesOneList,
        Self::BelievesStaleList,
        Self::IgnoresGrace,
        Self::LosesJobsEarly,
        Self::ReapsAtFirstSight,
    ];
}

#[cfg(feature = "mutants")]
mod switch {
    use std::cell::Cell;

    use super::Mutant;

    thread_local! {
        static PLANTED: Cell<Option<Mutant>> = const { Cell::new(None) };
    }

    struct Root(Option<Mutant>);

    impl Drop for Root {
        fn drop(&mut self) {
            PLANTED.set(self.0);
        }
    }

    /// Does something with a fault planted in this thread's planner.
    pub fn with_mutant<T>(mutant: Mutant, work: impl FnOnce() -> T) -> T {
        let _root = Root(PLANTED.replace(Some(mutant)));
        work()
    }

    pub(in crate::fleet) fn planted(mutant: Mutant) -> bool {
        PLANTED.get() == Some(mutant)
    }
}

#[cfg(feature = "mutants")]
pub(super) use switch::planted;
#[cfg(feature = "mutants")]
pub use switch::with_mutant;

#[cfg(not(feature = "mutants"))]
pub(super) const fn planted(_: Mutant) -> bool {
    false
}
