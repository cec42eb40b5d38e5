//! Random configs: a pool on a ladder of two placements, one for single jobs, one without GPUs.

use jiff::SignedDuration;
use pilotlight_scaler::fleet::{Label, LocalPlacement, Placement, Pool, ProviderConfig, Settings};
use pilotlight_wire::{GpuId, Name};
use rand::{RngExt, rngs::SmallRng};

/// What jobs ask for.
pub(crate) const LABELS: [&str; 6] = ["x1", "x4", "x8", "urgent", "once", "cpu"];

fn named<K>(text: &str) -> Name<K> {
    text.parse().unwrap_or_else(|_| unreachable!("a good name"))
}

/// What differs from seed to seed.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) machines: u32,
    min_idle: u32,
    idle: SignedDuration,
    lifetime: SignedDuration,
    lost_after: SignedDuration,
    lease: SignedDuration,
    timeout: SignedDuration,
}

impl Shape {
    /// `large`: hundreds of machines.
    pub(crate) fn random(rng: &mut SmallRng, large: bool) -> Self {
        Self {
            machines: if large { rng.random_range(100..400) } else { rng.random_range(1..5) },
            min_idle: if rng.random_ratio(1, 3) { rng.random_range(1..3) } else { 0 },
            idle: SignedDuration::from_mins(rng.random_range(0..20)),
            lifetime: SignedDuration::from_hours(rng.random_range(1..24)),
            lost_after: SignedDuration::from_mins(rng.random_range(10..90)),
            lease: SignedDuration::from_mins(rng.random_range(2..15)),
            timeout: SignedDuration::from_mins(rng.random_range(20..360)),
        }
    }

    /// `variant` 1 has other bounds, 2 lacks the pool with GPUs, 3 a rung of its ladder; 0 is how it begins and ends.
    pub(crate) fn settings(&self, variant: u32, min_idle: bool) -> Settings {
        let placement = |name: &str, gpus: u32, max: Option<u32>| Placement {
            name: named(name),
            gpus,
            max_instances: max,
            price_per_hour: Some(8.0),
            // Machines elsewhere bring their own GPUs; the names are made when they enrol.
            provider: ProviderConfig::Local(LocalPlacement {
                gpu_ids: (0..gpus * self.machines * 2).map(|n| GpuId(format!("GPU-{name}-{n}"))).collect(),
                agent: None,
                host_image: true,
            }),
        };
        let pool = |name: &str, on: &[&str], max, reuse, cpu_jobs| Pool {
            name: named(name),
            placements: on.iter().map(|name| named(name)).collect(),
            max_instances: max,
            min_idle: if min_idle { self.min_idle.min(max) } else { 0 },
            idle_timeout: self.idle,
            boot_timeout: SignedDuration::from_mins(20),
            max_lifetime: self.lifetime,
            lost_after: self.lost_after,
            reuse,
            cpu_jobs,
            volumes: Vec::new(),
            runner_image: None,
        };
        let label = |name: &str, pool: &str, gpus, priority| Label {
            name: named(name),
            pool: named(pool),
            gpus,
            timeout: self.timeout,
            priority,
        };
        let rungs: &[&str] = if variant == 3 { &["large"] } else { &["small", "large"] };
        let gpu_max = if variant == 1 { 1 } else { self.machines };
        let mut settings = Settings {
            lease: self.lease,
            placements: [
                placement("small", 4, Some(self.machines)),
                placement("large", 8, Some(self.machines)),
                placement("cpu", 0, None),
            ]
            .map(|placement| (placement.name.clone(), placement))
            .into(),
            pools: [
                pool("gpu", rungs, gpu_max, true, None),
                pool("once", &["large"], self.machines.min(2), false, Some(1)),
                pool("cpu", &["cpu"], self.machines, true, Some(2)),
            ]
            .map(|pool| (pool.name.clone(), pool))
            .into(),
            forges: std::collections::BTreeMap::new(),
            labels: [
                label("x1", "gpu", 1, 0),
                label("x4", "gpu", 4, 0),
                label("x8", "gpu", 8, 0),
                label("urgent", "gpu", 2, 5),
                label("once", "once", 2, 0),
                label("cpu", "cpu", 0, 0),
            ]
            .map(|label| (label.name.clone(), label))
            .into(),
        };
        if variant == 2 {
            settings.pools.retain(|name, _| name.as_str() != "gpu");
            settings.labels.retain(|_, label| label.pool.as_str() != "gpu");
        }
        settings
    }
}
