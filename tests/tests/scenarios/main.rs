//! Whole-system scenarios: the real scaler, real agents, real Docker. Names say what holds.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod admin;
mod disk;
mod dockerd;
mod ends;
mod faults;
mod life;
mod net;
mod outside;

use std::process::Output;

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
