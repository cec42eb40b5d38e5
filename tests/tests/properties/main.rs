//! The invariants of the fleet core (design 4), against random histories, and proof that their tests can fail: for each
//! there is a planted fault in the real planner that they catch.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod ends;
mod examples;
mod ops;
mod rig;
mod settings;

use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
};

use jiff::SignedDuration;
use pilotlight_scaler::fleet::{
    demand::JobState,
    mutant::{Mutant, with_mutant},
};
use pilotlight_wire::JobId;
use proptest::{
    prelude::*,
    test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner},
};
use uuid::Uuid;

use self::{
    ops::{Op, op},
    rig::{Rig, submission},
    settings::{LABELS, Shape, shape},
};

/// Histories per property.
const CASES: u32 = 400;

/// Histories per property and batch in the search for a planted fault, and batches at most.
const BATCH: u32 = 50;
const BATCHES: u8 = 60;

/// A property: what it does with one random history.
type Property = fn(&mut TestRunner) -> Result<(), String>;

/// All that must hold.
const PROPERTIES: [(&str, Property); 4] = [
    ("silence leads to gone", |runner| histories(runner, Rig::settle)),
    ("calm leads to min_idle", |runner| histories(runner, Rig::calm)),
    ("order of submissions", order_of_submissions),
    ("large jobs start", |_| catch(large_job_starts)),
];

fn histories(runner: &mut TestRunner, end: fn(&mut Rig)) -> Result<(), String> {
    run(runner, &(shape(), prop::collection::vec(op(), 1..120)), |(shape, ops)| {
        let mut rig = Rig::new(shape);
        for op in &ops {
            rig.run(op);
            rig.pass();
        }
        end(&mut rig);
    })
}

/// Input order does not matter.
fn order_of_submissions(runner: &mut TestRunner) -> Result<(), String> {
    let input = (prop::collection::vec(0..LABELS.len(), 1..20), 0..20_usize);
    run(runner, &input, |(labels, rotate)| {
        let outcome = |order: &[usize]| {
            let mut rig = Rig::new(Shape::PLAIN);
            for &n in order {
                rig.apply(submission(JobId::from_uuid(Uuid::from_u128(n as u128 + 1)), LABELS[labels[n]]));
            }
            let planned = rig.pass();
            let waiting: BTreeMap<JobId, String> =
                planned.waiting.iter().map(|(job, why)| (*job, why.to_string())).collect();
            (planned.actions.len(), waiting)
        };
        let order: Vec<usize> = (0..labels.len()).collect();
        let mut other = order.clone();
        other.rotate_left(rotate % labels.len());
        other.reverse();
        assert_eq!(outcome(&order), outcome(&other));
    })
}

/// No job waits for ever while later ones start: small jobs that would fill every gap, and when the large one started.
fn large_job_starts() {
    let mut rig = Rig::new(Shape { gpu_max: 1, small_max: Some(0), ..Shape::PLAIN });
    for _ in 0..8 {
        rig.run(&Op::Submit(0));
    }
    rig.pass();
    rig.run(&Op::Enrol(0, true));
    rig.pass();
    rig.run(&Op::Submit(2));
    let large = *rig.jobs.last().unwrap();
    let started = (0..120).find(|_| {
        rig.advance(SignedDuration::from_mins(1));
        // Each minute one small job ends and two new ones are there.
        rig.run(&Op::Finished(0, true));
        rig.run(&Op::Submit(0));
        rig.run(&Op::Submit(0));
        for id in rig.world.instances().map(|i| i.id).collect::<Vec<_>>() {
            rig.sync(id);
        }
        rig.pass();
        rig.world.job(large).is_some_and(|job| matches!(job.state, JobState::Placed { .. }))
    });
    let minutes = started.expect("it starts");
    assert!(minutes < 30, "ten minutes of waiting and eight for the small ones to end, not {minutes}");
}

/// Runs a property; the answer is what broke it, with the smallest input found.
fn run<S: Strategy>(runner: &mut TestRunner, input: &S, property: impl Fn(S::Value)) -> Result<(), String> {
    let outcome = runner.run(input, |value| catch(AssertUnwindSafe(|| property(value))).map_err(TestCaseError::fail));
    outcome.map_err(|error| error.to_string())
}

fn catch(work: impl FnOnce()) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default()
    })
}

/// The same histories for the same seed; what broke it is not looked for in the smallest of them.
fn runner(cases: u32, seed: u8) -> TestRunner {
    let config = Config { cases, max_shrink_iters: 0, failure_persistence: None, ..Config::default() };
    TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &[seed; 32]))
}

fn holds(name: &str) {
    let (_, property) = PROPERTIES.iter().find(|(known, _)| *known == name).unwrap();
    let config = Config { cases: CASES, max_shrink_iters: 4000, failure_persistence: None, ..Config::default() };
    if let Err(why) = property(&mut TestRunner::new(config)) {
        panic!("{name}: {why}");
    }
}

#[test]
fn from_every_history_silence_leads_to_gone() {
    holds("silence leads to gone");
}

#[test]
fn from_every_history_calm_leads_to_min_idle() {
    holds("calm leads to min_idle");
}

#[test]
fn the_order_of_submissions_does_not_matter() {
    holds("order of submissions");
}

#[test]
fn a_large_job_starts_though_small_ones_keep_coming() {
    holds("large jobs start");
}

/// A test that cannot fail proves nothing: each planted fault is caught by some property, and none without a fault.
#[test]
fn every_planted_fault_is_caught() {
    for (name, property) in PROPERTIES {
        property(&mut runner(BATCH, 0)).unwrap_or_else(|why| panic!("{name} without a fault: {why}"));
    }
    std::panic::set_hook(Box::new(|_| {}));
    let mut caught = String::new();
    let mut missed = Vec::new();
    for mutant in Mutant::ALL {
        // A few histories of each property, again and again: most faults are found by the first.
        let by = (0..BATCHES).flat_map(|batch| PROPERTIES.iter().map(move |property| (batch, property))).find_map(
            |(batch, (name, property))| {
                let broken = with_mutant(mutant, || property(&mut runner(BATCH, batch))).err()?;
                Some((name, broken))
            },
        );
        match by {
            Some((name, why)) => {
                let why = why.lines().next().unwrap_or_default();
                caught += &format!("{mutant:?}: {name}: {}\n", why.chars().take(160).collect::<String>());
            }
            None => missed.push(mutant),
        }
    }
    let _default = std::panic::take_hook();
    println!("{caught}");
    assert!(missed.is_empty(), "not caught: {missed:?}\ncaught:\n{caught}");
}
