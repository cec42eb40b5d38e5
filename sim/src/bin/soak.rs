//! `make soak SECONDS=60 SEED=7`: simulates seed after seed until the time is up or one fails.
//!
//! Prints a failing seed's whole story and ends with 1.

#![expect(clippy::print_stdout, reason = "a program that tells a story")]

use std::{process::ExitCode, time::Duration};

use pilotlight_runtime::clock::boottime;
use pilotlight_sim::{Tally, run};

fn main() -> ExitCode {
    let number = |index: usize, default: u64| {
        std::env::args()
            .nth(index)
            .map_or(Ok(default), |text| text.parse::<u64>().map_err(|error| format!("{text}: {error}")))
    };
    let (seconds, first) = match (number(1, 60), number(2, 0)) {
        (Ok(seconds), Ok(seed)) => (seconds, seed),
        (Err(error), _) | (_, Err(error)) => {
            println!("soak: {error}; usage: soak SECONDS SEED");
            return ExitCode::from(64);
        }
    };
    let until = boottime() + Duration::from_secs(seconds);
    let (mut tally, mut jobs, mut machines, mut seed) = (Tally::default(), 0, 0, first);
    loop {
        let outcome = run(seed, false);
        if let Some(failure) = outcome.failure {
            println!("{}\nseed {seed} fails: {failure}", run(seed, true).trace);
            return ExitCode::FAILURE;
        }
        tally.add(&outcome.tally);
        jobs += outcome.jobs;
        machines += outcome.machines;
        seed += 1;
        if boottime() >= until {
            break;
        }
    }
    println!("seeds {first} to {}, {jobs} jobs, {machines} machines, all well; faults that struck:\n{tally}", seed - 1);
    ExitCode::SUCCESS
}
