//! Somebody sets a clock, of the scaler's box, of a machine, of a client: no job is killed for it, no machine stays for
//! it, and times do not go back.

use std::{fs, path::Path, time::Duration};

use jiff::Timestamp;
use pilotlight_runtime::clock::boottime;
use pilotlight_tests::{
    clock::{FakeClock, script},
    site::{ONE_POOL, Site, program, signal, wait, wait_within},
};
use serde_json::Value;

use super::{UNTIL_TOLD, code, err, instances, job, last, lines, marked, pause, ran};

const TWO_HOURS: i64 = 2 * 3600;
/// A grace that would never end if every look at the clock began a new one.
const LONG_LEASE: &str = "lease = \"15s\"";
const DAYS_400: i64 = 400 * 86_400;

/// A pool in which two hours are past every bound: the job's deadline, the machine's lifetime, its idle time.
fn bounded(marks: &Path) -> String {
    let pool = "max_lifetime = \"1h\"\nidle_timeout = \"5m\"";
    let config =
        marked(marks).replace("idle_timeout = \"30s\"", pool).replacen("pool = ", "timeout = \"30m\"\npool = ", 1);
    format!("lease = \"8s\"\n{config}")
}

fn site(config: &str, clock: &FakeClock) -> Site {
    let mut site = Site::prepare(config).unwrap();
    for (name, value) in clock.env() {
        site.scaler_env(name, value);
    }
    site.start().unwrap();
    site
}

/// Sets the scaler's clock and waits until it says so, and until the grace that follows is over.
fn step(site: &Site, clock: &FakeClock, offset: i64, told: &str) {
    clock.set(offset).unwrap();
    alerted(site, told);
    pause(Duration::from_secs(10));
}

fn alerted(site: &Site, told: &str) {
    wait(told, || {
        let status = site.json(&["status"])?;
        let alerts = status["alerts"].as_array().into_iter().flatten();
        Ok(alerts
            .filter(|it| it["code"] == "clock_stepped")
            .any(|it| it["message"].as_str().is_some_and(|it| it.contains(told))))
    })
    .unwrap();
}

/// The times of a job's phases, in the order in which they come.
fn in_order(job: &Value) {
    let names =
        ["queued", "planned", "launched", "booted", "enrolled", "assigned", "image_ready", "started", "finished"];
    let times: Vec<&str> = names.iter().filter_map(|name| job["phases"][name].as_str()).collect();
    assert!(times.is_sorted(), "{job}");
}

fn steps_are_survived(steps: &[(i64, &str)]) {
    let (marks, clock) = (tempfile::tempdir().unwrap(), FakeClock::new().unwrap());
    let site = site(&bounded(marks.path()), &clock);
    let running = site.begin(&["--name", "stepped", "--", "bash", "-c", UNTIL_TOLD]).unwrap();
    running.until("line 20\n").unwrap();
    for &(offset, told) in steps {
        step(&site, &clock, offset, told);
        assert_eq!(job(&site, "stepped")["state"], "running", "{}", site.logs());
        assert_eq!(instances(&site)[0]["phase"], "ready");
    }
    fs::write(marks.path().join("stop"), "").unwrap();
    let output = running.end().unwrap();
    assert_eq!((code(&output), ran(marks.path())), (5, 1), "{}", err(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), lines(last(marks.path())));
    in_order(&job(&site, "stepped"));
    // And with nothing to do: its idle time is not over because a clock says so.
    for &(offset, told) in steps {
        step(&site, &clock, offset, told);
    }
    assert_eq!(instances(&site).len(), 1);
    assert_eq!(instances(&site)[0]["phase"], "ready", "{}", site.logs());
    let jobs = site.json(&["jobs", "--all"]).unwrap();
    assert_eq!(jobs.as_array().unwrap().len(), 1, "what is over is remembered: {jobs}");
    site.finish().unwrap();
}

#[test]
fn the_scalers_clock_goes_two_hours_ahead_and_back() {
    steps_are_survived(&[(TWO_HOURS, "2h ahead"), (0, "2h back")]);
}

#[test]
fn the_scalers_clock_goes_two_hours_back_and_ahead() {
    steps_are_survived(&[(-TWO_HOURS, "2h back"), (0, "2h ahead")]);
}

#[test]
fn the_scalers_clock_goes_400_days_ahead_and_back() {
    steps_are_survived(&[(DAYS_400, "400d ahead"), (0, "400d back")]);
}

