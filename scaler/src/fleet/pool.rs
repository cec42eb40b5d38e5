//! Pools and labels in their valid form.

use jiff::SignedDuration;
use pilotlight_wire::{LabelName, PlacementName, PoolName, Volume};
use serde::{Deserialize, Serialize};

/// What a job may ask for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Label {
    /// Its name.
    pub name: LabelName,
    /// The pool that serves it.
    pub pool: PoolName,
    /// GPUs per job, 0 to 8.
    pub gpus: u32,
    /// From assignment to deadline.
    pub timeout: SignedDuration,
    /// Higher goes first.
    pub priority: i32,
}

/// Interchangeable machines with bounds and timeouts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pool {
    /// Its name.
    pub name: PoolName,
    /// The ladder, tried in this order.
    pub placements: Vec<PlacementName>,
    /// Machines at most.
    pub max_instances: u32,
    /// Machines that are kept without work, ready for the next job.
    pub min_idle: u32,
    /// How long a ready machine may be without work.
    pub idle_timeout: SignedDuration,
    /// How long from the create call to enrolment.
    pub boot_timeout: SignedDuration,
    /// No new job after this age.
    pub max_lifetime: SignedDuration,
    /// How long a machine with a job may be silent.
    pub lost_after: SignedDuration,
    /// False: one job per machine, ever.
    pub reuse: bool,
    /// Jobs without GPUs at once; absent: 1 on machines without GPUs, else 0.
    pub cpu_jobs: Option<u32>,
    /// Directories of the machine that jobs see.
    pub volumes: Vec<Volume>,
    /// The image that forges' runners and their jobs' steps run in.
    pub runner_image: Option<String>,
}
