//! The network between scaler, agents and clients is cut: in each direction, at each stage, for shorter and for longer
//! than the lease. What the job's author sees is the same, or one honest word.

use std::{fs, time::Duration};

use pilotlight_runtime::clock::boottime;
use pilotlight_tests::{
    clock::FakeClock,
    net::{CLIENTS, Cut, Net, Whose},
    site::{ONE_POOL, Site, signal, wait, wait_within},
};
use serde_json::Value;

use super::{UNTIL_TOLD, code, counting, err, instances, job, last, lines, marked, pause, ran};

// Leases below are short, but long enough for a machine that is busy with other things; see `hold` in the scaler.

/// How long a cut lasts that nobody may notice: a sample is due in it, and with it a new connection.
const SHORT: Duration = Duration::from_secs(6);

fn site(config: &str) -> (Net, Site) {
    let net = Net::enter().unwrap();
    let mut site = Site::prepare(config).unwrap();
    site.clients_dial(CLIENTS);
    site.start().unwrap();
    (net, site)
}

/// Whether the one agent has a file of this name in some assignment.
fn assignment_has(site: &Site, name: &str) -> bool {
    let dirs = site.instance_dirs();
    dirs.iter().any(|dir| {
        fs::read_dir(dir.join("assignments")).into_iter().flatten().flatten().any(|it| it.path().join(name).exists())
    })
}

fn agent_said(site: &Site, text: &str) -> bool {
    site.instance_dirs().iter().any(|dir| fs::read_to_string(dir.join("agent.log")).unwrap_or_default().contains(text))
}

fn short_cuts_are_not_noticed(cut: Cut) {
    let marks = tempfile::tempdir().unwrap();
    let (net, site) = site(&marked(marks.path()));
    // Enrolment.
    net.cut(Whose::Agents, cut).unwrap();
    let first = site.begin(&["--", "echo", "first"]).unwrap();
    wait("enrolment fails, for the agent", || {
        Ok(match cut {
            Cut::Answers => instances(&site).iter().any(|it| it["phase"] == "ready"),
            _ => agent_said(&site, "not enrolled"),
        })
    })
    .unwrap();
    net.heal().unwrap();
    assert_eq!(first.end().unwrap().stdout, b"first\n");

    // The held sync, and the `Start` that it is to bring.
    wait("the first job is forgotten", || Ok(!assignment_has(&site, "assignment.json"))).unwrap();
    net.cut(Whose::Agents, cut).unwrap();
    let second = site.begin(&["--name", "second", "--", "bash", "-c", UNTIL_TOLD]).unwrap();
    wait("it is given to the machine", || Ok(job(&site, "second")["state"] == "assigned")).unwrap();
    pause(SHORT);
    // Where only requests are lost, the answer to the sync that was held comes through.
    assert!(cut == Cut::Requests || !assignment_has(&site, "assignment.json"), "it cannot have arrived");
    net.heal().unwrap();

    // `started`.
    wait("it has arrived", || Ok(assignment_has(&site, "assignment.json"))).unwrap();
    net.cut(Whose::Agents, cut).unwrap();
    wait("it runs", || Ok(ran(marks.path()) > 0)).unwrap();
    pause(SHORT);
    net.heal().unwrap();
    second.until("line 50\n").unwrap();

    // The log.
    net.cut(Whose::Agents, cut).unwrap();
    pause(SHORT);
    let so_far = second.stdout();
    net.heal().unwrap();
    wait("the log goes on", || Ok(second.stdout().len() > so_far.len())).unwrap();

    // `finished`.
    net.cut(Whose::Agents, cut).unwrap();
    fs::write(marks.path().join("stop"), "").unwrap();
    wait("it is over, and that is to be said", || Ok(assignment_has(&site, "events/2.json"))).unwrap();
    pause(SHORT);
    if matches!(cut, Cut::Requests | Cut::Resets) {
        assert_ne!(job(&site, "second")["state"], "finished");
    }
    net.heal().unwrap();
    let output = second.end().unwrap();
    assert_eq!((code(&output), ran(marks.path())), (5, 1), "{}", err(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), lines(last(marks.path())));
    assert_eq!(job(&site, "second")["log_gap"], false);
    assert_eq!(instances(&site).len(), 1, "the same machine all the time");

    // `Terminate`: the scaler proves the machine gone all the same.
    net.cut(Whose::Agents, cut).unwrap();
    site.finish().unwrap();
}

