//! Placements in their valid form.

use std::path::PathBuf;

use pilotlight_wire::{GpuId, PlacementName};
use serde::{Deserialize, Serialize};

/// One rung of a pool's ladder: provider, machine type and price.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Placement {
    /// Its name.
    pub name: PlacementName,
    /// GPUs of one machine.
    pub gpus: u32,
    /// Machines at most, where the placement has a bound of its own.
    pub max_instances: Option<u32>,
    /// Price of one machine, in any currency.
    pub price_per_hour: Option<f64>,
    /// Who makes the machines.
    pub provider: ProviderConfig,
}

/// Who makes the machines, and with what arguments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProviderConfig {
    /// Agents as processes on the scaler's own box.
    Local(LocalPlacement),
}

impl ProviderConfig {
    /// What a machine boots from; boots that never enrol are counted per placement and image (design 4).
    #[must_use]
    pub fn image(&self) -> Option<String> {
        match self {
            Self::Local(local) => local.agent.as_ref().map(|agent| agent.display().to_string()),
        }
    }
}

/// The local provider's arguments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LocalPlacement {
    /// The GPUs of this box that may be handed out; each instance gets [`Placement::gpus`] of them, disjoint.
    pub gpu_ids: Vec<GpuId>,
    /// The agent's binary; absent: beside the scaler's own.
    pub agent: Option<PathBuf>,
    /// Whether jobs may use the built-in image `pilotlight/host`.
    pub host_image: bool,
}
