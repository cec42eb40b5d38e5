//! `plan` and `record` with 10,000 machines and 10,000 waiting jobs (design 10: 10 ms for `plan`).
//!
//! Medians of many runs on one thread; no comparison with a clock in a test.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a program that measures and prints")]

use std::{
    collections::{BTreeMap, BTreeSet},
    hint::black_box,
    time::Duration,
};

use jiff::{SignedDuration, Timestamp};
use pilotlight_scaler::{
    fleet::{
        Event, Instance, Label, LocalPlacement, Phase, Placement, Pool, ProviderConfig, Settings, World,
        event::Submission,
        instance::{Assignment, AssignmentState},
        plan,
    },
    provider::Listed,
};
use pilotlight_wire::{AssignmentId, GpuId, InstanceId, JobId};
use tokio::time::Instant;
use uuid::Uuid;

const MACHINES: u32 = 10_000;
const JOBS: u32 = 10_000;
const RUNS: usize = 15;

fn now() -> Timestamp {
    Timestamp::from_second(1_767_225_600).unwrap()
}

fn settings() -> Settings {
    let placement = Placement {
        name: "rack".parse().unwrap(),
        gpus: 8,
        max_instances: None,
        price_per_hour: None,
        provider: ProviderConfig::Local(LocalPlacement { gpu_ids: Vec::new(), agent: None, host_image: false }),
    };
    let pool = Pool {
        name: "h200".parse().unwrap(),
        placements: vec![placement.name.clone()],
        max_instances: MACHINES,
        min_idle: 0,
        idle_timeout: SignedDuration::from_mins(10),
        boot_timeout: SignedDuration::from_mins(20),
        max_lifetime: SignedDuration::from_hours(24),
        lost_after: SignedDuration::from_hours(1),
        reuse: true,
        cpu_jobs: None,
        volumes: Vec::new(),
    };
    let label = |name: &str, gpus| Label {
        name: name.parse().unwrap(),
        pool: pool.name.clone(),
        gpus,
        timeout: SignedDuration::from_hours(6),
        priority: 0,
    };
    let labels = [label("x1", 1), label("x4", 4)].map(|label| (label.name.clone(), label)).into();
    Settings {
        lease: SignedDuration::from_mins(10),
        labels,
        pools: [(pool.name.clone(), pool)].into(),
        placements: [(placement.name.clone(), placement)].into(),
    }
}

/// A world whose machines have so many GPUs free each, and whose jobs wait.
fn world(free: usize, label: &str) -> World {
    let settings = settings();
    let placement = settings.placements.values().next().unwrap().clone();
    let instances = (0..MACHINES).map(|n| {
        let gpu_ids: Vec<GpuId> = (0..8).map(|gpu| GpuId(format!("GPU-{n:08x}-{gpu}"))).collect();
        let assignment = Assignment {
            job: JobId::from_uuid(Uuid::from_u128(u128::from(n) + (1 << 100))),
            gpu_ids: gpu_ids[free..].to_vec(),
            assigned_at: now(),
            deadline: now() + SignedDuration::from_hours(6),
            cancel: false,
            last_event: 1,
            adopted: false,
            state: AssignmentState::Running,
        };
        let id = AssignmentId::from_uuid(Uuid::from_u128(u128::from(n) + (2 << 100)));
        Instance {
            id: InstanceId::from_uuid(Uuid::from_u128(u128::from(n) + 1)),
            pool: "h200".parse().unwrap(),
            placement: placement.clone(),
            gpu_ids,
            cpu_jobs: 0,
            phase: Phase::Ready { idle_since: now() },
            created_at: now(),
            changed_at: now(),
            boot_deadline: now() + SignedDuration::from_mins(20),
            lifetime_end: now() + SignedDuration::from_hours(24),
            held_until: None,
            single_use: false,
            assigned_total: 1,
            enrolment: None,
            assignments: if free == 8 { BTreeMap::new() } else { [(id, assignment)].into() },
        }
    });
    let mut world = World::new(settings, 1, now(), instances, []);
    let listed = (0..MACHINES)
        .map(|n| Listed {
            instance: InstanceId::from_uuid(Uuid::from_u128(u128::from(n) + 1)),
            alive: true,
            note: None,
            tags: None,
        })
        .collect();
    world.apply(Event::ListRead { began_at: now() + SignedDuration::from_millis(1), listed }, now()).unwrap();
    for n in 0..JOBS {
        let submission = Submission {
            id: JobId::from_uuid(Uuid::from_u128(u128::from(n) + 1)),
            label: label.parse().unwrap(),
            name: String::new(),
            body_hash: String::new(),
            timeout: None,
            priority: None,
        };
        world.apply(Event::Submitted(Box::new(submission)), now()).unwrap();
    }
    world
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn measure<T>(mut work: impl FnMut() -> T) -> Duration {
    let run = |_| {
        let began = Instant::now();
        black_box(work());
        began.elapsed()
    };
    median((0..RUNS).map(run).collect())
}

fn main() {
    println!("{MACHINES} machines of 8 GPUs, {JOBS} waiting jobs; median of {RUNS} runs");
    for (what, free, label) in [
        ("all machines taken, nothing fits", 0, "x1"),
        ("one GPU free on each, every job fits", 1, "x1"),
        ("one GPU free on each, four wanted", 1, "x4"),
        ("all machines free, every job fits", 8, "x1"),
    ] {
        let world = world(free, label);
        let planned = plan(&world, now());
        let assigned: BTreeSet<_> = planned.actions.iter().map(|planned| format!("{:?}", planned.reason)).collect();
        let plan_time = measure(|| plan(&world, now()));
        let record_time = measure(|| {
            let mut copy = world.clone();
            copy.record(&planned, now());
            copy
        });
        let copy_time = measure(|| world.clone());
        println!(
            "{what:<40} plan {:>9.2} ms   record {:>8.2} ms   {} actions {assigned:?}",
            plan_time.as_secs_f64() * 1e3,
            record_time.saturating_sub(copy_time).as_secs_f64() * 1e3,
            planned.actions.len(),
        );
    }
}
