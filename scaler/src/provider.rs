//! Providers make machines. Today there is one; the trait comes with the second.

pub mod local;

use jiff::Timestamp;
use pilotlight_wire::{GpuId, InstanceId, PlacementName, PoolName};
use serde::{Deserialize, Serialize};

/// One machine in a provider's list that carries our controller's mark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The instance it is.
    pub instance: InstanceId,
    /// Whether it can still do work; a machine that has stopped for good is listed until it is destroyed.
    pub alive: bool,
    /// Why it is not alive, for people.
    pub note: Option<String>,
    /// What was written on it when it was made; `None` when that cannot be read.
    pub tags: Option<Tags>,
}

/// What a machine carries from its create call on, enough to rebuild a lost database from the provider's list
/// (design 8).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tags {
    /// Its pool.
    pub pool: PoolName,
    /// The rung of the ladder it came from.
    pub placement: PlacementName,
    /// When it was asked for.
    pub created_at: Timestamp,
    /// Its GPUs, where the placement names them.
    pub gpu_ids: Vec<GpuId>,
}

/// Why a create call failed. The class decides what happens to the placement (design 4, 9).
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// No machine of this kind now: cool down, try the next rung.
    #[error("no capacity: {0}")]
    Capacity(String),
    /// The arguments can never work: stop the placement and alert.
    #[error("{0}")]
    Invalid(String),
    /// Nobody knows whether the machine was made: it stays `Requested` until the list says.
    #[error("the machine may exist: {0}")]
    MayExist(String),
}

/// Why a list or destroy call failed. Nothing destructive follows from it.
#[derive(Debug, thiserror::Error)]
#[error("{doing}")]
pub struct ProviderError {
    /// What was being done, with the path or URL.
    pub doing: String,
    /// Why it failed.
    #[source]
    pub source: std::io::Error,
}
