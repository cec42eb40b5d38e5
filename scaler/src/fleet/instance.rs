//! One machine: its phase, and what runs on it.
//!
//! ```text
//! Requested ──▶ Booting ──▶ Ready ──▶ Draining ──▶ Terminating ──▶ Gone
//!     │  └──────────────────▶┘ │                      ▲   ▲          │
//!     └──────────┬─────────────┴──────────────────────┘   └──────────┘
//!                └ boot timeout, unhealthy, silent …        listed again
//! ```
//!
//! From every phase time alone leads to `Gone`, given a provider that answers again.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use pilotlight_wire::{AssignmentId, GpuId, InstanceId, JobId, PoolName, agent::Inventory};
use serde::{Deserialize, Serialize};

use super::{
    Placement,
    mutant::{Mutant, planted},
    reason::Cause,
};

/// What the agent's own bound is followed by: the scaler ends what outlives it (design 4).
pub const OVERTIME: SignedDuration = SignedDuration::from_mins(10);

/// One machine: one create call with one set of arguments (link 1).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Instance {
    /// Its id, the idempotency key of its create call.
    pub id: InstanceId,
    /// Its pool.
    pub pool: PoolName,
    /// The placement as it was when the machine was asked for: removed from the config, it still lists and destroys.
    pub placement: Placement,
    /// The GPUs it has, by UUID; known at launch with the local provider, at enrolment elsewhere.
    pub gpu_ids: Vec<GpuId>,
    /// Jobs without GPUs at once.
    pub cpu_jobs: u32,
    /// Where it stands.
    pub phase: Phase,
    /// When it was asked for.
    pub created_at: Timestamp,
    /// When the phase last changed.
    pub changed_at: Timestamp,
    /// When it should have enrolled.
    pub boot_deadline: Timestamp,
    /// No new job from then on.
    pub lifetime_end: Timestamp,
    /// An admin keeps it for debugging until then: no new job, and nothing but a fault ends it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_until: Option<Timestamp>,
    /// Whether it takes one assignment ever.
    pub single_use: bool,
    /// How many assignments it was given in all.
    pub assigned_total: u32,
    /// What its agent said when it enrolled.
    pub enrolment: Option<Enrolment>,
    /// What runs on it, and what has ended but is not settled: its log is open or its agent still has its file.
    pub assignments: BTreeMap<AssignmentId, Assignment>,
}

/// What an agent said when it enrolled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Enrolment {
    /// The first nonce wins (link 1).
    pub nonce: String,
    /// When.
    pub at: Timestamp,
    /// When the agent's process began.
    pub agent_started_at: Timestamp,
    /// The agent's version.
    pub agent_version: String,
    /// What the machine has.
    pub inventory: Inventory,
}

/// Where a machine stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Recorded; the provider may not know of it yet.
    Requested {
        /// How the create call stands.
        create: Call,
    },
    /// The provider has it; its agent has not enrolled.
    Booting,
    /// Its agent enrolled.
    Ready {
        /// Since when it has had nothing to do; kept while it works.
        idle_since: Timestamp,
    },
    /// No new work.
    Draining {
        /// Why.
        cause: Cause,
    },
    /// To be destroyed, until the provider's list no longer shows it.
    Terminating {
        /// Why.
        cause: Cause,
        /// How the destroy call stands.
        destroy: Call,
        /// List calls in a row, begun after the destroy was accepted, that did not show it.
        absent: u8,
    },
    /// Proved gone.
    Gone {
        /// Why.
        cause: Cause,
    },
}

/// How a call to a provider stands. Calls are idempotent by instance id, so that one cut off by a crash is repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Call {
    /// To be made, not before a time.
    Due {
        /// When.
        at: Timestamp,
        /// How many have failed.
        failures: u32,
    },
    /// Made; the reply is outstanding.
    Sent {
        /// How many have failed before.
        failures: u32,
    },
    /// Accepted by the provider.
    Accepted {
        /// When.
        at: Timestamp,
    },
}

impl Call {
    /// A call to be made at once.
    #[must_use]
    pub fn due(at: Timestamp) -> Self {
        Self::Due { at, failures: 0 }
    }

