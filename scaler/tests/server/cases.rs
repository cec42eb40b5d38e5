//! Field cases that come in over HTTP: their kinds, on the built-in queue. Those that the planner decides are in
//! `tests/tests/cases.rs`.

use pilotlight_wire::{JobId, Verdict};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use super::rig::{Rig, finished, job, started, until};

async fn put_raw(rig: &Rig, id: JobId, body: &str) -> StatusCode {
    let request = rig.http.put(format!("{}/api/v1/jobs/{id}", rig.url)).bearer_auth(&rig.token);
    request.header("content-type", "application/json").body(body.to_owned()).send().await.unwrap().status()
}

/// Whatever is wrong with one body, its neighbours are taken, and it is refused once and for all.
#[tokio::test]
async fn c02_a_poisoned_body_harms_no_neighbour() {
    let rig = Rig::new().await;
    let good = job().to_string();
    let deep = "[".repeat(100_000);
    for poison in [
        "",
        "null",
        "{\"label\":\"cpu\"",
        "{\"label\":\"cpu\",\"spec\":{\"image\":\"x\"},\"surplus\":1}",
        "{\"label\":7,\"spec\":{\"image\":\"x\"}}",
        "\u{0}",
        &deep,
        &good.replace("cpu", "nosuch"),
        &good.replace("\"x\"", "\"\""),
    ] {
        let ids = [JobId::random(), JobId::random(), JobId::random()];
        assert_eq!(put_raw(&rig, ids[0], &good).await, 201);
        let status = put_raw(&rig, ids[1], poison).await;
        assert!(status.is_client_error(), "{status}: {poison:.80}");
        assert_eq!(put_raw(&rig, ids[2], &good).await, 201);
        assert_eq!(rig.call(Method::GET, &format!("/api/v1/jobs/{}", ids[1]), None).await.0, 404);
        for id in [ids[0], ids[2]] {
            assert_eq!(rig.job(id).await["state"], "queued");
            rig.call(Method::POST, &format!("/api/v1/jobs/{id}/cancel"), None).await;
        }
    }
}

/// The same job announced again — at once, by two at a time, while it boots, runs, after its end, across a restart — is one
/// job, runs once and has one machine; the same id with other contents is refused.
#[tokio::test]
async fn c03_a_job_that_is_announced_twice_is_one_job() {
    let mut rig = Rig::new().await;
    let id = JobId::random();
    let path = format!("/api/v1/jobs/{id}");
    let again = async |rig: &Rig| rig.call(Method::PUT, &path, Some(job())).await.0;
    let (first, second) = tokio::join!(again(&rig), again(&rig));
    let mut both = [first.as_u16(), second.as_u16()];
    both.sort_unstable();
    assert_eq!(both, [200, 201]);
    assert_eq!(again(&rig).await, 200, "while it waits");
    let mut agent = rig.enrol().await;
    let assignment = agent.start().await.assignment;
    agent.listed.push(assignment);
    assert_eq!(again(&rig).await, 200, "when it is assigned");
    agent.event(assignment, 1, started()).await;
    assert_eq!(again(&rig).await, 200, "while it runs");
    rig.stop().await.unwrap();
    rig.start().await;
    assert_eq!(again(&rig).await, 200, "after a restart");
    agent.event(assignment, 2, finished(Verdict::Success, Some(0), 0)).await;
    assert_eq!(rig.log(id, "offset=0").await.1, "closed");
    assert_eq!(again(&rig).await, 200, "when it is over and settled");
    let mut other = job();
    other["spec"]["image"] = json!("y");
    assert_eq!(rig.call(Method::PUT, &path, Some(other)).await.0, 409);
    assert_eq!(rig.get("/api/v1/instances?all=1").await.as_array().unwrap().len(), 1);
    assert_eq!(rig.job(id).await["verdict"], "success");
}

/// What matches nothing moves nothing: no label, an unknown one, the end of what never was.
#[tokio::test]
async fn c04_what_matches_nothing_moves_nothing() {
    let rig = Rig::new().await;
    let waiting = rig.submit().await;
    rig.bootstrap().await;
    // Which machines there are; how far they are changes meanwhile.
    let machines = async || {
        let all = rig.get("/api/v1/instances").await;
        all.as_array().unwrap().iter().map(|machine| machine["id"].clone()).collect::<Vec<_>>()
    };
    let before = machines().await;
    for label in [json!(""), json!([]), Value::Null, json!("self-hosted"), json!("CPU"), json!("cpu "), json!("*")] {
        let mut odd = job();
        odd["label"] = label.clone();
        let path = format!("/api/v1/jobs/{}", JobId::random());
        let (status, error) = rig.call(Method::PUT, &path, Some(odd)).await;
        assert_eq!(status, 422, "{label}: {error}");
    }
    let unknown = JobId::random();
    assert_eq!(rig.call(Method::POST, &format!("/api/v1/jobs/{unknown}/cancel"), None).await.0, 404);
    assert_eq!(machines().await, before);
    assert_eq!(rig.job(waiting).await["state"], "queued");
}

/// The agent's events are numbered, so repeats, gaps, late ones and garbage neither end a job nor keep a machine: the
/// idle clock starts with the end that counts.
#[tokio::test]
async fn c13_idleness_is_not_guessed_from_what_comes_out_of_order() {
    let rig = Rig::new().await;
    rig.reload(|text| text.replace("cpu_jobs = 2\n", "cpu_jobs = 2\nidle_timeout = \"2s\"\n")).await;
    let first = rig.submit().await;
    let mut agent = rig.enrol().await;
    let id = agent.start().await.assignment;
    agent.listed.push(id);
    assert_eq!(agent.event(id, 2, finished(Verdict::Success, Some(0), 0)).await.0, 409, "a gap");
    agent.event(id, 1, started()).await;
    assert_eq!(agent.event(id, 1, finished(Verdict::Failure, Some(9), 0)).await.0, 200, "a repeat says nothing new");
    assert_eq!(rig.job(first).await["state"], "running");
    let url = format!("{}/agent/v1/assignments/{id}/events", rig.url);
    for garbage in ["", "job_ended", "{\"n\":2,\"event\":{\"kind\":\"finished\"}}", "\u{fffd}"] {
        let request = rig.http.post(&url).bearer_auth(&agent.bearer).header("content-type", "application/json");
        assert!(request.body(garbage).send().await.unwrap().status().is_client_error());
    }
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    assert_eq!(rig.instance(agent.instance).await["phase"], "ready", "busy for longer than its idle timeout");
    agent.event(id, 2, finished(Verdict::Success, Some(0), 0)).await;
    assert_eq!(agent.event(id, 1, started()).await.0, 200, "late");
    assert_eq!(rig.job(first).await["verdict"], "success");
    agent.listed.clear();
    let held = tokio::spawn(agent.next_sync().send());
    until("idle", async || rig.instance(agent.instance).await["phase"] == "gone").await;
    assert_eq!(rig.instance(agent.instance).await["cause"], "idle past the pool's idle_timeout");
    held.abort();
}
