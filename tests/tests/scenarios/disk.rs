//! Full disks: of the scaler, of the agent, of Docker; before, during and after a job.

use std::{fs, os::unix::process::ExitStatusExt, path::Path};

use pilotlight_tests::{
    disk::{fill, free},
    dockerd::{Dockerd, Restart},
    site::{ONE_POOL, Site, Submit, signal, wait},
};
use serde_json::Value;

use super::{code, err, lines, marked};

const MIB: u64 = 1024 * 1024;

fn told(site: &Site) -> Value {
    serde_json::from_slice(&fs::read(site.path("result.json")).unwrap()).unwrap()
}

fn begin(site: &Site, script: &str) -> Submit {
    let result = site.path("result.json");
    site.begin(&["--result-file", result.to_str().unwrap(), "--", "bash", "-c", script]).unwrap()
}

/// Waits in a job's script for a file among the marks.
fn until(mark: &str) -> String {
    format!("until [ -e /marks/{mark} ]; do sleep 0.1; done")
}

fn mark(marks: &Path, name: &str) {
    fs::write(marks.join(name), "").unwrap();
}

#[test]
fn a_store_without_room_ends_the_scaler_and_costs_nothing() {
    let marks = tempfile::tempdir().unwrap();
    let mut site = Site::prepare(&marked(marks.path())).unwrap();
    let state = site.mount("state", "32m").unwrap();
    site.mount("state/local", "512m").unwrap();
    site.start().unwrap();
    let script = format!(
        "for i in $(seq 50); do echo line $i; done; {}; for i in $(seq 51 100); do echo line $i; sleep 0.05; done; exit 7",
        until("go")
    );
    let job = begin(&site, &script);
    job.until("line 50\n").unwrap();
    fill(&state, 0).unwrap();
    mark(marks.path(), "go");
    // The job ends and the scaler cannot write that down.
    let status = site.scaler_ended().unwrap();
    assert_eq!((status.code(), status.signal()), (Some(74), None), "{}", site.logs());
    assert!(site.logs().contains("disk is full"), "{}", site.logs());
    let again = site.run_command().output().unwrap();
    assert_eq!(again.status.code(), Some(74), "{}", err(&again));
    assert!(err(&again).contains("full"), "{}", err(&again));
    assert!(!job.stdout().contains("line 100\n"));
    free(&state).unwrap();
    site.start().unwrap();
    let output = job.end().unwrap();
    assert_eq!(code(&output), 7, "{}", err(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), lines(100));
    assert_eq!(told(&site)["log_gap"], false);
    site.finish().unwrap();
}

#[test]
fn a_scaler_without_room_to_begin_with_says_so() {
    let mut site = Site::prepare(ONE_POOL).unwrap();
    let state = site.mount("state", "16m").unwrap();
    site.mount("state/local", "512m").unwrap();
    fill(&state, 0).unwrap();
    let output = site.run_command().output().unwrap();
    assert_eq!(output.status.code(), Some(74), "{}", err(&output));
    assert!(err(&output).contains("No space left") || err(&output).contains("full"), "{}", err(&output));
    free(&state).unwrap();
    site.start().unwrap();
    assert_eq!(site.submit(&["--", "echo", "on"]).unwrap().stdout, b"on\n");
    site.finish().unwrap();
}

#[test]
fn a_log_leaves_the_store_its_room_and_waits_for_more() {
    let mut site = Site::prepare(ONE_POOL).unwrap();
    site.mount("state", "32m").unwrap();
    site.mount("state/local", "512m").unwrap();
    site.start().unwrap();
    let script = "yes 'a line of some forty bytes, give or take.' | head -c 60000000; echo; echo done; exit 9";
    let job = begin(&site, script);
    wait("the log has no room", || Ok(site.logs().contains("log not taken"))).unwrap();
    wait("its end is known", || Ok(site.json(&["jobs", "--all"])?[0]["state"] == "finished")).unwrap();
    // Whatever is decided is still written down.
    let other = site.begin(&["--", "true"]).unwrap();
    wait("another one runs", || Ok(site.json(&["jobs", "--all"])?.as_array().unwrap().len() == 2)).unwrap();
    assert_eq!(code(&other.end().unwrap()), 0, "it has no output to wait for");
    site.resize("state", "256m").unwrap();
    let output = job.end().unwrap();
    assert_eq!(code(&output), 9, "{}", err(&output));
    assert_eq!(output.stdout.len(), 60_000_000 + "\ndone\n".len());
    assert!(output.stdout.ends_with(b"\ndone\n"));
    site.finish().unwrap();
}

