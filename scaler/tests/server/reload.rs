//! A new config in a running scaler, and machines that an admin keeps.

use pilotlight_wire::Verdict;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use super::rig::{Rig, finished, started, until};

async fn alert(rig: &Rig, code: &str) -> Option<Value> {
    let status = rig.get("/api/v1/status").await;
    status["alerts"].as_array().unwrap().iter().find(|alert| alert["code"] == code).cloned()
}

#[tokio::test]
async fn a_removed_pool_drains_and_its_job_ends_well_while_its_label_waits() {
    let rig = Rig::new().await;
    let running = rig.submit().await;
    let mut agent = rig.enrol().await;
    let id = agent.start().await.assignment;
    agent.listed.push(id);
    agent.event(id, 1, started()).await;
    rig.reload(|text| text.replace("[label.cpu]", "[label.other]").replace("here", "there")).await;
    until("draining", async || rig.instance(agent.instance).await["phase"] == "draining").await;
    assert_eq!(rig.instance(agent.instance).await["cause"], "its pool is no longer in the config");
    assert_eq!(rig.job(running).await["state"], "running");
    let path = format!("/api/v1/jobs/{}", pilotlight_wire::JobId::random());
    let (status, error) = rig.call(Method::PUT, &path, Some(super::rig::job())).await;
    assert_eq!(status, 422);
    assert_eq!(error["message"], "no label cpu; this scaler serves: other");

    agent.event(id, 2, finished(Verdict::Success, Some(0), 0)).await;
    assert_eq!(rig.job(running).await["verdict"], "success");
    until("gone", async || rig.instance(agent.instance).await["phase"] == "gone").await;
}

#[tokio::test]
async fn a_job_that_waits_goes_to_the_pool_that_its_label_names_now() {
    let rig = Rig::new().await;
    rig.reload(|text| text.replace("agent = \"", "agent = \"/nosuch")).await;
    let job = rig.submit().await;
    until("stopped", async || rig.get("/api/v1/pools").await[0]["placements"][0]["health"] == "stopped").await;
    assert!(alert(&rig, "placement_stopped").await.is_some());
    rig.reload(|text| text.replace("/nosuch", "").replace("here", "there")).await;
    let agent = rig.enrol().await;
    assert_eq!(rig.instance(agent.instance).await["pool"], "there");
    assert_eq!(alert(&rig, "placement_stopped").await, None, "a reload tries again");
    until("placed", async || rig.job(job).await["state"] == "assigned").await;
}

#[tokio::test]
async fn an_invalid_config_is_refused_with_an_alert_and_the_running_one_kept() {
    let rig = Rig::new().await;
    rig.reload(|text| text.replace("pool = \"here\"", "pool = \"nosuch\"")).await;
    until("an alert", async || alert(&rig, "reload_failed").await.is_some()).await;
    let told = alert(&rig, "reload_failed").await.unwrap()["message"].to_string();
    assert!(told.contains("label.cpu.pool") && told.contains("nosuch"), "{told}");
    rig.submit().await;
    rig.enrol().await;
    rig.reload(|text| text.replace("nosuch", "here").replace("lease = \"1m\"", "lease = \"2m\"")).await;
    until("no alert", async || alert(&rig, "reload_failed").await.is_none()).await;
    let again = rig.enrol_with(&rig.bootstrap().await, &"ab".repeat(32)).await;
    let policy = again.json::<Value>().await.unwrap()["policy"].clone();
    assert_eq!(policy["lease_seconds"], 120, "the new rules hold for agents too");
}

#[tokio::test]
async fn min_idle_machines_are_there_before_a_job_and_stay() {
    let rig = Rig::new().await;
    rig.reload(|text| text.replace("cpu_jobs = 2\n", "cpu_jobs = 2\nmin_idle = 1\nidle_timeout = \"0s\"\n")).await;
    let mut agent = rig.enrol().await;
    assert_eq!(rig.get("/api/v1/pools").await[0]["min_idle"], 1);
    let job = rig.submit().await;
    assert_eq!(agent.start().await.job.id, job, "no boot to wait for");
    assert_eq!(rig.bootstraps(2).await.len(), 2, "the next one is on its way");
}

#[tokio::test]
async fn a_held_machine_stays_takes_no_job_and_goes_when_released() {
    let rig = Rig::new().await;
    rig.reload(|text| text.replace("cpu_jobs = 2\n", "cpu_jobs = 2\nidle_timeout = \"0s\"\n")).await;
    rig.submit().await;
    let mut agent = rig.enrol().await;
    let id = agent.start().await.assignment;
    let hold = |seconds: u64| json!({"instance": agent.instance, "seconds": seconds});
    let (status, error) = rig.call(Method::POST, "/api/v1/hold", Some(hold(86_401))).await;
    assert_eq!(status, 422, "{error}");
    let (status, held) = rig.call(Method::POST, "/api/v1/hold", Some(hold(3600))).await;
    assert_eq!(status, 200, "{held}");
    assert!(held["held_until"].is_string());
    agent.event(id, 1, finished(Verdict::Success, Some(0), 0)).await;
    let next = rig.submit().await;
    let other = rig.bootstraps(2).await.into_iter().find(|one| one.instance != agent.instance).unwrap();
    assert_eq!(rig.enrol_as(&other).await.start().await.job.id, next);
    assert_eq!(rig.instance(agent.instance).await["phase"], "ready");
    assert!(alert(&rig, "held").await.unwrap()["message"].as_str().unwrap().contains("pilotlight release"));

    let release = json!({"instance": agent.instance});
    let (status, view) = rig.call(Method::POST, "/api/v1/release", Some(release.clone())).await;
    assert_eq!((status, &view["held_until"]), (StatusCode::OK, &Value::Null));
    until("gone", async || rig.instance(agent.instance).await["phase"] == "gone").await;
    assert_eq!(alert(&rig, "held").await, None);
    let (status, error) = rig.call(Method::POST, "/api/v1/hold", Some(hold(60))).await;
    assert_eq!((status, &error["code"]), (StatusCode::CONFLICT, &json!("leaving")));
}
