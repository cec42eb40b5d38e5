//! A Gitea server, played: what the scaler asks of it, and what becomes of jobs and runners when answers are lost,
//! machines die and the server is away (spec gitea 2 to 5).

mod fake;

use std::time::Duration;

use pilotlight_wire::{
    RunnerGrant, Task, Verdict, Work,
    agent::{AssignmentEventKind, Directive, Stage, Start},
};
use reqwest::Method;
use serde_json::json;

use self::fake::{Fault, Gitea};
use super::rig::{Agent, Rig, finished, started, until};

/// A scaler that serves a played Gitea.
async fn rig(gitea: &Gitea, more: &str) -> Rig {
    let (url, more) = (gitea.url.clone(), more.to_owned());
    Rig::with(move |dir, config| {
        let file = |name: &str, text: &str| {
            use std::os::unix::fs::PermissionsExt;
            let path = dir.join(name);
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
            path
        };
        let (token, secret) = (file("gitea.token", "the-token\n"), file("webhook.secret", "the-secret\n"));
        let config = config.replace("[pool.here]\n", "[pool.here]\nrunner_image = \"runner\"\n");
        format!(
            "{config}[forge.acme.gitea]\nurl = {url:?}\nscope = \"acme\"\ntoken_file = {token:?}\n\
             webhook_secret_file = {secret:?}\npoll = \"200ms\"\n{more}"
        )
    })
    .await
}

/// Syncs until told to run a runner.
async fn granted(agent: &mut Agent) -> (Start, RunnerGrant) {
    let start = agent.start().await;
    let Work::Runner(grant) = start.work.clone() else { panic!("{start:?}") };
    (start, *grant)
}

fn picked(job: &fake::Job, task: i64) -> AssignmentEventKind {
    let (repository, name) = (job.repository.clone(), job.name.clone());
    AssignmentEventKind::Picked(Task { id: task, repository, run: job.run, job: name, steps: 2 })
}

#[tokio::test]
async fn a_queued_job_becomes_a_machine_and_a_runner_and_leaves_no_registration() {
    let gitea = Gitea::start().await;
    let rig = rig(&gitea, "").await;
    let id = gitea.queue("acme/train", "train", &["cpu"]);
    let mut agent = rig.enrol().await;
    let (start, grant) = granted(&mut agent).await;
    assert_eq!((grant.labels.as_slice(), grant.image.as_str()), (["cpu".to_owned()].as_slice(), "runner"));
    assert_eq!(grant.url, gitea.url);
    assert!(grant.preface.iter().any(|line| line.contains("of pool here on here")), "{:?}", grant.preface);
    let registered = gitea.runners();
    assert_eq!(registered.len(), 1);
    assert!(registered[0].ephemeral, "for one job");
    let told = serde_json::to_string(&start).unwrap();
    assert!(!told.contains(fake::REGISTRATION_TOKEN), "the registration token never leaves the scaler");

    // The row is shown with what it was granted for, then with what it took.
    agent.listed.push(start.assignment);
    agent.stage = Stage::Running;
    agent.event(start.assignment, 1, started()).await;
    let job = gitea.take(id, grant.id);
    agent.event(start.assignment, 2, picked(&job, 77)).await;
    until("the job is known", async || {
        let jobs = rig.get("/api/v1/jobs").await;
        jobs[0]["forge_job"]["taken"] == json!(true) && jobs[0]["forge_job"]["url"] == json!(job.html_url)
    })
    .await;
    gitea.complete(id, "success");
    agent.event(start.assignment, 3, finished(Verdict::Success, Some(0), 0)).await;
    until("over", async || rig.get("/api/v1/jobs").await == json!([])).await;
    assert!(gitea.runners().is_empty());
    let all = rig.get("/api/v1/jobs?all=1").await;
    assert_eq!((&all[0]["verdict"], &all[0]["forge"]), (&json!("success"), &json!("acme")), "{all}");
}

#[tokio::test]
async fn a_lost_reply_to_register_leaves_one_registration_whose_token_somebody_has() {
    let gitea = Gitea::start().await;
    let rig = rig(&gitea, "").await;
    gitea.next("Register", Fault::AnswerLost);
    gitea.queue("acme/train", "train", &["cpu"]);
    let mut agent = rig.enrol().await;
    let (_, grant) = granted(&mut agent).await;
    let runners = gitea.runners();
    assert_eq!(runners.iter().map(|runner| runner.id).collect::<Vec<_>>(), [grant.id], "the lost one was removed");
    assert_eq!(gitea.calls("Register"), 2);
}

#[tokio::test]
async fn a_job_that_somebody_else_took_leaves_no_runner() {
    let gitea = Gitea::start().await;
    let rig = rig(&gitea, "").await;
    let id = gitea.queue("acme/train", "train", &["cpu"]);
    let mut agent = rig.enrol().await;
    let (start, _) = granted(&mut agent).await;
    agent.listed.push(start.assignment);
    agent.event(start.assignment, 1, started()).await;
    gitea.take(id, 9999);
    rig.call(Method::POST, "/api/v1/drain", Some(json!({"target": {"instance": agent.instance}, "now": false}))).await;
    assert_eq!(agent.directives().await, [Directive::Withdraw { assignment: start.assignment }]);
    agent.event(start.assignment, 2, finished(Verdict::Cancelled, None, 0)).await;
    until("no runner is registered", async || gitea.runners().is_empty()).await;
}

