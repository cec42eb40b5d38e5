//! Docker restarted, killed and away, while jobs wait, run and end.

use std::fs;

use pilotlight_tests::{
    dockerd::{Dockerd, Restart},
    site::{ONE_POOL, Site, wait},
};
use serde_json::Value;

use super::{code, err, lines};

const GAP: &str = "[pilotlight] output may be missing here";

/// Numbered lines until a file appears, then a code. Its own host image has no marks, so the file is in its `/tmp`.
fn counting(n: u32, pause: &str, code: u32) -> String {
    format!("for i in $(seq {n}); do echo line $i; sleep {pause}; done; exit {code}")
}

/// Every line is there once and in order, or there is a word on what is missing.
fn assert_lines(output: &std::process::Output, n: u32, told: &Value) {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let job: String = text.lines().filter(|line| !line.contains(GAP)).map(|line| format!("{line}\n")).collect();
    let mut numbers = job.lines().map(|line| line.strip_prefix("line ").unwrap().parse::<u32>().unwrap());
    assert!(numbers.clone().is_sorted_by(|a, b| a < b), "{text}");
    assert_eq!(numbers.next_back(), Some(n), "{text}");
    if job != lines(n) {
        assert!(text.contains(GAP), "lines are missing without a word: {text}");
    }
    assert_eq!(told["log_gap"], text.contains(GAP), "{text}");
}

fn told(site: &Site) -> Value {
    serde_json::from_slice(&fs::read(site.path("result.json")).unwrap()).unwrap()
}

fn begin(site: &Site, script: &str) -> pilotlight_tests::site::Submit {
    let result = site.path("result.json");
    site.begin(&["--result-file", result.to_str().unwrap(), "--", "bash", "-c", script]).unwrap()
}

/// A site with a Docker of its own.
fn site(restart: Restart) -> Site {
    Site::with_docker(ONE_POOL, Dockerd::new(restart).unwrap()).unwrap()
}

/// The job was not to blame, and did not succeed either.
fn assert_infrastructure(site: &Site, output: &std::process::Output, reason: &str) {
    assert_eq!(code(output), 75, "{}", err(output));
    let told = told(site);
    assert_eq!((&told["verdict"], &told["exit_code"]), (&"infrastructure".into(), &Value::Null), "{told}");
    assert!(told["reason"].as_str().unwrap().contains(reason), "{told}");
}

fn goes_on(how: fn(&mut Dockerd) -> anyhow::Result<()>) {
    let mut site = site(Restart::Keeps);
    let job = begin(&site, &counting(250, "0.05", 7));
    job.until("line 10\n").unwrap();
    how(site.dockerd().unwrap()).unwrap();
    site.dockerd().unwrap().start().unwrap();
    let output = job.end().unwrap();
    assert_eq!(code(&output), 7, "{}", err(&output));
    assert_lines(&output, 250, &told(&site));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains(GAP), "the stream was reopened, and nobody knows what was in it: {text}");
    let next = site.submit(&["--", "echo", "next"]).unwrap();
    assert_eq!(next.stdout, b"next\n", "{}", err(&next));
    site.finish().unwrap();
}

#[test]
fn a_restart_with_live_restore_does_not_touch_a_job() {
    goes_on(Dockerd::stop);
}

#[test]
fn a_killed_dockerd_with_live_restore_does_not_touch_a_job() {
    goes_on(Dockerd::kill);
}

/// Docker's own code for such a job is what its containers make of SIGTERM, or 255.
fn ends_with_docker(restart: Restart, script: &str, how: fn(&mut Dockerd) -> anyhow::Result<()>, reason: &str) {
    let mut site = site(restart);
    let job = begin(&site, script);
    job.until("line 3\n").unwrap();
    how(site.dockerd().unwrap()).unwrap();
    site.dockerd().unwrap().start().unwrap();
    let output = job.end().unwrap();
    assert_infrastructure(&site, &output, reason);
    let next = site.submit(&["--", "sh", "-c", "echo next; exit 143"]).unwrap();
    assert_eq!((code(&next), next.stdout), (143, b"next\n".to_vec()), "a job's own 143 is still its own");
    site.finish().unwrap();
}

const ENDS_THEM: &str = "ends containers unless live-restore is set";

#[test]
fn a_restart_without_live_restore_is_not_the_jobs_fault() {
    ends_with_docker(Restart::Ends, &counting(3000, "0.05", 7), Dockerd::stop, ENDS_THEM);
}

#[test]
fn a_job_that_takes_the_stop_for_a_success_did_not_succeed() {
    let script = format!("trap 'exit 0' TERM; {}", counting(3000, "0.05", 7));
    ends_with_docker(Restart::Ends, &script, Dockerd::stop, ENDS_THEM);
}

#[test]
fn a_killed_dockerd_without_live_restore_is_not_the_jobs_fault() {
    ends_with_docker(Restart::Ends, &counting(3000, "0.05", 7), Dockerd::kill, ENDS_THEM);
}

#[test]
fn a_docker_that_dies_with_all_it_has_is_not_the_jobs_fault() {
    let lost = "nobody knows how it ended";
    ends_with_docker(Restart::Keeps, &counting(3000, "0.05", 7), Dockerd::kill_all, lost);
    ends_with_docker(Restart::Ends, &counting(3000, "0.05", 7), Dockerd::kill_all, ENDS_THEM);
}

