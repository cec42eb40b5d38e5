//! What an agent and the scaler owe each other (link 1 to 7).

use std::time::Duration;

use pilotlight_wire::{
    ErrorBody, Secret, Verdict, Work,
    agent::{AssignmentEventKind, Directive, EnrolResponse, MAX_LOG_CHUNK, Seq, SyncResponse},
};
use reqwest::Method;
use serde_json::json;

use super::rig::{Rig, finished, started, until};

#[tokio::test]
async fn the_first_nonce_wins_and_the_secret_is_the_instances_own() {
    let rig = Rig::new().await;
    rig.submit().await;
    let bootstrap = rig.bootstrap().await;
    let mut wrong = bootstrap.clone();
    wrong.secret = Secret::new("00".repeat(32));
    assert_eq!(rig.enrol_with(&wrong, &"ab".repeat(32)).await.status(), 401);
    assert_eq!(rig.enrol_with(&bootstrap, "short").await.status(), 422);
    let first = rig.enrol_with(&bootstrap, &"ab".repeat(32)).await;
    assert_eq!(first.status(), 200);
    let again = rig.enrol_with(&bootstrap, &"ab".repeat(32)).await;
    let (first, again): (EnrolResponse, EnrolResponse) = (first.json().await.unwrap(), again.json().await.unwrap());
    assert_eq!((first.bearer, first.policy), (again.bearer, again.policy), "a lost reply costs nothing");
    let other = rig.enrol_with(&bootstrap, &"cd".repeat(32)).await;
    assert_eq!(other.status(), 409);
    let alerts = rig.get("/api/v1/status").await["alerts"].clone();
    assert!(alerts.as_array().unwrap().iter().any(|alert| alert["code"] == "enrolled_twice"), "{alerts}");
}

#[tokio::test]
async fn a_held_sync_is_answered_by_work_superseded_by_a_higher_one_and_ends_with_the_scaler() {
    let mut rig = Rig::new().await;
    let first = rig.submit().await;
    let mut agent = rig.enrol().await;
    let start = agent.start().await;
    let Work::Job(spec) = &start.work else { panic!("{start:?}") };
    assert_eq!((start.job.id, spec.env["K"].as_str(), start.remaining_seconds > 21_000), (first, "v\n\"'", true));
    assert_eq!(agent.start().await.assignment, start.assignment, "repeated until it is listed");
    agent.listed.push(start.assignment);

    let held = tokio::spawn(agent.next_sync().send());
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!held.is_finished(), "held without news");
    let second = rig.submit().await;
    let answer: SyncResponse = held.await.unwrap().unwrap().json().await.unwrap();
    match answer.directives.as_slice() {
        [Directive::Start(start)] => {
            assert_eq!(start.job.id, second, "answered at once by the second job");
            agent.listed.push(start.assignment);
        }
        other => panic!("{other:?}"),
    }

    let held = tokio::spawn(agent.sync_as(Seq { run: 1, n: 50 }).send());
    tokio::time::sleep(Duration::from_millis(100)).await;
    let higher = tokio::spawn(agent.sync_as(Seq { run: 2, n: 1 }).send());
    let superseded: SyncResponse = held.await.unwrap().unwrap().json().await.unwrap();
    assert!(superseded.directives.is_empty());
    let lower: SyncResponse = agent.sync_as(Seq { run: 1, n: 51 }).send().await.unwrap().json().await.unwrap();
    assert!(lower.directives.is_empty() && !higher.is_finished(), "a late one neither waits nor supersedes");

    rig.stop().await.unwrap();
    let last: SyncResponse = higher.await.unwrap().unwrap().json().await.unwrap();
    assert!(last.directives.is_empty(), "a scaler that stops ends nothing");
}

#[tokio::test]
async fn events_count_once_and_in_order_and_only_for_their_own_instance() {
    let rig = Rig::new().await;
    let job = rig.submit().await;
    let mut agent = rig.enrol().await;
    let id = agent.start().await.assignment;
    let (status, gap) = agent.event(id, 2, started()).await;
    assert_eq!((status.as_u16(), &gap["expected"]), (409, &json!(1)));
    let (status, ack) = agent.event(id, 1, started()).await;
    assert_eq!((status.as_u16(), &ack["expected"]), (200, &json!(2)));
    assert_eq!(rig.job(job).await["state"], "running");
    let done = finished(Verdict::Failure, Some(7), 0);
    assert_eq!(agent.event(id, 2, done.clone()).await.0, 200);
    for _ in 0..2 {
        assert_eq!(agent.event(id, 2, done.clone()).await.0, 200, "a repeat is fine");
    }
    let view = rig.job(job).await;
    assert_eq!((&view["verdict"], &view["exit_code"], &view["cost"]), (&json!("failure"), &json!(7), &json!(0.5)));
    let foreign = "018f0000-0000-7000-8000-000000000001".parse().unwrap();
    assert_eq!(agent.event(foreign, 1, started()).await.0, 404);
    assert_eq!(agent.log(foreign, 0, b"x").await.0, 404);
}

