//! Why. One closed set of words feeds the log line, the metric label and `pilotlight plan`.

use std::fmt;

use jiff::Timestamp;
use pilotlight_wire::{InstanceId, PlacementName};
use serde::{Deserialize, Serialize};

/// Why a machine goes away.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "why")]
pub enum Cause {
    /// Ready and without work past the pool's `idle_timeout`.
    Idle,
    /// An admin drained it.
    Drained,
    /// Its pool's `max_lifetime` was reached.
    Lifetime,
    /// `reuse = false`, and it had its job.
    SingleUse,
    /// Its pool is no longer in the config.
    PoolRemoved,
    /// Its agent did not enrol in time.
    BootTimeout,
    /// The provider refused to make it.
    CreateFailed {
        /// What the provider said.
        message: String,
    },
    /// Its agent found something wrong with it.
    Unhealthy {
        /// The problems.
        message: String,
    },
    /// Its agent was silent past the lease, with no job.
    Silent,
    /// Its agent was silent with a job, past `lost_after` or the job's deadline.
    Lost,
    /// A job ran past its deadline and the agent did not end it.
    Overdue,
    /// Its hard end was reached.
    HardEnd,
    /// The provider's list no longer shows it, and its agent is silent.
    Vanished,
    /// It stopped by itself.
    Stopped {
        /// What it left behind, such as `lapsed`.
        note: String,
    },
    /// It was listed again after it had been proved gone.
    Reappeared,
    /// It carried our mark, nobody knew it, and its agent was silent for as long as a boot may take.
    Orphaned,
    /// It carried our mark and nobody knew it; an admin had it reaped.
    Reaped,
}

impl Cause {
    /// The metric label.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Drained => "drained",
            Self::Lifetime => "lifetime",
            Self::SingleUse => "single_use",
            Self::PoolRemoved => "pool_removed",
            Self::BootTimeout => "boot_timeout",
            Self::CreateFailed { .. } => "create_failed",
            Self::Unhealthy { .. } => "unhealthy",
            Self::Silent => "silent",
            Self::Lost => "lost",
            Self::Overdue => "overdue",
            Self::HardEnd => "hard_end",
            Self::Vanished => "vanished",
            Self::Stopped { .. } => "stopped",
            Self::Reappeared => "reappeared",
            Self::Orphaned => "orphaned",
            Self::Reaped => "reaped",
        }
    }

    /// Whether it says that the placement does not bring machines up.
    #[must_use]
    pub(crate) fn is_failed_boot(&self) -> bool {
        matches!(self, Self::BootTimeout | Self::Unhealthy { .. })
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Idle => f.write_str("idle past the pool's idle_timeout"),
            Self::Drained => f.write_str("drained by an admin"),
            Self::Lifetime => f.write_str("reached the pool's max_lifetime"),
            Self::SingleUse => f.write_str("had its one job (reuse = false)"),
            Self::PoolRemoved => f.write_str("its pool is no longer in the config"),
            Self::BootTimeout => f.write_str("its agent did not enrol within boot_timeout"),
            Self::CreateFailed { message } => write!(f, "the provider refused to make it: {message}"),
            Self::Unhealthy { message } => write!(f, "unhealthy: {message}"),
            Self::Silent => f.write_str("its agent was silent past the lease"),
            Self::Lost => f.write_str("its agent was silent too long with a job"),
            Self::Overdue => f.write_str("a job outlived its deadline"),
            Self::HardEnd => f.write_str("reached its hard end"),
            Self::Vanished => f.write_str("no longer in the provider's list"),
            Self::Stopped { note } => write!(f, "stopped by itself: {note}"),
            Self::Reappeared => f.write_str("listed again after it was gone"),
            Self::Orphaned => f.write_str("not known to us, and its agent was silent for as long as a boot may take"),
            Self::Reaped => f.write_str("not known to us, reaped by an admin"),
        }
    }
}

/// Why a machine is launched or a job placed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Jobs wait and no machine has room.
    Demand,
    /// Fewer machines than the pool's `min_idle` are without work.
    MinIdle,
    /// The create call was cut off or its outcome is unclear.
    RepeatCreate,
    /// GPUs (or room for a CPU job) are free.
    Fits,
    /// Registering a runner failed, or its outcome is unclear.
    RepeatGrant,
    /// No job waits that the runner could take.
    NotNeeded,
    /// An admin keeps the machine for debugging.
    Held,
    /// The runner is over.
    RunnerOver,
    /// A machine goes away.
    Cause(Cause),
    /// The destroy call failed or was cut off.
    RepeatDestroy {
        /// How many have failed.
        failures: u32,
    },
    /// The job is over and no more of its log can come.
    LogOver {
        /// Whether some of it may be missing.
        incomplete: bool,
    },
    /// A tombstone is old.
    Old,
}