#[test]
fn lost_requests_at_every_stage() {
    short_cuts_are_not_noticed(Cut::Requests);
}

#[test]
fn lost_replies_at_every_stage() {
    short_cuts_are_not_noticed(Cut::Replies);
}

#[test]
fn lost_answers_at_every_stage() {
    short_cuts_are_not_noticed(Cut::Answers);
}

#[test]
fn resets_at_every_stage() {
    short_cuts_are_not_noticed(Cut::Resets);
}

/// The first machine's phase and cause.
fn first(site: &Site) -> (String, String) {
    let instance = &instances(site)[0];
    let text = |key: &str| instance[key].as_str().unwrap_or_default().to_owned();
    (text("phase"), text("cause"))
}

/// [`ONE_POOL`] with keys of the top level and of the pool.
fn leased(top: &str, pool: &str) -> String {
    format!("{top}\n{}", ONE_POOL.replace("idle_timeout = \"30s\"\n", &format!("{pool}\n")))
}

fn done(site: &Site) -> Option<String> {
    site.instance_dirs().iter().find_map(|dir| fs::read_to_string(dir.join("done")).ok())
}

#[test]
fn a_short_lease_is_enough_for_a_machine_with_nothing_to_say() {
    let (_net, site) = site(&leased("lease = \"9s\"", ""));
    assert_eq!(code(&site.submit(&["--", "true"]).unwrap()), 0);
    pause(Duration::from_secs(15));
    assert_eq!((first(&site).0, instances(&site).len()), ("ready".to_owned(), 1), "{}", site.logs());
    site.finish().unwrap();
}

fn without_a_job_the_machine_ends_itself_and_jobs_get_another(cut: Cut) {
    let (net, site) = site(&leased("lease = \"8s\"", "idle_timeout = \"10m\""));
    assert_eq!(code(&site.submit(&["--", "true"]).unwrap()), 0);
    wait("the job is forgotten", || Ok(!assignment_has(&site, "assignment.json"))).unwrap();
    let agent = site.agent_pid().unwrap();
    net.cut(Whose::Agents, cut).unwrap();
    // Before the scaler knows anything, by its own clock.
    wait("the agent has left", || Ok(done(&site).is_some_and(|why| why == "lapsed") || first(&site).0 == "gone"))
        .unwrap();
    wait("the machine is proved gone", || Ok(first(&site).0 == "gone")).unwrap();
    assert!(first(&site).1.contains("lapsed"), "{:?}", first(&site));
    assert!(!pilotlight_tests::site::alive(agent));
    let waiting = site.begin(&["--", "echo", "on"]).unwrap();
    wait("another machine is launched", || Ok(instances(&site).len() == 2)).unwrap();
    net.heal().unwrap();
    assert_eq!(waiting.end().unwrap().stdout, b"on\n");
    site.finish().unwrap();
}

#[test]
fn requests_lost_past_the_lease_without_a_job() {
    without_a_job_the_machine_ends_itself_and_jobs_get_another(Cut::Requests);
}

#[test]
fn answers_lost_past_the_lease_without_a_job() {
    without_a_job_the_machine_ends_itself_and_jobs_get_another(Cut::Answers);
}

#[test]
fn cut_off_past_the_lease_without_a_job() {
    without_a_job_the_machine_ends_itself_and_jobs_get_another(Cut::Everything);
}

