//! What needs paused time or no scaler at all. The rest drives the real program: `scaler/tests/cli.rs`.

use std::{sync::Mutex, time::Duration};

use clap::CommandFactory;
use pilotlight_wire::{
    DirectJob, JobId, Verdict,
    api::{JobState, JobView, Phases, SubmitJob},
};
use tokio::{sync::watch, time::Instant};

use super::{
    client::Client,
    exit::{self, UNREACHABLE},
    stream::{PATIENCE, Tail},
    submit::{ResultFile, Submission, clear_result_file},
    *,
};

/// A client of a port that nobody listens on.
fn client_of_nobody() -> Client {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let args = AccessArgs { url: Some(format!("http://127.0.0.1:{port}")), ..AccessArgs::default() };
    Client::new(args.resolve(|_| Some("token".into())).unwrap()).unwrap()
}

fn job(verdict: Option<Verdict>, exit_code: Option<i32>) -> JobView {
    JobView {
        id: JobId::random(),
        forge: "direct".parse().unwrap(),
        name: "n".to_owned(),
        label: "l".parse().unwrap(),
        state: JobState::Finished,
        verdict,
        exit_code,
        reason: None,
        instance: None,
        gpus: 0,
        queued_at: jiff::Timestamp::UNIX_EPOCH,
        started_at: None,
        finished_at: None,
        phases: Phases::default(),
        detail: None,
        usage: None,
        cost: None,
        log_gap: false,
        forge_job: None,
    }
}

fn body() -> SubmitJob {
    let spec = DirectJob {
        image: "i".to_owned(),
        entrypoint: None,
        command: Vec::new(),
        env: std::collections::BTreeMap::new(),
        user: None,
        workdir: None,
    };
    SubmitJob { label: "l".parse().unwrap(), name: String::new(), spec, timeout_seconds: None, priority: None }
}

#[test]
fn the_command_line_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn a_jobs_end_decides_the_exit_code() {
    use Verdict::{Cancelled, Failure, Infrastructure, Success, Timeout};
    for (verdict, own, code) in [
        (Some(Success), Some(0), 0),
        (Some(Success), None, 0),
        (Some(Failure), Some(1), 1),
        (Some(Failure), Some(75), 75),
        (Some(Failure), Some(255), 255),
        (Some(Failure), Some(256), 1),
        (Some(Failure), Some(-1), 1),
        (Some(Failure), Some(0), 1),
        (Some(Failure), None, exit::BAD_INPUT),
        (Some(Infrastructure), Some(0), exit::INFRASTRUCTURE),
        (Some(Infrastructure), None, exit::INFRASTRUCTURE),
        (Some(Timeout), Some(137), exit::TIMEOUT),
        (Some(Cancelled), Some(143), exit::CANCELLED),
        (None, None, exit::INFRASTRUCTURE),
    ] {
        assert_eq!(exit::of_job(&job(verdict, own)), code, "{verdict:?} {own:?}");
    }
}

#[test]
fn a_result_file_is_a_regular_file_and_never_an_old_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("result.json");
    std::fs::write(&path, "old").unwrap();
    clear_result_file(&path).unwrap();
    assert!(!path.exists());
    assert_eq!(clear_result_file(std::path::Path::new("/dev/null")).unwrap_err().code, exit::USAGE);
    let id = JobId::random();
    ResultFile::of(id, &Err(exit::Failure::new(UNREACHABLE, "why"))).write(&path).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let expected = serde_json::json!({
        "verdict": null, "exit_code": null, "reason": "why", "job": id, "log_gap": false, "usage": null
    });
    assert_eq!(json, expected);
    let nowhere = dir.path().join("none/result.json");
    let failure = ResultFile::of(id, &Ok(job(None, None))).write(&nowhere).unwrap_err();
    assert_eq!(failure.code, exit::BAD_INPUT);
}

#[tokio::test(start_paused = true)]
async fn a_job_that_is_never_accepted_is_given_up_after_30_seconds() {
    let client = client_of_nobody();
    let (_signals, counted) = watch::channel(0);
    let notes = Mutex::new(Vec::new());
    let note = |line: &str| notes.lock().unwrap().push(line.to_owned());
    let id = JobId::random();
    let submission = Submission { client: &client, id, body: body(), signals: counted, notes: &note };
    let begun = Instant::now();
    let failure = submission.accept().await.unwrap_err();
    assert_eq!(failure.code, UNREACHABLE);
    assert!(failure.message.contains(&format!("pilotlight logs --follow {id}")), "{}", failure.message);
    let took = begun.elapsed();
    assert!((Duration::from_secs(25)..=Duration::from_secs(31)).contains(&took), "{took:?}");
    assert_eq!(notes.lock().unwrap().len(), 1, "one line, not one a try");
}

#[tokio::test(start_paused = true)]
async fn a_signal_before_acceptance_ends_within_the_same_30_seconds_and_a_second_at_once() {
    let client = client_of_nobody();
    let (signals, counted) = watch::channel(0);
    let submission =
        Submission { client: &client, id: JobId::random(), body: body(), signals: counted, notes: &|_| {} };
    let begun = Instant::now();
    signals.send_replace(1);
    assert_eq!(submission.accept().await.unwrap_err().code, UNREACHABLE);
    assert!(begun.elapsed() <= Duration::from_secs(31));
    signals.send_replace(2);
    let begun = Instant::now();
    assert_eq!(submission.accept().await.unwrap_err().code, exit::CANCELLED);
    assert_eq!(begun.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn an_accepted_job_is_followed_for_10_minutes_without_an_answer() {
    let client = client_of_nobody();
    let tail = |accepted| Tail { client: &client, id: JobId::random(), follow: true, accepted, notes: &|_| {} };
    let begun = Instant::now();
    assert_eq!(tail(true).copy(&mut Vec::new()).await.unwrap_err().code, UNREACHABLE);
    let took = begun.elapsed();
    assert!(took >= PATIENCE && took < PATIENCE + Duration::from_secs(5), "{took:?}");
    let begun = Instant::now();
    assert_eq!(tail(false).copy(&mut Vec::new()).await.unwrap_err().code, UNREACHABLE);
    assert!(begun.elapsed() < Duration::from_secs(1), "`logs` says at once that nobody is there");
}
