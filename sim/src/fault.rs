//! What can go wrong, and how often it did.

use std::fmt;

/// Defines the kinds of fault and the list of all of them.
macro_rules! faults {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// A kind of fault.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Fault {
            $($(#[$doc])* $name,)*
        }

        impl Fault {
            /// All kinds.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// What it is called in traces and tallies.
            #[must_use]
            pub fn text(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }
        }
    };
}

faults! {
    /// The provider has no machine.
    NoCapacity = "create refused for capacity",
    /// The provider says that the arguments can never work.
    CreateInvalid = "create refused as invalid",
    /// The machine was made, and the reply never came.
    CreateReplyLost = "reply to create lost",
    /// The create was reported failed, and the machine appears half a minute later.
    AppearsLate = "create reported failed, machine appears later",
    /// A provider call takes effect after the scaler that made it was killed.
    OutlivesScaler = "provider call outlived the scaler",
    /// The destroy fails.
    DestroyFails = "destroy failed",
    /// The destroy is accepted and nothing is done.
    DestroyIgnored = "destroy accepted and ignored",
    /// The list cannot be read.
    ListFails = "list failed",
    /// The list is up to a minute old.
    ListStale = "stale list",
    /// Somebody deletes a machine by hand.
    DeletedByHand = "machine deleted by hand",
    /// The machine takes many times as long to boot.
    SlowBoot = "slow boot",
    /// The machine never comes up.
    BootHangs = "boot hung",
    /// The agent finds its machine unfit.
    Unhealthy = "machine unhealthy",
    /// The machine stops for good.
    MachineDies = "machine died",
    /// The agent enrols again.
    EnrolledAgain = "enrolment repeated",
    /// Somebody else enrols as the machine.
    Intruder = "somebody else enrolled",
    /// The agent is killed.
    AgentKilled = "agent killed",
    /// The agent is killed between two of its effects.
    AgentKilledBetween = "agent killed between effects",
    /// What a machine sends does not arrive.
    RequestsCut = "network cut, requests",
    /// What a machine is answered does not arrive.
    AnswersCut = "network cut, answers",
    /// One request is lost.
    RequestLost = "request lost",
    /// One answer is lost.
    AnswerLost = "answer lost",
    /// A held sync is not woken.
    WakeUpLost = "wake-up lost",
    /// The machine's wall clock is wrong.
    WrongClock = "machine's clock wrong",
    /// The machine refuses a job before it starts.
    Refused = "start refused",
    /// A container is removed by somebody.
    ContainerRemoved = "container removed by hand",
    /// The scaler is killed before it commits.
    KilledBeforeCommit = "scaler killed before a commit",
    /// The scaler is killed after it has committed, before it does what it has written down.
    KilledAfterCommit = "scaler killed between commit and effect",
    /// The scaler is stopped for long.
    LongStop = "scaler away for long",
    /// The scaler's database is lost.
    DatabaseLost = "database lost",
    /// The scaler's clock is set ahead.
    ClockAhead = "clock set ahead",
    /// The scaler's clock is set back.
    ClockBack = "clock set back",
    /// A client cancels a job.
    Cancelled = "job cancelled",
    /// A client submits a job again.
    SubmittedAgain = "job submitted again",
    /// An admin drains machines.
    Drained = "drain",
    /// An admin drains machines and cancels their jobs.
    DrainedNow = "drain, now",
    /// An admin holds a machine.
    Held = "hold",
    /// An admin changes or removes pools.
    Reloaded = "reload",
    /// An admin reaps what nobody knows.
    Reaped = "reap",
}

/// How often each kind of fault struck.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tally(Vec<u64>);

impl Default for Tally {
    fn default() -> Self {
        Self(vec![0; Fault::ALL.len()])
    }
}

impl Tally {
    /// Counts one.
    pub fn count(&mut self, fault: Fault) {
        if let Some(n) = self.0.get_mut(fault as usize) {
            *n += 1;
        }
    }

    /// Adds another run's.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine += theirs;
        }
    }

    /// The kinds that never struck.
    #[must_use]
    pub fn missing(&self) -> Vec<Fault> {
        Fault::ALL.iter().copied().filter(|fault| self.0.get(*fault as usize) == Some(&0)).collect()
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for fault in Fault::ALL {
            writeln!(f, "{:>10}  {}", self.0.get(*fault as usize).copied().unwrap_or(0), fault.text())?;
        }
        Ok(())
    }
}
