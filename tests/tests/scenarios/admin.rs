//! What an admin does to a running scaler: changes its config, keeps a machine, loses its database.

use std::fs;

use pilotlight_tests::site::{ONE_POOL, Site, signal, wait};

use super::{code, counting, err, lines, marked, ran};

fn alerts(site: &Site) -> Vec<String> {
    let status = site.json(&["status"]).unwrap();
    status["alerts"].as_array().unwrap().iter().map(|alert| alert["code"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_reload_takes_in_a_good_config_refuses_a_bad_one_and_ends_no_job() {
    let site = Site::new(&ONE_POOL.replace("gpus = 0", "gpus = 0\nmax_instances = 2")).unwrap();
    let job = site.begin(&["--", "bash", "-c", "echo on; while [ ! -e /tmp/go ]; do sleep 0.1; done; exit 3"]).unwrap();
    job.until("on").unwrap();
    let path = site.path("config.toml");
    let good = fs::read_to_string(&path).unwrap();
    let hang_up = || signal(site.scaler_pid().unwrap(), "HUP").unwrap();

    fs::write(&path, good.replace("gpus = 0", "gpus = \"some\"")).unwrap();
    hang_up();
    wait("an alert", || Ok(alerts(&site) == ["reload_failed"])).unwrap();
    assert!(site.logs().contains("placement.here.local.gpus"), "the log names the key");

    // The pool is gone: its machine takes nothing new, its job goes on.
    fs::write(&path, good.replace("[pool.here]", "[pool.there]").replace("pool = \"here\"", "pool = \"there\""))
        .unwrap();
    hang_up();
    wait("the machine drains", || Ok(site.json(&["instances"])?[0]["phase"] == "draining")).unwrap();
    assert_eq!(alerts(&site), [""; 0]);
    let next = site.submit(&["--", "echo", "next"]).unwrap();
    assert_eq!((code(&next), next.stdout), (0, b"next\n".to_vec()), "on a machine of the new pool");
    site.call(&["cancel", site.json(&["jobs"]).unwrap()[0]["id"].as_str().unwrap()]).unwrap();
    assert_eq!(code(&job.end().unwrap()), 130);
    wait("the drained machine is gone", || Ok(site.json(&["instances"])?.as_array().unwrap().len() == 1)).unwrap();
    site.finish().unwrap();
}

#[test]
fn a_held_machine_is_there_after_its_idle_timeout_and_goes_when_released() {
    let site = Site::new(&ONE_POOL.replace("30s", "1s")).unwrap();
    let job = site.begin(&["--", "bash", "-c", "echo on; sleep 2"]).unwrap();
    job.until("on").unwrap();
    let id = site.json(&["instances"]).unwrap()[0]["id"].as_str().unwrap().to_owned();
    let held = site.call(&["hold", &id, "--for", "1h"]).unwrap();
    assert_eq!(code(&held), 0, "{}", err(&held));
    assert_eq!(code(&job.end().unwrap()), 0);
    std::thread::sleep(std::time::Duration::from_secs(3));
    let instances = site.json(&["instances"]).unwrap();
    assert_eq!((&instances[0]["id"], &instances[0]["phase"]), (&id.as_str().into(), &"ready".into()));
    assert_eq!(alerts(&site), ["held"]);
    assert_eq!(code(&site.call(&["release", &id]).unwrap()), 0);
    wait("it goes", || Ok(site.json(&["instances"])?.as_array().unwrap().is_empty())).unwrap();
    site.finish().unwrap();
}

#[test]
fn a_lost_database_loses_neither_the_machine_nor_its_job_nor_a_line() {
    for agent_too in [false, true] {
        let marks = tempfile::tempdir().unwrap();
        let mut site = Site::new(&marked(marks.path())).unwrap();
        let job = site.begin(&["--", "bash", "-c", &counting(100, "0.1", 7)]).unwrap();
        job.until("line 10\n").unwrap();
        let machine = site.json(&["instances"]).unwrap()[0]["id"].clone();
        site.kill_scaler().unwrap();
        if agent_too {
            signal(site.agent_pid().unwrap(), "KILL").unwrap();
        }
        for name in ["pilotlight.db", "pilotlight.db-wal", "pilotlight.db-shm"] {
            let _absent = fs::remove_file(site.state().join(name));
        }
        site.start().unwrap();
        wait("the machine is adopted", || Ok(site.json(&["instances"])?[0]["id"] == machine)).unwrap();
        assert_eq!(site.json(&["jobs"]).unwrap()[0]["state"], "running");
        let output = job.end().unwrap();
        assert_eq!(
            (code(&output), String::from_utf8(output.stdout.clone()).unwrap()),
            (7, lines(100)),
            "{}",
            err(&output)
        );
        assert_eq!(ran(marks.path()), 1);
        let again = site.submit(&["--", "true"]).unwrap();
        assert_eq!(code(&again), 0);
        assert_eq!(site.json(&["jobs", "--all"]).unwrap()[1]["instance"], machine, "it serves on");
        site.finish().unwrap();
    }
}
