//! Whole-system scenarios: the real scaler, real agents, real Docker. Names say what holds.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod admin;
mod clock;
mod disk;
mod dockerd;
mod ends;
mod faults;
mod life;
mod net;
mod output;
mod outside;
mod secrets;

use std::{fs, path::Path, process::Output, time::Duration};

use pilotlight_tests::site::Site;
use serde_json::Value;

/// A job that prints numbered lines until it is told to stop; how many is left in `last`.
const UNTIL_TOLD: &str = "echo ran >> /marks/ran; i=0; until [ -e /marks/stop ]; do i=$((i+1)); echo line $i; sleep 0.02; \
                          done; echo $i > /marks/last; exit 5";

fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or(-1)
}

fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// `line 1` to `line n`, as the jobs below print them.
fn lines(n: u32) -> String {
    (1..=n).map(|n| format!("line {n}\n")).collect()
}

/// A job that prints numbered lines and leaves a mark each time it runs.
fn counting(n: u32, pause: &str, code: u32) -> String {
    format!("echo ran >> /marks/ran; for i in $(seq {n}); do echo line $i; sleep {pause}; done; exit {code}")
}

/// How often such a job ran.
fn ran(marks: &std::path::Path) -> usize {
    std::fs::read_to_string(marks.join("ran")).unwrap_or_default().lines().count()
}

/// The pool of [`counting`] jobs: a volume for the marks.
fn marked(marks: &std::path::Path) -> String {
    format!(
        "{}\n[pool.here.volumes]\nmarks = {{ host = {:?}, mount = \"/marks\", read_only = false }}\n",
        pilotlight_tests::site::ONE_POOL.replace("[placement.here.local]\ngpus = 0\n", ""),
        marks
    ) + "[placement.here.local]\ngpus = 0\n"
}

/// How many lines an [`UNTIL_TOLD`] job printed.
fn last(marks: &Path) -> u32 {
    fs::read_to_string(marks.join("last")).unwrap().trim().parse().unwrap()
}

/// All machines that ever were, oldest first.
fn instances(site: &Site) -> Vec<Value> {
    site.json(&["instances", "--all"]).unwrap().as_array().unwrap().clone()
}

/// What is known of the job of this name; null before it is accepted.
fn job(site: &Site, name: &str) -> Value {
    let jobs = site.json(&["jobs", "--all"]).unwrap();
    let mut found = jobs.as_array().unwrap().iter().filter(|job| job["name"] == name);
    let first = found.next().cloned().unwrap_or_default();
    assert!(found.next().is_none(), "submitted twice: {jobs}");
    first
}

/// Lets time pass where that is what is tested.
fn pause(time: Duration) {
    std::thread::sleep(time);
}
