//! kill -9 of each part while jobs run: no job lost or doubled, no byte lost or doubled, nothing left.

use std::fs;

use pilotlight_tests::site::{ONE_POOL, Site, docker, signal, wait};
use serde_json::Value;

use super::{code, counting, err, lines, marked, ran};

#[test]
fn scaler_killed_while_a_job_prints() {
    let marks = tempfile::tempdir().unwrap();
    let mut site = Site::new(&marked(marks.path())).unwrap();
    let job = site.begin(&["--", "bash", "-c", &counting(150, "0.02", 3)]).unwrap();
    job.until("line 20\n").unwrap();
    site.kill_scaler().unwrap();
    site.start().unwrap();
    let output = job.end().unwrap();
    assert_eq!((code(&output), ran(marks.path())), (3, 1), "{}", err(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), lines(150));
    site.finish().unwrap();
}

#[test]
fn agent_killed_while_a_job_prints() {
    let marks = tempfile::tempdir().unwrap();
    let site = Site::new(&marked(marks.path())).unwrap();
    let job = site.begin(&["--", "bash", "-c", &counting(150, "0.02", 4)]).unwrap();
    job.until("line 20\n").unwrap();
    let first = site.agent_pid().unwrap();
    signal(first, "KILL").unwrap();
    let output = job.end().unwrap();
    assert_eq!((code(&output), ran(marks.path())), (4, 1), "{}", err(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), lines(150));
    assert_ne!(site.agent_pid().unwrap(), first, "it was started again");
    site.finish().unwrap();
}

#[test]
fn both_killed_and_the_job_ends_while_nobody_looks() {
    let marks = tempfile::tempdir().unwrap();
    let mut site = Site::new(&marked(marks.path())).unwrap();
    let job = site.begin(&["--", "bash", "-c", &counting(60, "0.02", 5)]).unwrap();
    job.until("line 10\n").unwrap();
    site.kill_scaler().unwrap();
    signal(site.agent_pid().unwrap(), "KILL").unwrap();
    wait("the container has ended", || {
        let ids = site.containers()?;
        Ok(ids.iter().all(|id| docker(&["inspect", "-f", "{{.State.Running}}", id]).is_ok_and(|it| it == "false\n")))
    })
    .unwrap();
    site.start().unwrap();
    let output = job.end().unwrap();
    assert_eq!((code(&output), ran(marks.path())), (5, 1), "{}", err(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), lines(60));
    site.finish().unwrap();
}

#[test]
fn scaler_killed_again_and_again_from_submit_to_end() {
    let marks = tempfile::tempdir().unwrap();
    let mut site = Site::new(&marked(marks.path())).unwrap();
    let job = site.begin(&["--", "bash", "-c", &counting(40, "0.02", 6)]).unwrap();
    // Each life is longer than the last: launch, boot, enrolment, assignment, start and output are all cut off.
    for life in 0..8_u64 {
        std::thread::sleep(std::time::Duration::from_millis(life * 40));
        site.kill_scaler().unwrap();
        site.start().unwrap();
    }
    let output = job.end().unwrap();
    assert_eq!((code(&output), ran(marks.path())), (6, 1), "{}", err(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), lines(40));
    assert_eq!(site.json(&["jobs", "--all"]).unwrap().as_array().unwrap().len(), 1, "not submitted twice");
    site.finish().unwrap();
}

#[test]
fn agent_killed_again_and_again_from_start_to_end() {
    let marks = tempfile::tempdir().unwrap();
    let site = Site::new(&marked(marks.path())).unwrap();
    let job = site.begin(&["--", "bash", "-c", &counting(100, "0.05", 7)]).unwrap();
    let mut last = 0;
    // Four times, less than the breaker's five deaths in a row: before, around and after the container's start.
    for life in 0..4_u64 {
        let mut pid = 0;
        wait("the next agent", || {
            pid = site.agent_pid()?;
            Ok(pid != last)
        })
        .unwrap();
        std::thread::sleep(std::time::Duration::from_millis(life * 60));
        signal(pid, "KILL").unwrap();
        last = pid;
    }
    let output = job.end().unwrap();
    assert_eq!((code(&output), ran(marks.path())), (7, 1), "{}", err(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), lines(100));
    site.finish().unwrap();
}

#[test]
fn attach_process_killed_leaves_a_visible_gap_and_the_job_goes_on() {
    let site = Site::new(ONE_POOL).unwrap();
    let result = site.path("result.json");
    let script = "for i in $(seq 60); do echo line $i; sleep 0.02; done; exit 8";
    let job = site.begin(&["--result-file", result.to_str().unwrap(), "--", "bash", "-c", script]).unwrap();
    job.until("line 10\n").unwrap();
    signal(site.attach_pid().unwrap(), "KILL").unwrap();
    let output = job.end().unwrap();
    assert_eq!(code(&output), 8, "{}", err(&output));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(text.matches("[pilotlight] output may be missing here").count(), 1, "{text}");
    assert!(text.ends_with("line 60\n"), "{text}");
    let told: Value = serde_json::from_slice(&fs::read(result).unwrap()).unwrap();
    assert_eq!(told["log_gap"], true);
    site.finish().unwrap();
}

#[test]
fn attach_process_stopped_blocks_the_job_and_loses_nothing() {
    let site = Site::new(ONE_POOL).unwrap();
    let script = "echo on; sleep 2; for i in $(seq 20000); do echo line $i; done";
    let job = site.begin(&["--", "bash", "-c", script]).unwrap();
    job.until("on\n").unwrap();
    let attach = site.attach_pid().unwrap();
    signal(attach, "STOP").unwrap();
    std::thread::sleep(std::time::Duration::from_secs(4));
    assert_eq!(site.json(&["jobs"]).unwrap()[0]["state"], "running", "its pipe is full");
    signal(attach, "CONT").unwrap();
    let output = job.end().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("on\n{}", lines(20000)));
    site.finish().unwrap();
}

#[test]
fn a_container_that_somebody_removes_is_never_a_success() {
    let site = Site::new(ONE_POOL).unwrap();
    let job = site.begin(&["--", "bash", "-c", "echo on; sleep 500"]).unwrap();
    job.until("on\n").unwrap();
    for id in site.containers().unwrap() {
        docker(&["rm", "-f", &id]).unwrap();
    }
    let output = job.end().unwrap();
    assert!([137, 75].contains(&code(&output)), "{}", err(&output));
    site.finish().unwrap();
}
