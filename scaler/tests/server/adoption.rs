//! The database is lost, the key and the machines are not (link 1).

use pilotlight_wire::{
    Verdict,
    agent::{Directive, Seq, Stage},
};
use reqwest::{Method, StatusCode};
use serde_json::json;

use super::rig::{Rig, finished, started, until};

#[tokio::test]
async fn a_machine_and_its_running_job_are_adopted_and_end_as_if_nothing_had_happened() {
    let mut rig = Rig::new().await;
    let job = rig.submit().await;
    let mut agent = rig.enrol().await;
    let id = agent.start().await.assignment;
    agent.listed.push(id);
    agent.event(id, 1, started()).await;
    agent.log(id, 0, b"before ").await;
    agent.stage = Stage::Running;
    rig.lose_database().await;

    // Not known before it is listed; a refusal by the way that ends nothing.
    until("adopted", async || {
        let answer = agent.next_sync().timeout(std::time::Duration::from_millis(500)).send().await;
        // A sync that is held was taken.
        !answer.is_ok_and(|answer| {
            assert_eq!(answer.status(), StatusCode::NOT_FOUND);
            true
        })
    })
    .await;
    let machine = rig.instance(agent.instance).await;
    assert_eq!(
        (&machine["phase"], &machine["pool"], &machine["placement"]),
        (&json!("ready"), &json!("here"), &json!("here"))
    );
    let view = rig.job(job).await;
    assert_eq!((&view["state"], &view["instance"]), (&json!("running"), &json!(agent.instance)), "{view}");
    assert_eq!(view["name"], "x a");
    assert_eq!(rig.get("/api/v1/orphans").await, json!([]));

    // The log on disk was not lost, and the agent alone knows that its first event was taken.
    let (status, size) = agent.log(id, 0, b"before ").await;
    assert_eq!((status, &size["size"]), (StatusCode::CONFLICT, &json!(7)));
    agent.log(id, 7, b"after").await;
    agent.event(id, 2, finished(Verdict::Success, Some(0), 12)).await;
    let view = rig.job(job).await;
    assert_eq!((&view["verdict"], &view["exit_code"]), (&json!("success"), &json!(0)), "{view}");
    assert_eq!(rig.log(job, "offset=0").await, (b"before after".to_vec(), "closed".to_owned()));
    // The same submission again is the same job.
    let (status, _) = rig.call(Method::PUT, &format!("/api/v1/jobs/{job}"), Some(super::rig::job())).await;
    assert_eq!(status, 200);
}

#[tokio::test]
async fn an_agent_that_was_restarted_meanwhile_shows_its_old_bearer_and_a_fresh_one_is_refused() {
    let mut rig = Rig::new().await;
    let job = rig.submit().await;
    let mut agent = rig.enrol().await;
    let bootstrap = rig.bootstrap().await;
    let id = agent.start().await.assignment;
    agent.listed.push(id);
    rig.lose_database().await;
    until("an orphan", async || rig.get("/api/v1/orphans").await != json!([])).await;

    let (own, other) = ("ab".repeat(32), "cd".repeat(32));
    let bearer = agent.bearer.clone();
    assert_eq!(rig.enrol_with(&bootstrap, &own).await.status(), 404, "a secret from user-data proves nothing now");
    assert_eq!(rig.enrol_again(&bootstrap, &other, Some(&bearer)).await.status(), 404, "another nonce's bearer");
    assert_eq!(rig.enrol_again(&bootstrap, &own, Some("x")).await.status(), 404, "no bearer of ours");
    assert_eq!(rig.enrol_again(&bootstrap, &own, Some(&bearer)).await.status(), 200);
    assert_eq!(rig.get("/api/v1/instances").await, json!([]), "only a sync says what runs there");
    assert_eq!(agent.event(id, 1, started()).await.0, 404, "nor does anything else");

    let held = tokio::spawn(agent.sync_as(Seq { run: 2, n: 1 }).send());
    until("adopted", async || rig.job(job).await["state"] == "assigned").await;
    assert_eq!(rig.enrol_with(&bootstrap, &own).await.status(), 200, "known again, by its nonce");
    assert_eq!(rig.enrol_with(&bootstrap, &other).await.status(), 409);
    rig.call(Method::POST, &format!("/api/v1/jobs/{job}/cancel"), None).await;
    let answer: pilotlight_wire::agent::SyncResponse = held.await.unwrap().unwrap().json().await.unwrap();
    assert_eq!(answer.directives, [Directive::Cancel { assignment: id }], "an adopted job is like any other");
}

#[tokio::test]
async fn a_sync_that_was_overtaken_brings_nothing_back() {
    let rig = Rig::new().await;
    let job = rig.submit().await;
    let mut agent = rig.enrol().await;
    let id = agent.start().await.assignment;
    agent.listed.push(id);
    let late = agent.next_sync();
    agent.event(id, 1, started()).await;
    agent.event(id, 2, finished(Verdict::Success, Some(0), 0)).await;
    agent.listed.clear();
    let held = tokio::spawn(agent.next_sync().send());
    until("settled", async || rig.log(job, "offset=0").await.1 == "closed").await;
    let late = late.send().await.unwrap().error_for_status().unwrap();
    assert_eq!(late.json::<pilotlight_wire::agent::SyncResponse>().await.unwrap().directives, []);
    let view = rig.job(job).await;
    assert_eq!((&view["state"], &view["verdict"]), (&json!("finished"), &json!("success")));
    held.abort();
}