#[test]
fn a_machine_whose_disk_is_full_refuses_a_job_and_takes_it_when_there_is_room() {
    let mut site = Site::prepare(ONE_POOL).unwrap();
    let local = site.mount("state/local", "300m").unwrap();
    site.start().unwrap();
    assert_eq!(code(&site.submit(&["--", "true"]).unwrap()), 0);
    fill(&local, 100 * MIB).unwrap();
    let job = begin(&site, "echo on");
    wait("it is refused", || {
        Ok(site.json(&["jobs"])?[0]["reason"].as_str().is_some_and(|why| why.contains("disk is full")))
    })
    .unwrap();
    free(&local).unwrap();
    let output = job.end().unwrap();
    assert_eq!((code(&output), output.stdout), (0, b"on\n".to_vec()));
    site.finish().unwrap();
}

/// A job that writes more than the agent's disk holds waits, and after a while its bytes are counted and dropped.
#[test]
fn c39_a_job_whose_output_fills_the_disk_is_told_and_the_next_one_works() {
    let marks = tempfile::tempdir().unwrap();
    let mut site = Site::prepare(&marked(marks.path())).unwrap();
    let local = site.mount("state/local", "300m").unwrap();
    site.scaler_env("PILOTLIGHT_FULL_DISK_SECONDS", "3");
    site.start().unwrap();
    let flood = "head -c 40000000 /dev/zero | tr '\\0' x";
    let job = begin(&site, &format!("echo on; {}; {flood}; exit 9", until("go")));
    job.until("on\n").unwrap();
    fill(&local, 24 * MIB).unwrap();
    mark(marks.path(), "go");
    let output = job.end().unwrap();
    assert_eq!(code(&output), 9, "{}", err(&output));
    let text = String::from_utf8_lossy(&output.stdout);
    let word = text.lines().find(|line| line.starts_with("[pilotlight]")).expect("a word on what is missing");
    let dropped: usize = word.split(' ').nth(1).unwrap().parse().unwrap();
    assert!(word.ends_with("bytes were dropped here: the machine's disk was full"), "{word}");
    assert_eq!(text.matches('x').count() + dropped, 40_000_000, "each byte is here or counted");
    assert_eq!(told(&site)["log_gap"], true);
    free(&local).unwrap();
    assert_eq!(site.submit(&["--", "echo", "next"]).unwrap().stdout, b"next\n");
    assert_eq!(site.json(&["instances", "--all"]).unwrap().as_array().unwrap().len(), 1, "on the same machine");
    site.finish().unwrap();
}

#[test]
fn a_disk_that_somebody_fills_and_frees_costs_neither_a_line_nor_the_agent_nor_the_job() {
    let marks = tempfile::tempdir().unwrap();
    let mut site = Site::prepare(&marked(marks.path())).unwrap();
    let local = site.mount("state/local", "300m").unwrap();
    site.start().unwrap();
    let script = format!(
        "for i in $(seq 100); do echo line $i; done; {}; for i in $(seq 101 20000); do echo line $i; done; exit 9",
        until("go")
    );
    let job = begin(&site, &script);
    job.until("line 100\n").unwrap();
    fill(&local, 0).unwrap();
    mark(marks.path(), "go");
    // Without a byte to write, and what it kept for itself is soon gone.
    for _ in 0..2 {
        let agent = site.agent_pid().unwrap();
        signal(agent, "KILL").unwrap();
        wait("it was started again", || Ok(site.agent_pid()? != agent)).unwrap();
    }
    wait("the agent waits for room", || Ok(site.logs().contains("the disk is full"))).unwrap();
    assert_eq!(site.json(&["jobs"]).unwrap()[0]["state"], "running");
    free(&local).unwrap();
    let output = job.end().unwrap();
    assert_eq!(code(&output), 9, "{}", err(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), lines(20000));
    assert_eq!(told(&site)["log_gap"], false);
    site.finish().unwrap();
}

/// A site with a Docker whose images and containers lie on a disk of 512 MiB.
fn small_docker() -> (Site, std::path::PathBuf) {
    let mut site = Site::prepare(ONE_POOL).unwrap();
    let data = site.mount("docker", "512m").unwrap();
    site.set_docker(Dockerd::with_data(Restart::Ends, &data).unwrap());
    site.start().unwrap();
    (site, data)
}