#[test]
fn a_success_that_was_heard_stays_one_when_its_machine_hears_nothing_and_is_ended() {
    let marks = tempfile::tempdir().unwrap();
    let config = marked(marks.path()).replace("idle_timeout", "lost_after = \"5s\"\nidle_timeout");
    let (net, site) = site(&format!("lease = \"8s\"\n{}", config.replace("\"30s\"", "\"10m\"")));
    // Its output is through before the cut: of a chunk whose answer is lost nobody knows where the next begins.
    let script = "echo ran >> /marks/ran; for i in $(seq 20); do echo line $i; done; \
                  until [ -e /marks/stop ]; do sleep 0.1; done; exit 5";
    let heard = site.begin(&["--name", "heard", "--", "bash", "-c", script]).unwrap();
    heard.until("line 20\n").unwrap();
    net.cut(Whose::Agents, Cut::Answers).unwrap();
    fs::write(marks.path().join("stop"), "").unwrap();
    let output = heard.end().unwrap();
    assert_eq!((code(&output), ran(marks.path())), (5, 1), "{}", err(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), lines(20));
    // From now on nothing arrives at all.
    net.cut(Whose::Agents, Cut::Everything).unwrap();
    wait_within(Duration::from_secs(180), "the silent machine is ended", || Ok(first(&site).0 == "gone")).unwrap();
    let view = job(&site, "heard");
    assert_eq!((&view["verdict"], &view["log_gap"]), (&Value::from("failure"), &Value::from(false)));
    assert_eq!((&view["exit_code"], ran(marks.path())), (&Value::from(5), 1));
    net.heal().unwrap();
    site.finish().unwrap();
}

#[test]
fn cut_past_the_lease_with_a_job_its_result_is_kept_until_somebody_hears_it() {
    let marks = tempfile::tempdir().unwrap();
    let (net, site) = site(&format!("lease = \"8s\"\n{}", marked(marks.path())));
    let kept = site.begin(&["--name", "kept", "--", "bash", "-c", UNTIL_TOLD]).unwrap();
    kept.until("line 20\n").unwrap();
    net.cut(Whose::Agents, Cut::Everything).unwrap();
    // Far past the lease with the job, then far past it without.
    pause(Duration::from_secs(15));
    fs::write(marks.path().join("stop"), "").unwrap();
    wait("it is over", || Ok(assignment_has(&site, "events/2.json"))).unwrap();
    pause(Duration::from_secs(15));
    assert_eq!(job(&site, "kept")["state"], "running", "nobody was told");
    assert_eq!(done(&site), None);
    net.heal().unwrap();
    let output = kept.end().unwrap();
    assert_eq!((code(&output), ran(marks.path())), (5, 1), "{}", err(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), lines(last(marks.path())));
    assert_eq!(instances(&site).len(), 1, "and the machine goes on");
    assert_eq!(code(&site.submit(&["--", "true"]).unwrap()), 0);
    assert_eq!(instances(&site).len(), 1);
    site.finish().unwrap();
}

#[test]
fn cut_past_lost_after_a_job_is_lost_once_its_machine_is_gone_and_never_a_success_as_well() {
    let marks = tempfile::tempdir().unwrap();
    let config = marked(marks.path()).replace("idle_timeout", "lost_after = \"20s\"\nidle_timeout");
    let (net, site) = site(&format!("lease = \"8s\"\n{config}"));
    let lost = site.begin(&["--name", "lost", "--", "bash", "-c", UNTIL_TOLD]).unwrap();
    lost.until("line 20\n").unwrap();
    net.cut(Whose::Agents, Cut::Everything).unwrap();
    // It succeeds, and only its agent knows.
    fs::write(marks.path().join("stop"), "").unwrap();
    wait("it is over", || Ok(assignment_has(&site, "events/2.json"))).unwrap();
    wait_within(Duration::from_secs(120), "the job is lost", || {
        // In this order: a machine that is gone in between does not matter.
        let state = job(&site, "lost")["state"].clone();
        let phase = first(&site).0;
        if state == "finished" {
            assert_eq!(phase, "gone");
        }
        Ok(state == "finished")
    })
    .unwrap();
    net.heal().unwrap();
    let output = lost.end().unwrap();
    assert_eq!((code(&output), ran(marks.path())), (75, 1), "{}", err(&output));
    let view = job(&site, "lost");
    assert_eq!((&view["verdict"], &view["log_gap"]), (&Value::from("infrastructure"), &Value::from(true)));
    assert!(String::from_utf8_lossy(&output.stdout).starts_with(&lines(20)));
    assert_eq!(code(&site.submit(&["--", "true"]).unwrap()), 0, "the next job gets another machine");
    assert_eq!(job(&site, "lost")["verdict"], "infrastructure");
    site.finish().unwrap();
}