/// An agent that boots for ever.
fn never_enrols(dir: &Path) -> String {
    let real = program("pilotlight-agent").get_program().to_owned();
    let text = format!("case \"$1\" in run) exec sleep 600;; esac\nexec {real:?} \"$@\"");
    let agent = script(&dir.join("agent"), &text).unwrap();
    ONE_POOL.replace("gpus = 0", &format!("gpus = 0\nagent = {agent:?}"))
}

fn boots_for_its_time(offset: i64, told: &str) {
    let (dir, clock) = (tempfile::tempdir().unwrap(), FakeClock::new().unwrap());
    let config = never_enrols(dir.path()).replace("idle_timeout", "boot_timeout = \"45s\"\nidle_timeout");
    let site = site(&format!("{LONG_LEASE}\n{config}"), &clock);
    let waiting = site.begin(&["--name", "waits", "--", "true"]).unwrap();
    wait("a machine boots", || Ok(instances(&site).iter().any(|it| it["phase"] == "booting"))).unwrap();
    let began = boottime();
    step(&site, &clock, offset, told);
    let phase = instances(&site)[0]["phase"].clone();
    if boottime() - began < Duration::from_secs(35) {
        assert_eq!(phase, "booting", "{}", site.logs());
    }
    wait_within(Duration::from_secs(120), "it is given up all the same", || {
        let first = &instances(&site)[0];
        Ok(first["phase"] == "gone" && first["cause"].as_str().is_some_and(|why| why.contains("enrol")))
    })
    .unwrap();
    let id = job(&site, "waits")["id"].as_str().unwrap().to_owned();
    assert_eq!(code(&site.call(&["cancel", &id]).unwrap()), 0);
    assert_eq!(code(&waiting.end().unwrap()), 130);
    site.finish().unwrap();
}

#[test]
fn a_machine_boots_while_the_scalers_clock_goes_ahead() {
    boots_for_its_time(TWO_HOURS, "2h ahead");
}

#[test]
fn a_machine_boots_while_the_scalers_clock_goes_back() {
    boots_for_its_time(-TWO_HOURS, "2h back");
}

#[test]
fn a_scaler_that_starts_with_its_clock_in_the_past_goes_on_from_the_time_it_had_reached() {
    let (marks, clock) = (tempfile::tempdir().unwrap(), FakeClock::new().unwrap());
    let mut site = site(&bounded(marks.path()).replace("lease = \"8s\"", LONG_LEASE), &clock);
    let running = site.begin(&["--name", "across", "--", "bash", "-c", UNTIL_TOLD]).unwrap();
    running.until("line 20\n").unwrap();
    assert_eq!(code(&site.submit(&["--name", "before", "--", "true"]).unwrap()), 0);
    site.stop_scaler().unwrap();
    clock.set(-TWO_HOURS).unwrap();
    site.start().unwrap();
    alerted(&site, "2h back");
    assert_eq!(code(&site.submit(&["--name", "after", "--", "true"]).unwrap()), 0);
    assert!(job(&site, "before")["finished_at"].as_str() <= job(&site, "after")["queued_at"].as_str());
    fs::write(marks.path().join("stop"), "").unwrap();
    let output = running.end().unwrap();
    assert_eq!((code(&output), ran(marks.path())), (5, 1), "{}", err(&output));
    for name in ["before", "after", "across"] {
        in_order(&job(&site, name));
    }
    // The clock stays behind, and that is no reason to let a dead machine live.
    signal(site.agent_pid().unwrap(), "STOP").unwrap();
    wait_within(Duration::from_secs(180), "a silent machine is judged dead", || {
        let first = &instances(&site)[0];
        Ok(first["phase"] == "gone" && first["cause"].as_str().is_some_and(|why| why.contains("silent")))
    })
    .unwrap();
    site.finish().unwrap();
}

#[test]
fn a_clock_that_is_set_while_no_scaler_runs_ends_no_job() {
    let (marks, clock) = (tempfile::tempdir().unwrap(), FakeClock::new().unwrap());
    let mut site = site(&bounded(marks.path()), &clock);
    let running = site.begin(&["--name", "across", "--", "bash", "-c", UNTIL_TOLD]).unwrap();
    running.until("line 20\n").unwrap();
    site.stop_scaler().unwrap();
    clock.set(DAYS_400).unwrap();
    site.start().unwrap();
    alerted(&site, "ahead");
    pause(Duration::from_secs(12));
    assert_eq!(job(&site, "across")["state"], "running", "{}", site.logs());
    fs::write(marks.path().join("stop"), "").unwrap();
    let output = running.end().unwrap();
    assert_eq!((code(&output), ran(marks.path())), (5, 1), "{}", err(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), lines(last(marks.path())));
    in_order(&job(&site, "across"));
    site.finish().unwrap();
}