impl Reason {
    /// The metric label.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::Demand => "demand",
            Self::MinIdle => "min_idle",
            Self::RepeatCreate => "repeat_create",
            Self::Fits => "fits",
            Self::RepeatGrant => "repeat_grant",
            Self::NotNeeded => "not_needed",
            Self::Held => "held",
            Self::RunnerOver => "runner_over",
            Self::Cause(cause) => cause.word(),
            Self::RepeatDestroy { .. } => "repeat_destroy",
            Self::LogOver { .. } => "log_over",
            Self::Old => "old",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Demand => f.write_str("jobs wait and no machine has room"),
            Self::MinIdle => f.write_str("the pool keeps min_idle machines ready"),
            Self::RepeatCreate => f.write_str("the create call is repeated, its outcome is not known"),
            Self::Fits => f.write_str("it has room"),
            Self::RepeatGrant => f.write_str("registering it failed or its outcome is not known"),
            Self::NotNeeded => f.write_str("no job waits for it"),
            Self::Held => f.write_str("its machine is held"),
            Self::RunnerOver => f.write_str("the runner is over"),
            Self::Cause(cause) => cause.fmt(f),
            Self::RepeatDestroy { failures } => write!(f, "destroy is repeated, {failures} failed"),
            Self::LogOver { incomplete: false } => f.write_str("the job is over"),
            Self::LogOver { incomplete: true } => f.write_str("the machine is gone, some of the log may be missing"),
            Self::Old => f.write_str("gone for thirty days"),
        }
    }
}

/// What a queued job waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// A machine that boots has room for it.
    Boot(InstanceId),
    /// A machine that has room was not heard since the scaler's start.
    Unheard(InstanceId),
    /// A machine is being launched for it in this very plan.
    Launch(InstanceId),
    /// The pool is at `max_instances`.
    PoolFull {
        /// The bound.
        max: u32,
        /// Machines that count and are on their way out.
        leaving: u32,
    },
    /// Every placement that could hold it is at its own bound, or its GPUs are taken.
    PlacementFull(PlacementName),
    /// The placement failed a moment ago.
    Cooling {
        /// Which.
        placement: PlacementName,
        /// Until when.
        until: Timestamp,
        /// What the provider said.
        message: String,
    },
    /// Machines of the placement did not come up; one at a time is tried until one does.
    Probing {
        /// Which.
        placement: PlacementName,
        /// What was wrong with the last one.
        message: String,
    },
    /// The placement cannot work as configured.
    PlacementStopped {
        /// Which.
        placement: PlacementName,
        /// What the provider said.
        message: String,
    },
    /// The provider could not be read since the scaler's start, or for a while.
    ProviderUnknown(PlacementName),
    /// `drain --all` stopped all launching.
    Paused,
    /// Its label or pool is no longer in the config.
    LabelRemoved,
    /// Its GPUs are free but kept for a larger job that has waited too long.
    BehindLargeJob,
    /// A machine refused it a moment ago.
    Refused {
        /// When it is tried again.
        until: Timestamp,
        /// Why.
        reason: String,
    },
    /// No placement of its pool could ever hold it.
    TooLarge,
}

impl Waiting {
    /// A stable word for programs.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::Boot(_) => "booting",
            Self::Unheard(_) => "unheard",
            Self::Launch(_) => "launching",
            Self::PoolFull { .. } => "pool_full",
            Self::PlacementFull(_) => "placement_full",
            Self::Cooling { .. } => "placement_cooling",
            Self::Probing { .. } => "placement_probing",
            Self::PlacementStopped { .. } => "placement_stopped",
            Self::ProviderUnknown(_) => "provider_unknown",
            Self::Paused => "paused",
            Self::LabelRemoved => "label_removed",
            Self::BehindLargeJob => "behind_large_job",
            Self::Refused { .. } => "refused",
            Self::TooLarge => "too_large",
        }
    }
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Boot(instance) => write!(f, "instance {instance} is booting and has room"),
            Self::Unheard(instance) => write!(f, "instance {instance} has room and is to be heard first"),
            Self::Launch(instance) => write!(f, "instance {instance} is being launched"),
            Self::PoolFull { max, leaving: 0 } => {
                write!(f, "all machines are taken and the pool is at max_instances = {max}")
            }
            Self::PoolFull { max, leaving } => {
                write!(f, "the pool is at max_instances = {max}, counting {leaving} on the way out")
            }
            Self::PlacementFull(placement) => write!(f, "placement {placement} has no machine left to give"),
            Self::Cooling { placement, until, message } => {
                write!(f, "placement {placement} is tried again at {until:.0}: {message}")
            }
            Self::Probing { placement, message } => {
                write!(
                    f,
                    "one machine at a time is tried on placement {placement}, the last did not come up: {message}"
                )
            }
            Self::PlacementStopped { placement, message } => {
                write!(f, "placement {placement} is stopped until the config is mended and reloaded: {message}")
            }
            Self::ProviderUnknown(placement) => write!(f, "the provider of placement {placement} cannot be read"),
            Self::Paused => f.write_str("`drain --all` is in force; `pilotlight drain --resume` ends it"),
            Self::LabelRemoved => f.write_str("its label is no longer in the config"),
            Self::BehindLargeJob => f.write_str("free GPUs are kept for a larger job that has waited longer"),
            Self::Refused { until, reason } => {
                write!(f, "a machine refused it ({reason}); it is tried again at {until:.0}")
            }
            Self::TooLarge => f.write_str("no placement of its pool could ever hold it"),
        }
    }
}
