//! What an admin orders: drain a machine, a pool, everything; and go on.

use pilotlight_wire::agent::Directive;
use reqwest::Method;
use serde_json::{Value, json};

use super::rig::{Rig, started, until};

async fn drain(rig: &Rig, target: Value, now: bool) -> (reqwest::StatusCode, Value) {
    rig.call(Method::POST, "/api/v1/drain", Some(json!({"target": target, "now": now}))).await
}

#[tokio::test]
async fn a_drain_of_what_is_not_there_is_refused() {
    let rig = Rig::new().await;
    let unknown = "018f0000-0000-7000-8000-000000000001";
    for (target, status) in [
        (json!({"instance": unknown}), 404),
        (json!({"pool": "nosuch"}), 404),
        (json!({"pool": "a b"}), 422),
        (json!("everything"), 422),
    ] {
        let (answer, error) = drain(&rig, target.clone(), false).await;
        assert_eq!(answer, status, "{target}: {error}");
        assert!(!error["message"].as_str().unwrap().is_empty());
    }
    let (_, body) = drain(&rig, json!({"pool": "here"}), true).await;
    assert_eq!(body, json!({"instances": []}), "a pool without machines");
}

#[tokio::test]
async fn a_pool_is_drained_of_its_machines_and_launches_others() {
    let rig = Rig::new().await;
    rig.submit().await;
    let mut agent = rig.enrol().await;
    let id = agent.start().await.assignment;
    agent.listed.push(id);
    agent.event(id, 1, started()).await;
    let (_, body) = drain(&rig, json!({"pool": "here"}), false).await;
    assert_eq!(body, json!({"instances": [agent.instance]}));
    assert_eq!(rig.instance(agent.instance).await["phase"], "draining");

    let next = rig.submit().await;
    let bootstraps = rig.bootstraps(2).await;
    let other = bootstraps.iter().find(|one| one.instance != agent.instance).unwrap();
    assert_eq!(rig.enrol_as(other).await.start().await.job.id, next, "the drained one takes no new work");
}

#[tokio::test]
async fn drain_all_now_cancels_what_runs_and_launches_nothing_until_resumed() {
    let rig = Rig::new().await;
    let running = rig.submit().await;
    let mut agent = rig.enrol().await;
    let id = agent.start().await.assignment;
    agent.listed.push(id);
    agent.event(id, 1, started()).await;
    let held = tokio::spawn(agent.next_sync().send());
    drain(&rig, json!("all"), true).await;
    let answer: pilotlight_wire::agent::SyncResponse = held.await.unwrap().unwrap().json().await.unwrap();
    assert_eq!(answer.directives, [Directive::Cancel { assignment: id }], "the held sync is answered at once");

    let waiting = rig.submit().await;
    let view = rig.job(waiting).await;
    assert_eq!(view["state"], "queued");
    assert!(view["reason"].as_str().unwrap().contains("drain --all"), "{view}");
    assert_eq!(rig.get("/api/v1/status").await["alerts"][0]["code"], "paused");
    assert_eq!(rig.get("/api/v1/plan").await["waiting"][0]["reason"], "paused");
    assert_eq!(rig.job(running).await["state"], "running", "its end is the agent's to tell");
    let ended = super::rig::finished(pilotlight_wire::Verdict::Cancelled, None, 0);
    agent.event(id, 2, ended).await;
    agent.listed.clear();
    until("gone", async || rig.instance(agent.instance).await["phase"] == "gone").await;
    assert_eq!(rig.get("/api/v1/instances").await, json!([]));

    assert_eq!(rig.call(Method::POST, "/api/v1/resume", None).await.0, 204);
    until("a machine for the one that waits", async || rig.get("/api/v1/instances").await != json!([])).await;
    assert_eq!(rig.get("/api/v1/status").await["alerts"], json!([]));
}

#[tokio::test]
async fn a_machine_that_boots_is_ended_at_once_and_its_agent_turned_away() {
    let rig = Rig::new().await;
    rig.submit().await;
    let bootstrap = rig.bootstrap().await;
    std::fs::write(rig.dir.path().join("stuck"), "").unwrap();
    drain(&rig, json!("all"), false).await;
    assert_eq!(rig.instance(bootstrap.instance).await["phase"], "terminating");
    assert_eq!(rig.enrol_with(&bootstrap, &"ab".repeat(32)).await.status(), 410);
    std::fs::remove_file(rig.dir.path().join("stuck")).unwrap();
    until("gone", async || rig.instance(bootstrap.instance).await["phase"] == "gone").await;
}