#[test]
fn the_agents_clock_ends_no_job_and_keeps_none() {
    let (marks, clock) = (tempfile::tempdir().unwrap(), FakeClock::new().unwrap());
    let agent = clock.wrap(Path::new(program("pilotlight-agent").get_program())).unwrap();
    let site = Site::new(&marked(marks.path()).replace("gpus = 0", &format!("gpus = 0\nagent = {agent:?}"))).unwrap();
    let running = site.begin(&["--name", "stepped", "--timeout", "10m", "--", "bash", "-c", UNTIL_TOLD]).unwrap();
    running.until("line 20\n").unwrap();
    for offset in [TWO_HOURS, -TWO_HOURS, DAYS_400] {
        clock.set(offset).unwrap();
        // One that lives through it, and one that starts with it.
        pause(Duration::from_secs(2));
        let before = site.agent_pid().unwrap();
        signal(before, "KILL").unwrap();
        wait("the next agent", || Ok(site.agent_pid()? != before)).unwrap();
        let so_far = running.stdout().len();
        wait("the log goes on", || Ok(running.stdout().len() > so_far)).unwrap();
    }
    fs::write(marks.path().join("stop"), "").unwrap();
    let output = running.end().unwrap();
    assert_eq!((code(&output), ran(marks.path())), (5, 1), "{}", err(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), lines(last(marks.path())));
    // It did go by that clock: its log is of a time to come.
    let logged = fs::read_to_string(site.instance_dirs()[0].join("agent.log")).unwrap();
    let latest = logged.lines().filter_map(|line| line.split_once(' ')?.0.parse::<Timestamp>().ok()).max().unwrap();
    let queued: Timestamp = job(&site, "stepped")["queued_at"].as_str().unwrap().parse().unwrap();
    assert!(latest.duration_since(queued).as_hours() > 399 * 24, "{latest}");
    // A job has the time it was given, by a clock that nobody can set.
    for (n, offset) in [-DAYS_400, TWO_HOURS].into_iter().enumerate() {
        let name = format!("limited {n}");
        let limited =
            site.begin(&["--name", &name, "--timeout", "8s", "--", "bash", "-c", "echo on; sleep 600"]).unwrap();
        limited.until("on\n").unwrap();
        clock.set(offset).unwrap();
        let output = limited.end().unwrap();
        assert_eq!(code(&output), 124, "{}", err(&output));
        let usage = job(&site, &name)["usage"]["wall_seconds"].as_f64().unwrap();
        assert!((5.0..60.0).contains(&usage), "{usage}");
    }
    for job in site.json(&["jobs", "--all"]).unwrap().as_array().unwrap() {
        in_order(job);
    }
    assert_eq!(instances(&site).len(), 1);
    site.finish().unwrap();
}

#[test]
fn a_clients_clock_changes_nothing() {
    let (marks, clock) = (tempfile::tempdir().unwrap(), FakeClock::new().unwrap());
    let site = Site::new(&marked(marks.path())).unwrap();
    let running = site.begin_with(&clock.env(), &["--name", "stepped", "--", "bash", "-c", UNTIL_TOLD]).unwrap();
    running.until("line 20\n").unwrap();
    for offset in [TWO_HOURS, -TWO_HOURS, DAYS_400, 0] {
        clock.set(offset).unwrap();
        let so_far = running.stdout().len();
        wait("the log goes on", || Ok(running.stdout().len() > so_far)).unwrap();
        for listing in ["jobs", "instances", "status", "plan"] {
            let output = site.client(&[listing]).envs(clock.env()).output().unwrap();
            assert_eq!(code(&output), 0, "{}", err(&output));
        }
    }
    fs::write(marks.path().join("stop"), "").unwrap();
    let output = running.end().unwrap();
    assert_eq!((code(&output), ran(marks.path())), (5, 1), "{}", err(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), lines(last(marks.path())));
    site.finish().unwrap();
}