/// As where systemd holds Docker's socket: no call ever fails.
#[test]
fn a_restart_that_only_makes_calls_wait_is_seen_all_the_same() {
    for (restart, script) in [(Restart::Ends, counting(3000, "0.05", 7)), (Restart::Keeps, counting(250, "0.05", 7))] {
        let mut docker = Dockerd::absent(restart, None).unwrap();
        docker.hold_socket().unwrap();
        docker.start().unwrap();
        let mut site = Site::with_docker(ONE_POOL, docker).unwrap();
        let job = begin(&site, &script);
        job.until("line 3\n").unwrap();
        site.dockerd().unwrap().stop().unwrap();
        site.dockerd().unwrap().start().unwrap();
        let output = job.end().unwrap();
        match restart {
            Restart::Ends => assert_infrastructure(&site, &output, ENDS_THEM),
            Restart::Keeps => {
                assert_eq!(code(&output), 7, "{}", err(&output));
                assert_lines(&output, 250, &told(&site));
            }
        }
        site.finish().unwrap();
    }
}

/// Measured: such a job has the exit code 255 when dockerd is back.
#[test]
fn a_job_that_ends_while_dockerd_stops_has_its_own_code() {
    let mut site = site(Restart::Keeps);
    let script = "echo line 1; while [ -e /proc/1 ]; do sleep 0.1; [ $SECONDS -lt 3 ] || break; done; exit 7";
    let job = begin(&site, script);
    job.until("line 1\n").unwrap();
    // It waits for its callers for five seconds, and one of them waits for the job.
    site.dockerd().unwrap().stop().unwrap();
    site.dockerd().unwrap().start().unwrap();
    let output = job.end().unwrap();
    assert_eq!(code(&output), 7, "{}", err(&output));
    site.finish().unwrap();
}

#[test]
fn a_job_that_ends_while_docker_is_away_has_its_own_code() {
    let mut site = site(Restart::Keeps);
    for want in [0, 9, 143] {
        let job = begin(&site, &format!("echo line 1; sleep 2; exit {want}"));
        job.until("line 1\n").unwrap();
        let container = site.containers().unwrap().remove(0);
        site.dockerd().unwrap().kill().unwrap();
        wait("the job has ended", || Ok(!site.runs_container(&container))).unwrap();
        assert_eq!(site.json(&["jobs"]).unwrap()[0]["state"], "running", "nobody knows yet");
        site.dockerd().unwrap().start().unwrap();
        let output = job.end().unwrap();
        assert_eq!(code(&output), want, "{}", err(&output));
        assert_lines(&output, 1, &told(&site));
    }
    site.finish().unwrap();
}

#[test]
fn a_job_waits_for_a_docker_that_is_away() {
    let mut site = site(Restart::Ends);
    assert_eq!(code(&site.submit(&["--", "true"]).unwrap()), 0);
    site.dockerd().unwrap().stop().unwrap();
    let job = begin(&site, "echo line 1");
    wait("the agent has seen that Docker is away", || Ok(site.logs().contains("Docker does not answer"))).unwrap();
    site.dockerd().unwrap().start().unwrap();
    let output = job.end().unwrap();
    assert_eq!((code(&output), output.stdout), (0, b"line 1\n".to_vec()));
    let jobs = site.json(&["jobs", "--all"]).unwrap();
    assert_eq!(jobs.as_array().unwrap().len(), 2, "{jobs}");

    // One that is not wanted any more does not wait.
    site.dockerd().unwrap().stop().unwrap();
    let job = begin(&site, "echo line 1");
    wait("it is on the machine", || Ok(site.json(&["jobs"])?[0]["state"] == "assigned")).unwrap();
    site.call(&["cancel", site.json(&["jobs"]).unwrap()[0]["id"].as_str().unwrap()]).unwrap();
    assert_eq!(code(&job.end().unwrap()), 130);
    site.dockerd().unwrap().start().unwrap();
    site.finish().unwrap();
}

#[test]
fn a_machine_whose_docker_is_away_is_not_gone_before_it_is() {
    let mut site = site(Restart::Keeps);
    let job = begin(&site, "echo line 1; sleep 500");
    job.until("line 1\n").unwrap();
    site.dockerd().unwrap().kill().unwrap();
    let mut drain = site.client(&["drain", "--all", "--now"]).spawn().unwrap();
    // The job is cancelled without Docker: its processes are killed. What Docker has of it stays.
    wait("destroying fails and is said to", || Ok(site.json(&["status"])?["alerts"].to_string().contains("Docker")))
        .unwrap();
    assert_eq!(site.json(&["instances"]).unwrap()[0]["phase"], "terminating");
    assert!(drain.try_wait().unwrap().is_none(), "not gone, not said to be gone");
    site.dockerd().unwrap().start().unwrap();
    let mut status = None;
    wait("it is gone", || {
        status = drain.try_wait()?;
        Ok(status.is_some())
    })
    .unwrap();
    assert!(status.unwrap().success());
    let output = job.end().unwrap();
    assert!([75, 130].contains(&code(&output)), "{}", err(&output));
    site.finish().unwrap();
}

#[test]
fn a_machine_without_docker_is_given_no_job() {
    let docker = Dockerd::absent(Restart::Ends, None).unwrap();
    let mut site = Site::with_docker(ONE_POOL, docker).unwrap();
    let job = begin(&site, "echo line 1");
    wait("the machine is unhealthy", || {
        Ok(site.json(&["instances", "--all"])?[0]["cause"].as_str().is_some_and(|cause| cause.contains("Docker")))
    })
    .unwrap();
    assert_eq!(site.json(&["jobs"]).unwrap()[0]["state"], "queued", "the job is not lost");
    site.dockerd().unwrap().start().unwrap();
    wait("it is gone", || Ok(site.json(&["instances"])?.as_array().is_some_and(Vec::is_empty))).unwrap();
    site.call(&["cancel", site.json(&["jobs"]).unwrap()[0]["id"].as_str().unwrap()]).unwrap();
    assert_eq!(code(&job.end().unwrap()), 130);
    site.finish().unwrap();
}
