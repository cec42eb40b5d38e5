//! The simulator over many seeds (design 9): no fault leaks a machine, ends a job that runs, or loses a byte unsaid.

use std::sync::atomic::{AtomicU64, Ordering};

use pilotlight_scaler::fleet::mutant::{Mutant, with_mutant};
use pilotlight_sim::{Outcome, Tally, run};

/// Seeds per run; one in 500 of them with thousands of jobs.
const SEEDS: u64 = 2_000;

#[test]
fn no_seed_leaks_a_machine_ends_a_running_job_or_loses_a_byte() {
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    let next = AtomicU64::new(0);
    let work = || {
        let (mut tally, mut jobs, mut machines) = (Tally::default(), 0, 0);
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= SEEDS {
                return Ok((tally, jobs, machines));
            }
            let outcome = run(seed, false);
            if let Some(failure) = outcome.failure {
                next.store(SEEDS, Ordering::Relaxed);
                return Err((seed, failure));
            }
            tally.add(&outcome.tally);
            jobs += outcome.jobs;
            machines += outcome.machines;
        }
    };
    let ended: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().map(|thread| thread.join().expect("a seed's panic is caught")).collect()
    });
    let (mut tally, mut jobs, mut machines) = (Tally::default(), 0, 0);
    for end in ended {
        match end {
            Ok((more, more_jobs, more_machines)) => {
                tally.add(&more);
                jobs += more_jobs;
                machines += more_machines;
            }
            Err((seed, failure)) => panic!("{}", told(seed, &failure)),
        }
    }
    println!("{SEEDS} seeds, {jobs} jobs, {machines} machines; faults that struck:\n{tally}");
    assert!(tally.missing().is_empty(), "never struck: {:?}", tally.missing());
}

/// The end of a failing seed's story, and how to have all of it.
fn told(seed: u64, failure: &str) -> String {
    let trace = run(seed, true).trace;
    let lines: Vec<&str> = trace.lines().collect();
    let last = lines[lines.len().saturating_sub(60)..].join("\n");
    format!("seed {seed}: {failure}\n{last}\nall of it: make soak SECONDS=1 SEED={seed}")
}

#[test]
fn a_seed_replays_to_the_letter() {
    for seed in [1, 7, 42] {
        let (first, second) = (run(seed, true), run(seed, true));
        assert!(first.trace.lines().count() > 50, "seed {seed} has a story");
        assert_eq!(first, second);
        let silent = run(seed, false);
        assert_eq!(Outcome { trace: String::new(), ..first }, silent, "to watch it changes nothing");
    }
}

/// A simulator that cannot fail proves nothing.
#[test]
fn planted_faults_are_caught() {
    std::panic::set_hook(Box::new(|_| {}));
    let mutants = [
        Mutant::SharesGpus,
        Mutant::IgnoresPoolBound,
        Mutant::IgnoresPlacementBound,
        Mutant::IdleEndsJobs,
        Mutant::DrainEndsJobs,
        Mutant::NeverGivesUpBoot,
        Mutant::TakesAcceptedForGone,
        Mutant::LosesJobsEarly,
        Mutant::IgnoresGrace,
        Mutant::ReapsAtFirstSight,
    ];
    let missed: Vec<Mutant> = mutants
        .into_iter()
        .filter(|mutant| !(0..150).any(|seed| with_mutant(*mutant, || run(seed, false)).failure.is_some()))
        .collect();
    let _default = std::panic::take_hook();
    assert!(missed.is_empty(), "not caught: {missed:?}");
}
