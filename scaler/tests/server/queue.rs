//! What clients are owed: jobs accepted once, bad input named, everything there after a restart.

use pilotlight_scaler::RunError;
use pilotlight_wire::{JobId, Verdict};
use reqwest::Method;
use serde_json::{Value, json};

use super::rig::{Rig, finished, job, started, until};

#[tokio::test]
async fn a_known_id_is_the_same_job_or_a_conflict_before_and_after_its_end() {
    let mut rig = Rig::new().await;
    let id = rig.submit().await;
    let path = format!("/api/v1/jobs/{id}");
    let mut other = job();
    other["spec"]["command"] = json!(["c"]);
    for end in [false, true] {
        if end {
            rig.call(Method::POST, &format!("{path}/cancel"), None).await;
            until("settled", async || rig.log(id, "offset=0").await.1 == "closed").await;
            rig.stop().await.unwrap();
            rig.start().await;
        }
        assert_eq!(rig.call(Method::PUT, &path, Some(job())).await.0, 200);
        assert_eq!(rig.call(Method::PUT, &path, Some(other.clone())).await.0, 409);
    }
    assert_eq!(rig.get("/api/v1/jobs?all=1").await.as_array().unwrap().len(), 1);
    assert_eq!(rig.get("/api/v1/jobs").await, json!([]));
}

#[tokio::test]
async fn a_job_is_listed_in_every_moment_of_its_settling() {
    let rig = Rig::new().await;
    for known in 1..=20 {
        let id = rig.submit().await;
        let cancel = format!("/api/v1/jobs/{id}/cancel");
        let look = async {
            loop {
                let closed = rig.log(id, "offset=0").await.1 == "closed";
                assert_eq!(rig.get("/api/v1/jobs?all=1").await.as_array().unwrap().len(), known);
                if closed {
                    break;
                }
            }
        };
        tokio::join!(rig.call(Method::POST, &cancel, None), look);
    }
}