    /// The same call after a failure: 1 s, doubling to a minute.
    #[must_use]
    pub fn failed(self, now: Timestamp) -> Self {
        let failures = match self {
            Self::Due { failures, .. } | Self::Sent { failures } => failures.saturating_add(1),
            Self::Accepted { .. } => 1,
        };
        let wait = SignedDuration::from_secs((1_i64 << (failures - 1).min(6)).min(60));
        Self::Due { at: now.saturating_add(wait).unwrap_or(Timestamp::MAX), failures }
    }

    /// How many times it has failed in a row.
    #[must_use]
    pub fn failures(self) -> u32 {
        match self {
            Self::Due { failures, .. } | Self::Sent { failures } => failures,
            Self::Accepted { .. } => 0,
        }
    }
}

/// What can happen to a phase.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The provider has the machine.
    Created,
    /// The agent enrolled.
    Enrolled,
    /// No new work.
    Drain(Cause),
    /// Destroy it.
    Terminate(Cause),
    /// It is gone for good.
    ProvedGone,
}

impl Phase {
    /// The phase after a step. Total: a step that does not apply leaves the phase as it is, because late replies and
    /// repeated calls are normal (a create error that arrives after enrolment is ignored: the machine is there).
    #[must_use]
    pub fn transition(&self, step: &Step, now: Timestamp) -> Self {
        match (self, step) {
            (Self::Requested { .. }, Step::Created) => Self::Booting,
            (Self::Requested { .. } | Self::Booting, Step::Enrolled) => Self::Ready { idle_since: now },
            (Self::Ready { .. }, Step::Drain(cause)) => Self::Draining { cause: cause.clone() },
            (Self::Terminating { .. }, Step::Terminate(_)) => self.clone(),
            // A machine that was proved gone and is listed again: a late create, or a provider that lied.
            (_, Step::Terminate(cause)) => {
                Self::Terminating { cause: cause.clone(), destroy: Call::due(now), absent: 0 }
            }
            (Self::Terminating { cause, .. }, Step::ProvedGone) => Self::Gone { cause: cause.clone() },
            (
                Self::Booting
                | Self::Ready { .. }
                | Self::Draining { .. }
                | Self::Terminating { .. }
                | Self::Gone { .. },
                Step::Created,
            )
            | (
                Self::Ready { .. } | Self::Draining { .. } | Self::Terminating { .. } | Self::Gone { .. },
                Step::Enrolled,
            )
            | (
                Self::Requested { .. }
                | Self::Booting
                | Self::Draining { .. }
                | Self::Terminating { .. }
                | Self::Gone { .. },
                Step::Drain(_),
            )
            | (
                Self::Requested { .. } | Self::Booting | Self::Ready { .. } | Self::Draining { .. } | Self::Gone { .. },
                Step::ProvedGone,
            ) => self.clone(),
        }
    }

    /// The word used in JSON and tables.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::Requested { .. } => "requested",
            Self::Booting => "booting",
            Self::Ready { .. } => "ready",
            Self::Draining { .. } => "draining",
            Self::Terminating { .. } => "terminating",
            Self::Gone { .. } => "gone",
        }
    }
}

/// One job's claim on some GPUs of one machine. It carries copies of its label's values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Assignment {
    /// The job.
    pub job: JobId,
    /// Its GPUs; empty for a job without.
    pub gpu_ids: Vec<GpuId>,
    /// When it was given.
    pub assigned_at: Timestamp,
    /// When the agent ends it.
    pub deadline: Timestamp,
    /// Whether it is to be ended from above.
    pub cancel: bool,
    /// Whether it is a runner that is to leave unless it has taken a job.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub withdrawn: bool,
    /// The number of the last event applied.
    pub last_event: u64,
    /// Whether it was taken over from what its agent lists, after a lost database: the agent alone knows which of its
    /// events were acknowledged, so the first one that comes is taken whatever its number.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub adopted: bool,
    /// How far it is.
    pub state: AssignmentState,
}

/// How far an assignment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AssignmentState {
    /// Given; not known to have started.
    Assigned,
    /// The container was started.
    Running,
    /// Over. The agent's file and the log may be outstanding.
    Ended {
        /// When.
        at: Timestamp,
        /// Whether the log is closed.
        log_closed: bool,
    },
}

impl Assignment {
    /// Whether it still holds its GPUs.
    #[must_use]
    pub fn is_live(&self) -> bool {
        !matches!(self.state, AssignmentState::Ended { .. })
    }

    /// Whether it has ended and some of its log is still on the machine only.
    #[must_use]
    pub fn has_open_log(&self) -> bool {
        matches!(self.state, AssignmentState::Ended { log_closed: false, .. })
    }
}

