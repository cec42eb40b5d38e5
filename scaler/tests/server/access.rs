//! Who may call what, and what everybody may see.

use pilotlight_wire::{
    ErrorBody, InstanceId, JobId, Verdict,
    agent::{Seq, SyncRequest},
};
use reqwest::{Method, StatusCode};

use super::rig::{Rig, finished, started};

const ID: &str = "018f0000-0000-7000-8000-000000000001";

#[tokio::test]
async fn every_route_wants_its_own_kind_of_token() {
    let rig = Rig::new().await;
    rig.submit().await;
    let agent = rig.enrol().await;
    let clients = [
        (Method::GET, "/api/v1/jobs"),
        (Method::GET, "/api/v1/jobs/ID"),
        (Method::PUT, "/api/v1/jobs/ID"),
        (Method::GET, "/api/v1/jobs/ID/log"),
        (Method::POST, "/api/v1/jobs/ID/cancel"),
        (Method::GET, "/api/v1/instances"),
        (Method::GET, "/api/v1/pools"),
        (Method::GET, "/api/v1/status"),
        (Method::GET, "/api/v1/plan"),
        (Method::POST, "/api/v1/drain"),
        (Method::POST, "/api/v1/resume"),
        (Method::GET, "/api/v1/orphans"),
        (Method::POST, "/api/v1/reap"),
        (Method::GET, "/metrics"),
    ];
    let agents = [
        (Method::POST, "/agent/v1/sync"),
        (Method::POST, "/agent/v1/assignments/ID/events"),
        (Method::PUT, "/agent/v1/assignments/ID/log?offset=0"),
    ];
    let wrong = "ab".repeat(32);
    let routes = clients.iter().map(|route| (route, agent.bearer.as_str()));
    for ((method, path), foreign) in routes.chain(agents.iter().map(|route| (route, rig.token.as_str()))) {
        for token in [None, Some(""), Some(wrong.as_str()), Some(foreign)] {
            let mut request = rig.http.request(method.clone(), format!("{}{}", rig.url, path.replace("ID", ID)));
            if let Some(token) = token {
                request = request.bearer_auth(token);
            }
            let answer = request.send().await.unwrap();
            assert_eq!(answer.status(), 401, "{method} {path} with {token:?}");
            assert_eq!(answer.json::<ErrorBody>().await.unwrap().code, "unauthorized", "{method} {path}");
        }
    }
}

#[tokio::test]
async fn a_bearer_of_another_nonce_or_of_an_unknown_instance_is_nobody_s() {
    let rig = Rig::new().await;
    rig.submit().await;
    let agent = rig.enrol().await;
    let keys = pilotlight_scaler::keys::Keys::load_or_create(&rig.state().join("key"), true).unwrap();
    let unknown: InstanceId = ID.parse().unwrap();
    for (instance, status) in [(agent.instance, StatusCode::UNAUTHORIZED), (unknown, StatusCode::NOT_FOUND)] {
        let bearer = keys.bearer(instance, &"cd".repeat(32));
        let sync = SyncRequest { seq: Seq { run: 1, n: 1 }, assignments: Vec::new(), sample: None, note: None };
        let sync = rig.http.post(format!("{}/agent/v1/sync", rig.url)).bearer_auth(bearer.expose()).json(&sync);
        assert_eq!(sync.send().await.unwrap().status(), status, "neither 410: nothing is ended by it");
    }
    let mut bootstrap = rig.bootstrap().await;
    bootstrap.secret = keys.enrol_secret(unknown);
    bootstrap.instance = unknown;
    assert_eq!(rig.enrol_with(&bootstrap, &"ab".repeat(32)).await.status(), 404);
}

#[tokio::test]
async fn what_is_no_route_is_said_in_the_same_form_as_every_error() {
    let rig = Rig::new().await;
    let job = JobId::random();
    let cases = [
        (Method::GET, "/".to_owned(), 404),
        (Method::GET, "/api/v2/jobs".to_owned(), 404),
        (Method::DELETE, format!("/api/v1/jobs/{job}"), 405),
        (Method::GET, "/agent/v1/enrol".to_owned(), 405),
    ];
    for (method, path, status) in cases {
        let url = format!("{}{path}", rig.url);
        let answer = rig.http.request(method.clone(), url).bearer_auth(&rig.token).send().await.unwrap();
        assert_eq!(answer.status(), status, "{method} {path}");
        let text = answer.text().await.unwrap();
        let error: Result<ErrorBody, _> = serde_json::from_str(&text);
        assert!(error.is_ok_and(|error| !error.message.is_empty()), "{method} {path}: {text:?}");
    }
}

#[tokio::test]
async fn metrics_are_openmetrics_and_tell_how_long_each_phase_took() {
    let rig = Rig::new().await;
    let job = rig.submit().await;
    let mut agent = rig.enrol().await;
    let id = agent.start().await.assignment;
    agent.event(id, 1, started()).await;
    agent.event(id, 2, finished(Verdict::Success, Some(0), 0)).await;
    assert_eq!(rig.log(job, "offset=0").await.1, "closed");
    for open in ["/healthz", "/readyz"] {
        assert_eq!(rig.http.get(format!("{}{open}", rig.url)).send().await.unwrap().status(), 200, "{open}");
    }

    let answer = rig.http.get(format!("{}/metrics", rig.url)).bearer_auth(&rig.token).send().await.unwrap();
    assert!(answer.headers()["content-type"].to_str().unwrap().starts_with("application/openmetrics-text"));
    let text = answer.text().await.unwrap();
    assert!(text.ends_with("# EOF\n"), "{text}");
    let mut kinds = Vec::new();
    for line in text.lines() {
        if let Some(kind) = line.strip_prefix("# TYPE ") {
            kinds.push(kind.split_whitespace().next().unwrap());
        } else if !line.starts_with('#') {
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert!(value.parse::<f64>().is_ok(), "{line}");
            assert!(kinds.iter().any(|kind| name.starts_with(kind)), "of no declared kind: {line}");
        }
    }
    for wanted in [
        r#"pilotlight_jobs_finished_total{label="cpu",verdict="success"} 1"#,
        r#"pilotlight_actions_total{action="launch",reason="demand"} 1"#,
        r#"pilotlight_instances{pool="here",phase="ready"} 1"#,
    ] {
        assert!(text.lines().any(|line| line == wanted), "{wanted}\n{text}");
    }
    for phase in ["planned", "launched", "booted", "enrolled", "assigned", "image_ready", "started", "finished"] {
        let wanted = format!("pilotlight_phase_seconds_count{{phase=\"{phase}\"}} 1");
        assert!(text.lines().any(|line| line == wanted), "{wanted}\n{text}");
    }
}