#[tokio::test]
async fn a_dead_machines_job_is_ended_with_a_reason_and_runs_again_once() {
    let gitea = Gitea::start().await;
    let rig = rig(&gitea, "").await;
    let id = gitea.queue("acme/train", "train", &["cpu"]);
    let mut agent = rig.enrol().await;
    let (start, grant) = granted(&mut agent).await;
    agent.listed.push(start.assignment);
    agent.event(start.assignment, 1, started()).await;
    let job = gitea.take(id, grant.id);
    agent.event(start.assignment, 2, picked(&job, 77)).await;
    until("the job is known", async || rig.get("/api/v1/jobs").await[0]["forge_job"]["taken"] == json!(true)).await;
    // Its log has lines already; the first try to end it is not answered.
    gitea.log(77, &["one", "two"]);
    gitea.next("UpdateTask", Fault::AnswerLost);
    rig.kill_machine(agent.instance);
    until("the job has ended at the forge", async || gitea.job(id).is_some_and(|job| job.status == "completed")).await;
    let log = gitea.log_of(77);
    assert_eq!(log[..2], ["one", "two"], "what was there stays");
    assert!(log[2].contains("its machine is gone"), "{log:?}");
    until("it is queued again", async || gitea.queued().len() == 1).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(gitea.calls("rerun"), 1);
    assert!(gitea.runners().iter().all(|runner| runner.id != grant.id));
}

#[tokio::test]
async fn what_policy_or_labels_refuse_launches_nothing_and_is_explained() {
    let gitea = Gitea::start().await;
    let rig = rig(&gitea, "repositories = [\"acme/train\"]\n").await;
    gitea.queue("acme/other", "a", &["cpu"]);
    gitea.queue("acme/train", "b", &["cpu", "linux"]);
    gitea.queue("acme/train", "c", &["ubuntu-latest"]);
    gitea.queue("acme/train", "caller", &[]);
    until("explained", async || {
        let plan = rig.get("/api/v1/plan").await["waiting"].to_string();
        plan.contains("acme/other is not among") && plan.contains("write `runs-on: cpu`")
    })
    .await;
    let plan = rig.get("/api/v1/plan").await;
    assert_eq!(plan["waiting"].as_array().unwrap().len(), 2, "what is not ours is not told: {plan}");
    assert_eq!(rig.get("/api/v1/instances").await, json!([]));
    // One that is allowed is served by a runner of its repository alone: the server would give it others' jobs, too.
    gitea.queue("acme/train", "d", &["cpu"]);
    let mut agent = rig.enrol().await;
    granted(&mut agent).await;
    assert_eq!(gitea.runners()[0].scope, "/repos/acme/train/actions");
}

#[tokio::test]
async fn a_list_of_many_pages_is_read_whole() {
    let gitea = Gitea::start().await;
    let rig = rig(&gitea, "").await;
    for n in 0..120 {
        gitea.queue("acme/train", &format!("job {n}"), &["cpu"]);
    }
    until("all are known", async || rig.get("/api/v1/jobs").await.as_array().unwrap().len() == 120).await;
    let status = rig.get("/api/v1/status").await;
    assert_eq!(status["jobs_queued"], json!(120), "{status}");
    assert_eq!(rig.get("/api/v1/instances").await.as_array().unwrap().len(), 2, "max_instances holds");
}

#[tokio::test]
async fn a_signed_webhook_wakes_the_reading_and_another_does_not() {
    let gitea = Gitea::start().await;
    let rig = rig(&gitea, "").await;
    until("read", async || gitea.calls("jobs") > 0).await;
    let hook = async |path: &str, secret: &str| {
        let body = json!({"action": "queued"}).to_string();
        let key = aws_lc_rs::hmac::Key::new(aws_lc_rs::hmac::HMAC_SHA256, secret.as_bytes());
        let signature = hex::encode(aws_lc_rs::hmac::sign(&key, body.as_bytes()));
        let request =
            rig.http.post(format!("{}/webhooks/gitea/{path}", rig.url)).header("x-gitea-signature", signature);
        request.body(body).send().await.unwrap().status()
    };
    assert_eq!(hook("acme", "the-secret").await, 204);
    assert_eq!(hook("acme", "another").await, 401);
    assert_eq!(hook("nosuch", "the-secret").await, 401);
    let unsigned = rig.http.post(format!("{}/webhooks/gitea/acme", rig.url)).send().await.unwrap();
    assert_eq!(unsigned.status(), 401);
}

#[tokio::test]
async fn a_server_that_is_away_costs_no_machine_and_is_told() {
    let gitea = Gitea::start().await;
    let rig = rig(&gitea, "").await;
    gitea.queue("acme/train", "train", &["cpu"]);
    let bootstrap = rig.bootstrap().await;
    gitea.away(true);
    let mut agent = rig.enrol_as(&bootstrap).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(rig.get("/api/v1/instances").await.as_array().unwrap().len(), 1, "absence is not emptiness");
    gitea.away(false);
    granted(&mut agent).await;
}

#[tokio::test]
async fn registrations_of_a_lost_database_are_swept_and_those_of_others_left_alone() {
    let gitea = Gitea::start().await;
    let mut rig = rig(&gitea, "").await;
    gitea.queue("acme/train", "train", &["cpu"]);
    let mut agent = rig.enrol().await;
    let (_, grant) = granted(&mut agent).await;
    let prefix = grant.name.rsplitn(6, '-').last().unwrap().to_owned();
    gitea.register("somebody-elses");
    gitea.register(&format!("{prefix}-018f0000-0000-7000-8000-000000000001"));
    gitea.empty_queue();
    rig.stop().await.unwrap();
    rig.edit(|config| config.replace("lease = \"1m\"", "lease = \"1s\""));
    rig.start().await;
    until("swept", async || {
        let names: Vec<String> = gitea.runners().into_iter().map(|runner| runner.name).collect();
        names.contains(&"somebody-elses".to_owned()) && !names.iter().any(|name| name.ends_with("0001"))
    })
    .await;
}