#[test]
fn both_ends_notice_a_connection_that_leads_nowhere() {
    let (net, site) = site(&leased("lease = \"5m\"", "idle_timeout = \"10m\""));
    assert_eq!(code(&site.submit(&["--", "true"]).unwrap()), 0);
    wait("a sync is held", || Ok(net.accepted(site.port())? > 0)).unwrap();
    net.cut(Whose::Agents, Cut::Everything).unwrap();
    wait_within(Duration::from_secs(90), "the agent notices", || Ok(agent_said(&site, "sync not answered"))).unwrap();
    // Nothing that it says arrives, not even that its sockets are closed.
    signal(site.agent_pid().unwrap(), "KILL").unwrap();
    wait_within(Duration::from_secs(90), "the scaler notices", || Ok(net.accepted(site.port())? == 0)).unwrap();
    net.heal().unwrap();
    assert_eq!(code(&site.submit(&["--", "true"]).unwrap()), 0);
    assert_eq!(instances(&site).len(), 1, "well within the lease");
    site.finish().unwrap();
}

fn a_client_resumes(cut: Cut) {
    let (net, site) = site(ONE_POOL);
    let job = site.begin(&["--", "bash", "-c", &counting(600, "0.02", 9).replace("/marks/ran", "/dev/null")]).unwrap();
    job.until("line 20\n").unwrap();
    for _ in 0..2 {
        net.cut(Whose::Clients, cut).unwrap();
        pause(Duration::from_secs(3));
        net.heal().unwrap();
        let so_far = job.stdout().len();
        wait("the log goes on", || Ok(job.stdout().len() > so_far)).unwrap();
    }
    let output = job.end().unwrap();
    assert_eq!(code(&output), 9, "{}", err(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), lines(600));
    site.finish().unwrap();
}

#[test]
fn a_client_whose_requests_are_lost_resumes() {
    a_client_resumes(Cut::Requests);
}

#[test]
fn a_client_whose_answers_are_lost_resumes() {
    a_client_resumes(Cut::Answers);
}

#[test]
fn a_client_whose_connections_are_reset_resumes() {
    a_client_resumes(Cut::Resets);
}

#[test]
fn a_client_that_is_never_answered_gives_up_and_says_how_to_go_on() {
    let (net, site) = site(ONE_POOL);
    for (cut, accepted) in [(Cut::Requests, false), (Cut::Answers, true)] {
        net.cut(Whose::Clients, cut).unwrap();
        let job = site.begin(&["--name", &format!("{cut:?}"), "--", "echo", "on"]).unwrap();
        let output = job.end().unwrap();
        net.heal().unwrap();
        assert_eq!(code(&output), 69, "{}", err(&output));
        assert!(err(&output).contains("whether the job was accepted is not known"), "{}", err(&output));
        let known = self::job(&site, &format!("{cut:?}"));
        assert_eq!(!known.is_null(), accepted, "{known}");
        if let Some(id) = known["id"].as_str() {
            assert!(err(&output).contains(id), "{}", err(&output));
            let log = site.call(&["logs", "--follow", id]).unwrap();
            assert_eq!(log.stdout, b"on\n");
        }
    }
    site.finish().unwrap();
}

#[test]
fn a_client_that_hears_nothing_for_ten_minutes_leaves_the_job_alone() {
    let (net, site) = site(ONE_POOL);
    let clock = FakeClock::new().unwrap();
    let env: Vec<_> = clock.env_of_all().collect();
    let job = site.begin_with(&env, &["--", "bash", "-c", "echo on; sleep 500"]).unwrap();
    job.until("on\n").unwrap();
    // Its ten minutes are over in half a minute.
    clock.hurry(20).unwrap();
    let began = boottime();
    net.cut(Whose::Clients, Cut::Everything).unwrap();
    let output = job.end().unwrap();
    assert!(boottime() - began > Duration::from_secs(25), "{}", err(&output));
    net.heal().unwrap();
    assert_eq!(code(&output), 69, "{}", err(&output));
    assert!(err(&output).contains("the job goes on; find it again with `pilotlight logs --follow"), "{}", err(&output));
    assert_eq!(site.json(&["jobs"]).unwrap()[0]["state"], "running");
    site.finish().unwrap();
}
