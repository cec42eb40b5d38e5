//! Configs for the properties: two pools with GPUs, one without, in random shapes.

use jiff::SignedDuration;
use pilotlight_scaler::fleet::{Label, LocalPlacement, Placement, Pool, ProviderConfig, Settings};
use pilotlight_wire::GpuId;
use proptest::prelude::*;

/// What differs from case to case.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) gpu_max: u32,
    pub(crate) small_max: Option<u32>,
    pub(crate) min_idle: u32,
    pub(crate) idle_minutes: i64,
    pub(crate) lifetime_hours: i64,
    pub(crate) lease_minutes: i64,
}

impl Shape {
    pub(crate) const PLAIN: Self =
        Self { gpu_max: 3, small_max: Some(2), min_idle: 0, idle_minutes: 10, lifetime_hours: 24, lease_minutes: 10 };
}

pub(crate) fn shape() -> impl Strategy<Value = Shape> {
    let bounds = (1..5_u32, prop::option::of(0..3_u32), 0..3_u32);
    (bounds, 0..30_i64, 2..48_i64, 1..20_i64).prop_map(
        |((gpu_max, small_max, min_idle), idle_minutes, lifetime_hours, lease_minutes)| Shape {
            gpu_max,
            small_max,
            min_idle,
            idle_minutes,
            lifetime_hours,
            lease_minutes,
        },
    )
}

pub(crate) const LABELS: [&str; 6] = ["x1", "x4", "x8", "urgent", "once", "cpu"];

/// `variant` is the config after so many reloads: one without the GPU pool, one with other bounds, one as it was.
pub(crate) fn settings(shape: Shape, variant: u32) -> Settings {
    let placement = |name: &str, gpus: u32, max: Option<u32>, ids: &str| Placement {
        name: name.parse().unwrap(),
        gpus,
        max_instances: max,
        price_per_hour: Some(8.0),
        provider: ProviderConfig::Local(LocalPlacement {
            gpu_ids: (0..32).map(|n| GpuId(format!("GPU-{ids}{n}"))).collect(),
            agent: None,
            host_image: true,
        }),
    };
    let pool = |name: &str, placements: &[&str], max, min_idle, reuse, cpu_jobs| Pool {
        name: name.parse().unwrap(),
        placements: placements.iter().map(|name| name.parse().unwrap()).collect(),
        max_instances: max,
        min_idle,
        idle_timeout: SignedDuration::from_mins(shape.idle_minutes),
        boot_timeout: SignedDuration::from_mins(20),
        max_lifetime: SignedDuration::from_hours(shape.lifetime_hours),
        lost_after: SignedDuration::from_hours(1),
        reuse,
        cpu_jobs,
        volumes: Vec::new(),
        runner_image: None,
    };
    let label = |name: &str, pool: &str, gpus, priority| Label {
        name: name.parse().unwrap(),
        pool: pool.parse().unwrap(),
        gpus,
        timeout: SignedDuration::from_hours(6),
        priority,
    };
    let (gpu_max, min_idle) = match variant % 3 {
        1 => (1, 1),
        _ => (shape.gpu_max, shape.min_idle.min(shape.gpu_max)),
    };
    let mut settings = Settings {
        lease: SignedDuration::from_mins(shape.lease_minutes),
        placements: [
            placement("small", 4, shape.small_max, "s"),
            placement("large", 8, Some(2), "l"),
            placement("cpu", 0, None, "c"),
        ]
        .map(|placement| (placement.name.clone(), placement))
        .into(),
        pools: [
            pool("gpu", &["small", "large"], gpu_max, min_idle, true, None),
            pool("once", &["large"], 2, 0, false, Some(1)),
            pool("cpu", &["cpu"], 2, 0, true, Some(2)),
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
    if variant % 3 == 2 {
        settings.pools.retain(|name, _| name.as_str() != "gpu");
        settings.labels.retain(|_, label| label.pool.as_str() != "gpu");
    }
    settings
}