#[test]
fn c39_a_job_that_fills_dockers_disk_fails_and_the_reason_names_it() {
    let (site, data) = small_docker();
    let job = begin(&site, "echo on; head -c 800000000 /dev/zero >/var/tmp/big");
    let output = job.end().unwrap();
    assert_eq!(code(&output), 1, "{}", err(&output));
    let told = told(&site);
    assert_eq!(told["verdict"], "failure");
    let reason = told["reason"].as_str().unwrap();
    assert!(reason.contains("disk was full") && reason.contains(data.to_str().unwrap()), "{reason}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("No space left on device"));
    assert_eq!(site.submit(&["--", "echo", "next"]).unwrap().stdout, b"next\n", "nothing of it is left");
    site.finish().unwrap();
}

#[test]
fn a_docker_without_room_is_refused_jobs_and_those_that_run_go_on() {
    let (site, data) = small_docker();
    let first = begin(&site, "echo on; sleep 5; echo off; exit 5");
    first.until("on\n").unwrap();
    fill(&data, 0).unwrap();
    let second = site.begin(&["--", "echo", "on"]).unwrap();
    wait("it is refused", || {
        let jobs = site.json(&["jobs"])?;
        let mut reasons = jobs.as_array().unwrap().iter().filter_map(|job| job["reason"].as_str());
        Ok(reasons.any(|why| why.contains("Docker's disk is full") && why.contains(data.to_str().unwrap())))
    })
    .unwrap();
    let output = first.end().unwrap();
    assert_eq!((code(&output), output.stdout), (5, b"on\noff\n".to_vec()));
    free(&data).unwrap();
    assert_eq!(second.end().unwrap().stdout, b"on\n");
    site.finish().unwrap();
}

/// Docker says itself that its disk is full, at every step from the import of the image on.
#[test]
fn what_docker_has_no_room_for_is_never_the_jobs_fault() {
    let mut site = Site::prepare(&ONE_POOL.replace("cpu_jobs = 2", "cpu_jobs = 1")).unwrap();
    let mut docker = Dockerd::absent(Restart::Ends, None).unwrap();
    // Where the agent cannot see it.
    let data = docker.mount_data("24m").unwrap();
    docker.start().unwrap();
    site.set_docker(docker);
    site.start().unwrap();
    fill(&data, 0).unwrap();
    let mut refusals = 0;
    for (done, leave) in [0, 4, 16, 64, 256, 64, 48, 32, 16, 8, 4, 0].map(|kib| kib * 1024).into_iter().enumerate() {
        fill(&data, leave).unwrap();
        let job = begin(&site, "echo on");
        let mut last = Value::Null;
        wait("it has run, or was refused", || {
            let jobs = site.json(&["jobs", "--all"])?;
            let jobs = jobs.as_array().unwrap();
            last = jobs.iter().max_by_key(|job| job["queued_at"].to_string()).cloned().unwrap_or_default();
            let refused = last["reason"].as_str().is_some_and(|why| why.contains("refused"));
            Ok(jobs.len() > done && (last["state"] == "finished" || refused))
        })
        .unwrap();
        if last["state"] == "finished" {
            let output = job.end().unwrap();
            assert_eq!((code(&output), output.stdout.as_slice()), (0, &b"on\n"[..]), "{leave} bytes left: {last}");
        } else {
            let reason = last["reason"].as_str().unwrap().to_lowercase();
            assert!(reason.contains("no space left"), "{leave} bytes left: {last}");
            refusals += 1;
            site.call(&["cancel", last["id"].as_str().unwrap()]).unwrap();
            assert_eq!(code(&job.end().unwrap()), 130);
        }
    }
    assert!(refusals > 3, "the disk was full");
    free(&data).unwrap();
    assert_eq!(site.submit(&["--", "echo", "next"]).unwrap().stdout, b"next\n");
    site.finish().unwrap();
}

#[test]
fn c39_what_root_left_behind_is_not_there_for_the_next_user() {
    let site = Site::new(ONE_POOL).unwrap();
    let script = "umask 077; for d in /tmp /var/tmp; do mkdir $d/x; echo secret >$d/x/y; done; echo on; sleep 500";
    let job = begin(&site, script);
    job.until("on\n").unwrap();
    // Killed, so that no command of its own could clean up.
    site.call(&["cancel", site.json(&["jobs"]).unwrap()[0]["id"].as_str().unwrap()]).unwrap();
    assert_eq!(code(&job.end().unwrap()), 130);
    let script = "cd /var/tmp && ls -A /tmp . && mkdir x && echo mine >x/y && mkdir /tmp/x && cat x/y; id -u";
    let next = site.submit(&["--user", "1234", "--", "bash", "-c", script]).unwrap();
    assert_eq!(String::from_utf8_lossy(&next.stdout), ".:\n\n/tmp:\nmine\n1234\n", "{}", err(&next));
    assert_eq!(site.json(&["instances", "--all"]).unwrap().as_array().unwrap().len(), 1, "on the same machine");
    site.finish().unwrap();
}