#[tokio::test]
async fn bad_input_is_refused_with_the_field_and_nothing_is_kept() {
    let rig = Rig::new().await;
    let with = |change: fn(&mut Value)| {
        let mut body = job();
        change(&mut body);
        body
    };
    let cases = [
        (with(|body| body["label"] = json!("nosuch")), "nosuch"),
        (with(|body| body["label"] = json!("a b")), "a b"),
        (with(|body| body["spec"]["image"] = json!(" ")), "spec.image"),
        (with(|body| body["spec"]["nosuch"] = json!(1)), "nosuch"),
        (with(|body| body["spec"]["env"] = json!({"A=B": "x"})), "A=B"),
        (with(|body| body["spec"]["env"] = json!({"A": "x\0"})), "spec.env.A"),
        (with(|body| body["spec"]["command"] = json!(["x\0"])), "spec.command"),
        (with(|body| body["timeout_seconds"] = json!(0)), "timeout_seconds"),
        (with(|body| body["timeout_seconds"] = json!(-5)), "timeout_seconds"),
        (with(|body| body["priority"] = json!("high")), "priority"),
        (with(|body| body["name"] = json!("x".repeat(300))), "name"),
        (json!([]), "label"),
    ];
    for (body, word) in cases {
        let (status, error) = rig.call(Method::PUT, &format!("/api/v1/jobs/{}", JobId::random()), Some(body)).await;
        assert_eq!(status, 422, "{word}: {error}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(word) || word == "label" && !message.is_empty(), "{word}: {message}");
    }
    let (status, error) = rig.call(Method::PUT, "/api/v1/jobs/not-an-id", Some(job())).await;
    assert_eq!(status, 400, "{error}");
    let url = format!("{}/api/v1/jobs/{}", rig.url, JobId::random());
    let cut = rig.http.put(url).bearer_auth(&rig.token).header("content-type", "application/json");
    let answer = cut.body(r#"{"label": "cpu", "spec": {"#).send().await.unwrap();
    assert_eq!(answer.status(), 422, "a body that was cut off");
    assert_eq!(answer.json::<Value>().await.unwrap()["code"], "bad_input");
    let huge = json!({"label": "cpu", "spec": {"image": "x", "env": {"A": "x".repeat(9_000_000)}}});
    let (status, _) = rig.call(Method::PUT, &format!("/api/v1/jobs/{}", JobId::random()), Some(huge)).await;
    assert_eq!(status, 413);
    assert_eq!(rig.call(Method::GET, &format!("/api/v1/jobs/{}", JobId::random()), None).await.0, 404);
    assert_eq!(rig.get("/api/v1/jobs?all=1").await, json!([]));
}

#[tokio::test]
async fn a_new_scaler_goes_on_where_the_last_one_was() {
    let mut rig = Rig::new().await;
    let id = rig.submit().await;
    let mut agent = rig.enrol().await;
    let start = agent.start().await;
    rig.stop().await.unwrap();
    rig.start().await;
    assert_eq!(agent.start().await, start, "the same assignment, the same payload, the same bearer");
    agent.listed.push(start.assignment);
    agent.event(start.assignment, 1, started()).await;
    agent.log(start.assignment, 0, b"abc").await;
    agent.event(start.assignment, 2, finished(Verdict::Success, Some(0), 6)).await;
    rig.stop().await.unwrap();
    rig.start().await;
    assert_eq!(rig.log(id, "offset=0").await, (b"abc".to_vec(), "open".to_owned()), "three bytes are to come");
    assert_eq!(agent.event(start.assignment, 2, finished(Verdict::Success, Some(0), 6)).await.0, 200);
    agent.log(start.assignment, 3, b"def").await;
    assert_eq!(rig.log(id, "offset=0").await, (b"abcdef".to_vec(), "closed".to_owned()));
    let view = rig.job(id).await;
    let phases = view["phases"].as_object().unwrap();
    let missing: Vec<_> = phases.iter().filter(|(_, at)| at.is_null()).map(|(phase, _)| phase).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[tokio::test]
async fn a_commit_that_fails_ends_the_scaler_and_nothing_is_said() {
    let mut rig = Rig::new().await;
    rusqlite::Connection::open(rig.state().join("pilotlight.db"))
        .unwrap()
        .execute_batch("DROP TABLE payloads")
        .unwrap();
    let url = format!("{}/api/v1/jobs/{}", rig.url, JobId::random());
    let token = std::fs::read_to_string(rig.state().join("admin.token")).unwrap();
    let answer = rig.http.put(url).bearer_auth(token.trim()).json(&job()).send().await;
    assert!(answer.is_err() || answer.unwrap().status().is_server_error());
    assert!(matches!(rig.ended().await, Err(RunError::Store(_))));
    let jobs: u32 = rusqlite::Connection::open(rig.state().join("pilotlight.db"))
        .unwrap()
        .query_row("SELECT count(*) FROM jobs", [], |row| row.get(0))
        .unwrap();
    assert_eq!(jobs, 0);
}

#[tokio::test]
async fn orphans_are_shown_and_reaped_on_demand_only() {
    let mut rig = Rig::new().await;
    rig.submit().await;
    let bootstrap = rig.bootstrap().await;
    rig.lose_database().await;
    until("an orphan", async || rig.get("/api/v1/orphans").await[0]["instance"] == json!(bootstrap.instance)).await;
    let alerts = rig.get("/api/v1/status").await["alerts"].clone();
    assert_eq!(alerts[0]["code"], "orphan", "{alerts}");
    assert!(rig.state().join("local").join(bootstrap.instance.to_string()).exists(), "not touched by itself");
    assert_eq!(rig.call(Method::POST, "/api/v1/reap", None).await.1[0]["instance"], json!(bootstrap.instance));
    until("it is gone", async || rig.instance(bootstrap.instance).await["phase"] == "gone").await;
    assert_eq!(rig.instance(bootstrap.instance).await["cause"], "not known to us, reaped by an admin");
    assert!(!rig.state().join("local").join(bootstrap.instance.to_string()).exists());
}