impl Instance {
    /// Its assignments that hold GPUs.
    pub fn live_assignments(&self) -> impl Iterator<Item = (&AssignmentId, &Assignment)> {
        self.assignments.iter().filter(|(_, assignment)| assignment.is_live())
    }

    /// Whether it holds nobody's job.
    #[must_use]
    pub fn is_vacant(&self) -> bool {
        self.live_assignments().next().is_none()
    }

    /// Whether it counts against the bounds: everything that may still cost money.
    #[must_use]
    pub fn is_live(&self) -> bool {
        !matches!(self.phase, Phase::Gone { .. })
    }

    /// GPUs in all.
    #[must_use]
    pub fn gpus(&self) -> u32 {
        self.placement.gpus
    }

    /// Its GPUs that no job holds, in their order.
    pub fn free_gpu_ids(&self) -> impl Iterator<Item = &GpuId> {
        self.gpu_ids.iter().filter(|gpu| {
            !self.live_assignments().any(|(_, assignment)| assignment.gpu_ids.contains(gpu))
                || planted(Mutant::SharesGpus)
        })
    }

    /// How many jobs without GPUs it has room for.
    #[must_use]
    pub fn free_cpu_jobs(&self) -> u32 {
        let taken = self.live_assignments().filter(|(_, assignment)| assignment.gpu_ids.is_empty()).count();
        self.cpu_jobs.saturating_sub(u32::try_from(taken).unwrap_or(u32::MAX))
    }

    /// Its hard end: max(created + max_lifetime, latest deadline, end of the hold) + 10 min (design 4).
    #[must_use]
    pub fn expires_at(&self) -> Timestamp {
        // A job that is over counts until its log is closed: past max_lifetime its machine would else end with it.
        let holding = self.assignments.values().filter(|assignment| assignment.is_live() || assignment.has_open_log());
        let deadlines = holding.map(|assignment| assignment.deadline);
        let end = deadlines.chain(self.held_until).fold(self.lifetime_end, Timestamp::max);
        end.saturating_add(OVERTIME).unwrap_or(Timestamp::MAX)
    }

    /// Whether an admin keeps it for debugging.
    #[must_use]
    pub fn is_held(&self, now: Timestamp) -> bool {
        self.held_until.is_some_and(|until| now < until)
    }

    /// When its agent enrolled.
    #[must_use]
    pub fn ready_at(&self) -> Option<Timestamp> {
        self.enrolment.as_ref().map(|enrolment| enrolment.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The whole table: what does not apply leaves the phase as it is.
    #[test]
    fn transitions() {
        let now = Timestamp::from_second(1_767_225_600).unwrap();
        let phases = [
            Phase::Requested { create: Call::Sent { failures: 0 } },
            Phase::Booting,
            Phase::Ready { idle_since: now },
            Phase::Draining { cause: Cause::Drained },
            Phase::Terminating { cause: Cause::Idle, destroy: Call::due(now), absent: 0 },
            Phase::Gone { cause: Cause::Idle },
        ];
        let steps = [
            Step::Created,
            Step::Enrolled,
            Step::Drain(Cause::Lifetime),
            Step::Terminate(Cause::Lost),
            Step::ProvedGone,
        ];
        let mut table = String::new();
        for phase in &phases {
            let row: Vec<&str> = steps.iter().map(|step| phase.transition(step, now).word()).collect();
            table += &format!("{:<11} -> {}\n", phase.word(), row.join(" "));
        }
        insta::assert_snapshot!(table, @r"
        requested   -> booting ready requested terminating requested
        booting     -> booting ready booting terminating booting
        ready       -> ready ready draining terminating ready
        draining    -> draining draining draining terminating draining
        terminating -> terminating terminating terminating terminating gone
        gone        -> gone gone gone terminating gone
        ");
        let kept = phases[4].transition(&Step::Terminate(Cause::Lost), now);
        assert_eq!(kept, phases[4], "the first cause stays");
    }

    #[test]
    fn a_failing_call_is_made_again_ever_more_slowly_up_to_a_minute() {
        let now = Timestamp::UNIX_EPOCH;
        let mut call = Call::Sent { failures: 0 };
        let mut waits = Vec::new();
        for _ in 0..9 {
            call = call.failed(now);
            let Call::Due { at, .. } = call else { panic!("{call:?}") };
            waits.push(at.as_second());
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
    }
}
