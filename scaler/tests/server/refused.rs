//! Attempts that a machine refused: the next one begins with nothing, and the last word is the next one's.

use std::{sync::Arc, time::Duration};

use pilotlight_wire::{
    Verdict,
    agent::{AssignmentEventKind, Directive, Start},
};
use reqwest::Method;
use serde_json::json;

use super::rig::{Agent, Rig, finished, started, until};

fn refused() -> AssignmentEventKind {
    AssignmentEventKind::Refused { reason: "no room".to_owned() }
}

/// Syncs until told to start something that is not listed; a job that was refused waits for a while.
async fn next(agent: &mut Agent) -> Start {
    for _ in 0..10 {
        if let [Directive::Start(start)] = agent.directives().await.as_slice() {
            agent.listed.push(start.assignment);
            return (**start).clone();
        }
    }
    panic!("not told to start anything");
}

#[tokio::test]
async fn a_refused_attempt_leaves_nothing_in_the_jobs_log() {
    let rig = Rig::new().await;
    let job = rig.submit().await;
    let mut agent = rig.enrol().await;
    let first = next(&mut agent).await.assignment;
    let agent = {
        let shared = Arc::new(agent);
        let early = {
            let agent = Arc::clone(&shared);
            tokio::spawn(async move { agent.log(first, 0, b"of the first attempt").await })
        };
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(!early.is_finished(), "it may still be refused");
        assert_eq!(shared.event(first, 1, refused()).await.0, 200);
        let (status, body) = early.await.unwrap();
        assert_eq!((status.as_u16(), &body["size"]), (409, &json!(0)), "at once, and without its bytes");
        Arc::into_inner(shared).unwrap()
    };
    let (status, body) = agent.log(first, 0, b"of the first attempt").await;
    assert_eq!((status.as_u16(), &body["size"]), (409, &json!(0)), "nor later");
    assert_eq!(agent.log(first, 0, b"").await.0, 200, "an agent that asks is told that nothing is wanted");
    assert_eq!(rig.log(job, "offset=0").await, (Vec::new(), "open".to_owned()));

    // The second attempt, while the first is still listed.
    let mut agent = agent;
    let second = next(&mut agent).await.assignment;
    assert_eq!(agent.event(second, 1, started()).await.0, 200);
    assert_eq!(agent.log(second, 0, b"fresh").await.1["size"], 5);
    for offset in [0, 5] {
        let (status, body) = agent.log(first, offset, b"of the first attempt").await;
        assert_eq!((status.as_u16(), &body["size"]), (409, &json!(5)));
    }
    assert_eq!(agent.event(second, 2, finished(Verdict::Success, Some(0), 5)).await.0, 200);
    assert_eq!(rig.log(job, "offset=0").await, (b"fresh".to_vec(), "closed".to_owned()));
    agent.listed.clear();
    agent.listed.push(second);
    let _syncs = tokio::time::timeout(Duration::from_secs(1), agent.directives()).await;
    assert_eq!(agent.log(first, 5, b"of the first attempt").await.0, 404, "nobody knows it any more");
    assert_eq!(rig.log(job, "offset=0").await, (b"fresh".to_vec(), "closed".to_owned()));
}

#[tokio::test]
async fn bytes_that_overtake_the_start_are_taken_once_it_is_known() {
    let rig = Rig::new().await;
    let job = rig.submit().await;
    let mut agent = rig.enrol().await;
    let id = agent.start().await.assignment;
    let write = agent.log(id, 0, b"early");
    let say = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(rig.log(job, "offset=0").await.0, b"");
        agent.event(id, 1, started()).await
    };
    let ((status, body), _) = tokio::join!(write, say);
    assert_eq!((status.as_u16(), &body["size"]), (200, &json!(5)));
    assert_eq!(rig.log(job, "offset=0").await.0, b"early");
}

#[tokio::test]
async fn a_job_that_has_started_is_not_queued_again_whatever_its_agent_says() {
    let rig = Rig::new().await;
    let job = rig.submit().await;
    let mut agent = rig.enrol().await;
    let id = agent.start().await.assignment;
    agent.event(id, 1, started()).await;
    agent.log(id, 0, b"half\n").await;
    assert_eq!(agent.event(id, 2, refused()).await.0, 200);
    let view = rig.job(job).await;
    assert_eq!((&view["state"], &view["verdict"]), (&json!("finished"), &json!("infrastructure")), "{view}");
    assert!(view["reason"].as_str().unwrap().contains("no room"), "{view}");
    until("its log is closed", async || rig.log(job, "offset=0").await.1 == "closed").await;
    let log = String::from_utf8(rig.log(job, "offset=0").await.0).unwrap();
    assert!(log.starts_with("half\n[pilotlight] "), "{log}");
    assert_eq!(rig.job(job).await["log_gap"], true);
}

#[tokio::test]
async fn the_end_of_a_machine_that_refused_a_job_does_not_close_its_log() {
    let rig = Rig::new().await;
    let other = rig.submit().await;
    let mut agent = rig.enrol().await;
    let holds = next(&mut agent).await;
    assert_eq!(holds.job.id, other);
    agent.event(holds.assignment, 1, started()).await;
    let job = rig.submit().await;
    let first = next(&mut agent).await.assignment;
    agent.event(first, 1, refused()).await;
    let drain = json!({"target": {"instance": agent.instance}, "now": false});
    rig.call(Method::POST, "/api/v1/drain", Some(drain)).await;

    let machines = rig.bootstraps(2).await;
    let bootstrap = machines.iter().find(|machine| machine.instance != agent.instance).unwrap();
    let mut second = rig.enrol_as(bootstrap).await;
    let start = next(&mut second).await;
    assert_eq!(start.job.id, job);
    second.event(start.assignment, 1, started()).await;
    second.log(start.assignment, 0, b"of the ").await;
    second.event(start.assignment, 2, finished(Verdict::Success, Some(0), 13)).await;

    agent.event(holds.assignment, 2, finished(Verdict::Success, Some(0), 0)).await;
    until("the first machine is gone", async || rig.instance(agent.instance).await["phase"] == "gone").await;
    assert_eq!(rig.log(job, "offset=0").await, (b"of the ".to_vec(), "open".to_owned()));
    assert_eq!(second.log(start.assignment, 7, b"second").await.1["size"], 13);
    assert_eq!(rig.log(job, "offset=0").await, (b"of the second".to_vec(), "closed".to_owned()));
    assert_eq!(rig.job(job).await["log_gap"], false);
}