#[tokio::test]
async fn a_log_grows_at_its_end_only_and_closes_with_its_last_byte_in_either_order() {
    let rig = Rig::new().await;
    let job = rig.submit().await;
    let mut agent = rig.enrol().await;
    let id = agent.start().await.assignment;
    agent.event(id, 1, started()).await;
    assert_eq!(agent.log(id, 0, b"hello ").await, (reqwest::StatusCode::OK, json!({"size": 6})));
    for offset in [0, 5, 7, 1000] {
        let (status, body) = agent.log(id, offset, b"x").await;
        assert_eq!((status.as_u16(), &body["size"]), (409, &json!(6)), "at {offset}");
    }
    assert_eq!(agent.log(id, 6, &vec![0; MAX_LOG_CHUNK + 1]).await.0, 413);
    assert_eq!(rig.log(job, "offset=0").await, (b"hello ".to_vec(), "open".to_owned()));

    let follow = async { rig.log(job, "offset=6&follow=1").await };
    let write = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        agent.log(id, 6, b"world").await
    };
    let ((bytes, state), _) = tokio::join!(follow, write);
    assert_eq!((bytes.as_slice(), state.as_str()), (&b"world"[..], "open"));

    // `finished` first, the last byte second; the other order on the second job.
    agent.event(id, 2, finished(Verdict::Success, Some(0), 12)).await;
    assert_eq!(rig.log(job, "offset=11").await.1, "open");
    agent.log(id, 11, b"!").await;
    assert_eq!(rig.log(job, "offset=0").await, (b"hello world!".to_vec(), "closed".to_owned()));
    assert_eq!(agent.log(id, 12, b"").await.1["size"], 12, "asked again, it says how much there is");

    let other = rig.submit().await;
    let id = agent.start().await.assignment;
    agent.event(id, 1, started()).await;
    agent.log(id, 0, b"x").await;
    agent.event(id, 2, finished(Verdict::Success, Some(0), 1)).await;
    assert_eq!(rig.log(other, "offset=0").await, (b"x".to_vec(), "closed".to_owned()));
}

#[tokio::test]
async fn a_cancel_overtakes_a_start_that_was_not_listed() {
    let rig = Rig::new().await;
    let job = rig.submit().await;
    let mut agent = rig.enrol().await;
    let id = agent.start().await.assignment;
    rig.call(Method::POST, &format!("/api/v1/jobs/{job}/cancel"), None).await;
    for _ in 0..2 {
        let directives = agent.directives().await;
        assert_eq!(directives, [Directive::Cancel { assignment: id }], "until finished has come");
    }
    agent.event(id, 1, finished(Verdict::Cancelled, None, 0)).await;
    let view = rig.job(job).await;
    assert_eq!((&view["state"], &view["verdict"]), (&json!("finished"), &json!("cancelled")));
    assert_eq!(rig.log(job, "offset=0").await.1, "closed");
}

#[tokio::test]
async fn a_refused_job_goes_back_into_the_queue_and_says_why() {
    let rig = Rig::new().await;
    let job = rig.submit().await;
    let mut agent = rig.enrol().await;
    let id = agent.start().await.assignment;
    agent.event(id, 1, AssignmentEventKind::Refused { reason: "the disk is full".to_owned() }).await;
    let view = rig.job(job).await;
    assert_eq!(view["state"], "queued");
    assert!(view["reason"].as_str().unwrap().contains("the disk is full"), "{view}");
}

#[tokio::test]
async fn a_drained_machine_is_told_to_go_and_then_that_it_is_gone() {
    let rig = Rig::new().await;
    let job = rig.submit().await;
    let mut agent = rig.enrol().await;
    let id = agent.start().await.assignment;
    agent.event(id, 1, started()).await;
    let drain = json!({"target": {"instance": agent.instance}, "now": false});
    assert_eq!(rig.call(Method::POST, "/api/v1/drain", Some(drain)).await.0, 200);
    assert_eq!(rig.get("/api/v1/instances").await[0]["phase"], "draining", "its job goes on");
    agent.event(id, 2, finished(Verdict::Success, Some(0), 0)).await;
    let directives = agent.directives().await;
    assert!(matches!(directives.as_slice(), [Directive::Terminate { .. }]), "{directives:?}");
    until("gone", async || rig.get("/api/v1/instances").await == json!([])).await;
    let gone = agent.next_sync().send().await.unwrap();
    assert_eq!(gone.status(), 410);
    assert_eq!(gone.json::<ErrorBody>().await.unwrap().code, ErrorBody::INSTANCE_GONE);
    assert_eq!(rig.job(job).await["verdict"], "success");
}

#[tokio::test]
async fn a_lost_machine_is_reported_only_when_it_is_gone() {
    let rig = Rig::new().await;
    let job = rig.submit().await;
    let mut agent = rig.enrol().await;
    let id = agent.start().await.assignment;
    agent.listed.push(id);
    agent.event(id, 1, started()).await;
    agent.log(id, 0, b"half").await;
    // The agent left a mark that says it is over, as one whose lease has lapsed.
    let dir = rig.state().join("local").join(agent.instance.to_string());
    // The process that stands in for it may have come later than its sync, which this test sends itself.
    let pid = || std::fs::read_to_string(dir.join("agent.lock")).ok()?.split_whitespace().next().map(str::to_owned);
    until("its pid", async || pid().is_some()).await;
    std::fs::write(dir.join("done"), "lapsed\n").unwrap();
    std::process::Command::new("kill").arg("-9").arg(pid().unwrap()).status().unwrap();
    let mut seen = Vec::new();
    until("lost", async || {
        let (view, machine) = (rig.job(job).await, rig.get("/api/v1/instances?all=1").await);
        seen.push((view["state"].clone(), machine[0]["phase"].clone()));
        view["state"] == "finished"
    })
    .await;
    assert_eq!(rig.job(job).await["verdict"], "infrastructure");
    assert!(!seen.contains(&(json!("finished"), json!("terminating"))), "{seen:?}");
    until("closed", async || rig.log(job, "offset=0").await.1 == "closed").await;
    let (log, _) = rig.log(job, "offset=0").await;
    assert!(String::from_utf8(log).unwrap().starts_with("half\n[pilotlight] the machine is gone"));
    assert_eq!(rig.job(job).await["log_gap"], true);
}
