//! The life of machines: room, idleness, drains, restarts.

use pilotlight_tests::site::{ONE_POOL, Site, wait};

use super::{code, err, lines};

fn phases(site: &Site) -> Vec<String> {
    let instances = site.json(&["instances"]).unwrap();
    instances.as_array().unwrap().iter().map(|one| one["phase"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn two_jobs_run_at_once_and_the_third_waits() {
    let site = Site::new(ONE_POOL).unwrap();
    let script = "echo on; while [ ! -e /tmp/x ]; do sleep 0.1; done";
    let jobs: Vec<_> = (0..2).map(|_| site.begin(&["--", "bash", "-c", script]).unwrap()).collect();
    for job in &jobs {
        job.until("on").unwrap();
    }
    let third = site.begin(&["--", "echo", "third"]).unwrap();
    wait("the third waits and says why", || {
        Ok(site.json(&["jobs"])?.as_array().unwrap().iter().any(|job| {
            job["state"] == "queued" && job["reason"].as_str().is_some_and(|why| why.contains("max_instances = 1"))
        }))
    })
    .unwrap();
    assert_eq!(phases(&site), ["ready"], "one machine for both");
    for job in site.json(&["jobs"]).unwrap().as_array().unwrap().iter().filter(|job| job["state"] == "running") {
        site.call(&["cancel", job["id"].as_str().unwrap()]).unwrap();
    }
    for job in jobs {
        assert_eq!(code(&job.end().unwrap()), 130);
    }
    assert_eq!(third.end().unwrap().stdout, b"third\n");
    site.finish().unwrap();
}

#[test]
fn an_idle_machine_goes_away_and_is_proved_gone() {
    let site = Site::new(&ONE_POOL.replace("30s", "1s")).unwrap();
    assert_eq!(code(&site.submit(&["--", "true"]).unwrap()), 0);
    wait("no machine", || Ok(phases(&site).is_empty())).unwrap();
    let all = site.json(&["instances", "--all"]).unwrap();
    assert_eq!(all[0]["phase"], "gone");
    assert!(all[0]["cause"].as_str().unwrap().contains("idle"), "{all}");
    assert!(site.instance_dirs().is_empty());
    site.finish().unwrap();
}

#[test]
fn without_reuse_every_job_has_a_machine_of_its_own() {
    let site = Site::new(&ONE_POOL.replace("cpu_jobs = 2", "reuse = false")).unwrap();
    assert_eq!(code(&site.submit(&["--", "true"]).unwrap()), 0);
    let second = site.submit(&["--", "true"]).unwrap();
    assert_eq!(code(&second), 0, "{}", err(&second));
    let jobs = site.json(&["jobs", "--all"]).unwrap();
    assert_ne!(jobs[0]["instance"], jobs[1]["instance"]);
    site.finish().unwrap();
}

#[test]
fn drain_lets_jobs_finish_and_drain_now_does_not() {
    let site = Site::new(ONE_POOL).unwrap();
    let job = site.begin(&["--", "bash", "-c", "for i in $(seq 40); do echo line $i; sleep 0.05; done"]).unwrap();
    job.until("line 3\n").unwrap();
    let instance = site.json(&["instances"]).unwrap()[0]["id"].as_str().unwrap().to_owned();
    assert_eq!(code(&site.call(&["drain", &instance]).unwrap()), 0);
    assert_eq!(phases(&site), ["draining"]);
    let output = job.end().unwrap();
    assert_eq!((code(&output), String::from_utf8_lossy(&output.stdout).into_owned()), (0, lines(40)));
    wait("it is gone", || Ok(phases(&site).is_empty())).unwrap();

    let job = site.begin(&["--", "bash", "-c", "echo on; sleep 500"]).unwrap();
    job.until("on").unwrap();
    assert_eq!(code(&site.call(&["drain", "--all", "--now"]).unwrap()), 0);
    assert!(phases(&site).is_empty(), "drain --all --now waits until all are gone");
    assert_eq!(code(&job.end().unwrap()), 130);

    let waiting = site.begin(&["--", "echo", "on"]).unwrap();
    wait("it waits and says why", || {
        Ok(site.json(&["jobs"])?[0]["reason"].as_str().is_some_and(|why| why.contains("drain --resume")))
    })
    .unwrap();
    assert_eq!(code(&site.call(&["drain", "--resume"]).unwrap()), 0);
    assert_eq!(waiting.end().unwrap().stdout, b"on\n");
    site.finish().unwrap();
}

#[test]
fn a_stopped_scaler_leaves_jobs_running_and_takes_them_up_again() {
    let mut site = Site::new(ONE_POOL).unwrap();
    let job =
        site.begin(&["--", "bash", "-c", "for i in $(seq 60); do echo line $i; sleep 0.05; done; exit 9"]).unwrap();
    job.until("line 5\n").unwrap();
    let instance = site.json(&["instances"]).unwrap()[0]["id"].clone();
    let agent = site.agent_pid().unwrap();
    assert_eq!(site.stop_scaler().unwrap().code(), Some(0));
    assert!(site.logs().contains("agents and their jobs go on"));
    site.start().unwrap();
    let output = job.end().unwrap();
    assert_eq!(
        (code(&output), String::from_utf8_lossy(&output.stdout).into_owned()),
        (9, lines(60)),
        "{}",
        err(&output)
    );
    assert_eq!(site.json(&["instances"]).unwrap()[0]["id"], instance);
    assert_eq!(site.agent_pid().unwrap(), agent, "the same agent");
    site.finish().unwrap();
}

#[test]
fn listings_have_the_shapes_that_scripts_rely_on() {
    let site = Site::new(ONE_POOL).unwrap();
    let detached = site.submit(&["--detach", "--name", "evil\u{1b}[31m\nname", "--", "echo", "x"]).unwrap();
    let id = String::from_utf8(detached.stdout).unwrap().trim().to_owned();
    let log = site.call(&["logs", "--follow", &id]).unwrap();
    assert_eq!(log.stdout, b"x\n");
    let table = site.call(&["jobs", "--all"]).unwrap().stdout;
    assert!(!table.contains(&0x1b) && table.iter().filter(|byte| **byte == b'\n').count() == 2, "escaped");
    let keys = |value: &serde_json::Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    let has = |value: &serde_json::Value, wanted: &[&str]| {
        let keys = keys(value);
        assert!(wanted.iter().all(|key| keys.iter().any(|have| have == key)), "{keys:?}");
    };
    has(
        &site.json(&["jobs", "--all"]).unwrap()[0],
        &[
            "id",
            "forge",
            "name",
            "label",
            "state",
            "verdict",
            "exit_code",
            "reason",
            "instance",
            "gpus",
            "queued_at",
            "started_at",
            "finished_at",
            "phases",
        ],
    );
    has(
        &site.json(&["instances"]).unwrap()[0],
        &[
            "id",
            "pool",
            "placement",
            "provider",
            "phase",
            "gpus",
            "assignments",
            "created_at",
            "ready_at",
            "expires_at",
            "cause",
        ],
    );
    wait("a sample of the host", || Ok(site.json(&["instances"])?[0]["sample"]["memory_used_bytes"].is_u64())).unwrap();
    has(&site.json(&["status"]).unwrap(), &["instances", "jobs_queued", "jobs_running", "pools", "alerts"]);
    site.finish().unwrap();
}
