//! `plan`, `record` and `apply` with 100, 1,000 and 10,000 machines and as many waiting jobs (design 10: 10 ms for `plan`
//! with the most).
//!
//! Medians of many runs on one thread; no comparison with a clock in a test. With `COUNT=plan` it plans
//! once, for a tool that counts instructions; with a number so often, for a profiler; with another `COUNT` it does all but that.

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
        event::{Submission, Synced},
        instance::{Assignment, AssignmentState},
        plan,
    },
    provider::Listed,
};
use pilotlight_wire::{
    AssignmentId, GpuId, InstanceId, JobId, Verdict,
    agent::{AssignmentEvent, AssignmentEventKind, Finished, Seq},
};
use tokio::time::Instant;
use uuid::Uuid;

/// Machines, and waiting jobs.
const SIZES: [u32; 3] = [100, 1_000, 10_000];

/// What is free on each machine, and what the jobs want.
const CASES: [(&str, usize, &str); 4] = [
    ("all machines taken, nothing fits", 0, "x1"),
    ("one GPU free on each, every job fits", 1, "x1"),
    ("one GPU free on each, four wanted", 1, "x4"),
    ("all machines free, every job fits", 8, "x1"),
];

const RUNS: usize = 15;

fn now() -> Timestamp {
    Timestamp::from_second(1_767_225_600).unwrap()
}

fn settings(machines: u32) -> Settings {
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
        max_instances: machines,
        min_idle: 0,
        idle_timeout: SignedDuration::from_mins(10),
        boot_timeout: SignedDuration::from_mins(20),
        max_lifetime: SignedDuration::from_hours(24),
        lost_after: SignedDuration::from_hours(1),
        reuse: true,
        cpu_jobs: None,
        volumes: Vec::new(),
        runner_image: None,
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
        forges: BTreeMap::new(),
    }
}

/// A world whose machines have so many GPUs free each, and whose jobs wait.
fn world(size: u32, free: usize, label: &str) -> World {
    let settings = settings(size);
    let placement = settings.placements.values().next().unwrap().clone();
    let instances = (0..size).map(|n| {
        let gpu_ids: Vec<GpuId> = (0..8).map(|gpu| GpuId(format!("GPU-{n:08x}-{gpu}"))).collect();
        let assignment = Assignment {
            job: JobId::from_uuid(Uuid::from_u128(u128::from(n) + (1 << 100))),
            gpu_ids: gpu_ids[free..].to_vec(),
            assigned_at: now(),
            deadline: now() + SignedDuration::from_hours(6),
            cancel: false,
            withdrawn: false,
            last_event: 1,
            adopted: false,
            state: AssignmentState::Running,
        };
        let id = assignment_of(n);
        Instance {
            id: machine(n),
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
    world.apply(list_read(size), now()).unwrap();
    for n in 0..size {
        // A machine that was not heard takes no job.
        world.apply(synced(n), now()).unwrap();
        assert!(world.instance(machine(n)).is_some_and(|machine| machine.live_assignments().count() < 2));
        world.apply(submitted(n, label), now()).unwrap();
    }
    world
}

fn machine(n: u32) -> InstanceId {
    InstanceId::from_uuid(Uuid::from_u128(u128::from(n) + 1))
}

fn assignment_of(n: u32) -> AssignmentId {
    AssignmentId::from_uuid(Uuid::from_u128(u128::from(n) + (2 << 100)))
}

fn submitted(n: u32, label: &str) -> Event {
    Event::Submitted(Box::new(Submission {
        id: JobId::from_uuid(Uuid::from_u128(u128::from(n) + 1)),
        label: label.parse().unwrap(),
        name: String::new(),
        body_hash: String::new(),
        timeout: None,
        priority: None,
    }))
}

fn list_read(size: u32) -> Event {
    let listed = |n| Listed { instance: machine(n), alive: true, note: None, tags: None };
    Event::ListRead { began_at: now() + SignedDuration::from_millis(1), listed: (0..size).map(listed).collect() }
}

fn synced(n: u32) -> Event {
    let seq = Seq { run: 1, n: 1 };
    let (nonce, assignments) = (String::new(), Vec::new());
    Event::Synced(Box::new(Synced { instance: machine(n), nonce, seq, assignments, sample: None }))
}

fn finished(n: u32) -> Event {
    let finished = Finished {
        verdict: Verdict::Success,
        exit_code: Some(0),
        reason: None,
        log_bytes: 0,
        log_gap: false,
        usage: None,
    };
    let event = AssignmentEvent { n: 2, at: now(), event: AssignmentEventKind::Finished(finished) };
    Event::AssignmentEvent { instance: machine(n), assignment: assignment_of(n), event }
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

/// Time of one event of a kind, by applying many to a copy of the world.
fn applied(world: &World, events: &[Event]) -> Duration {
    let once = |_| {
        let (mut copy, events) = (world.clone(), events.to_vec());
        let began = Instant::now();
        for event in events {
            black_box(copy.apply(event, now() + SignedDuration::from_millis(2)).unwrap());
        }
        began.elapsed()
    };
    median((0..RUNS).map(once).collect()) / u32::try_from(events.len()).unwrap()
}

fn apply_rows(size: u32) {
    let world = world(size, 0, "x1");
    let some = size.min(1_000);
    let kinds: [(&str, Vec<Event>); 4] = [
        ("submitted", (size..size + some).map(|n| submitted(n, "x1")).collect()),
        ("synced", (0..some).map(synced).collect()),
        ("assignment finished", (0..some).map(finished).collect()),
        ("list read", vec![list_read(size)]),
    ];
    for (what, events) in kinds {
        println!("{size:>6}  apply: {what:<31} {:>13.4} ms", applied(&world, &events).as_secs_f64() * 1e3);
    }
}

fn main() {
    if let Ok(what) = std::env::var("COUNT") {
        let world = world(10_000, 1, "x1");
        let times = if what == "plan" { 1 } else { what.parse().unwrap_or(0) };
        for _ in 0..times {
            black_box(plan(&world, now()));
        }
        return;
    }
    println!("Machines of 8 GPUs, as many waiting jobs; median of {RUNS} runs");
    for size in SIZES {
        for (what, free, label) in CASES {
            let world = world(size, free, label);
            let planned = plan(&world, now());
            let reasons: BTreeSet<_> = planned.actions.iter().map(|planned| format!("{:?}", planned.reason)).collect();
            let plan_time = measure(|| plan(&world, now()));
            let record_time = measure(|| {
                let mut copy = world.clone();
                copy.record(&planned, now());
                copy
            });
            let copy_time = measure(|| world.clone());
            println!(
                "{size:>6}  {what:<38} plan {:>8.3} ms   record {:>8.3} ms   {} actions {reasons:?}",
                plan_time.as_secs_f64() * 1e3,
                record_time.saturating_sub(copy_time).as_secs_f64() * 1e3,
                planned.actions.len(),
            );
        }
        apply_rows(size);
    }
}
