//! A Docker that loses streams, or does not say how a container ended.

use std::time::Duration;

use bollard::query_parameters::RemoveContainerOptions;
use pilotlight_wire::Verdict;
use serde_json::{Value, json};

use crate::{
    proxy::{How, Proxy, Stream},
    rig::{Rig, finished, name, until},
};

const GAP: &str = "[pilotlight] output may be missing here";

#[tokio::test]
async fn a_start_whose_answer_is_lost_is_no_second_run() {
    let proxy = Proxy::new();
    let rig = Rig::at(&proxy.socket()).await;
    proxy.spoil(("POST", "/start"), How::Lost);
    let start = rig.script("echo ran; sleep 1; exit 3");
    let (text, end) = rig.output(&start).await;
    assert!(proxy.has_spoilt());
    assert_eq!((end.verdict, end.code, end.gap), (Verdict::Failure, Some(3), false));
    assert_eq!(text, "ran\n");
    rig.finish().await;
}

#[tokio::test]
async fn a_stream_that_is_cut_off_is_taken_up_again_with_a_gap_that_is_seen() {
    let proxy = Proxy::new();
    let rig = Rig::at(&proxy.socket()).await;
    let start = rig.script("for i in $(seq 60); do echo line $i; sleep 0.05; done; exit 8");
    let job = rig.begin(&start);
    job.printed("line 3\n").await;
    proxy.cut_streams();
    job.printed(GAP).await;
    // The agent that notices it need not be the one that tells the job's end.
    job.lose().await;
    let (text, end) = rig.output(&start).await;
    assert_eq!((end.verdict, end.code, end.gap), (Verdict::Failure, Some(8), true));
    assert_eq!(text.matches(GAP).count(), 1, "{text}");
    assert!(text.starts_with("line 1\n") && text.ends_with("line 60\n"), "{text}");
    rig.finish().await;
}

#[tokio::test]
async fn a_job_that_goes_on_and_ends_while_docker_is_away_has_a_gap_and_its_code() {
    let proxy = Proxy::new();
    let rig = Rig::at(&proxy.socket()).await;
    let start = rig.script("echo on; sleep 4; echo lost; exit 6");
    let job = rig.begin(&start);
    job.printed("on\n").await;
    proxy.down(true);
    proxy.cut_streams();
    until("it has ended", async || rig.state(start.assignment).await == "exited").await;
    proxy.down(false);
    let spool = job.dir.spool();
    let end = finished(job.end().await);
    assert_eq!((end.verdict, end.code, end.gap), (Verdict::Failure, Some(6), true));
    let text = std::fs::read_to_string(spool).unwrap();
    assert!(text.starts_with(&format!("on\n{GAP}")) && !text.contains("lost"), "{text}");
    rig.finish().await;
}

#[tokio::test]
async fn c37_a_stream_that_never_ends_does_not_hold_the_jobs_end() {
    let proxy = Proxy::new();
    proxy.stream(Stream::Endless);
    let rig = Rig::at(&proxy.socket()).await;
    let (text, end) = rig.output(&rig.script("echo on; exit 3")).await;
    assert_eq!((end.verdict, end.code, end.gap), (Verdict::Failure, Some(3), true), "nobody knows what is missing");
    assert!(text.starts_with(&format!("on\n{GAP}")), "{text}");
    rig.finish().await;
}

#[tokio::test]
async fn the_last_output_is_waited_for_as_long_as_it_comes() {
    let proxy = Proxy::new();
    // The attach's own answer is the first piece; all takes longer than a silent stream is waited for.
    proxy.stream(Stream::Slow(Duration::from_millis(600)));
    let rig = Rig::at(&proxy.socket()).await;
    let (text, end) = rig.output(&rig.script("head -c 25000 /dev/zero | tr '\\0' x; exit 3")).await;
    assert_eq!((end.verdict, end.code, end.gap), (Verdict::Failure, Some(3), false));
    assert!(text == "x".repeat(25000), "{} bytes", text.len());
    rig.finish().await;
}

#[tokio::test]
async fn c37_a_stream_that_ends_without_a_look_at_the_container_is_no_success() {
    let proxy = Proxy::new();
    let rig = Rig::at(&proxy.socket()).await;
    let start = rig.script("echo on; sleep 500");
    let job = rig.begin(&start);
    job.printed("on\n").await;
    proxy.down(true);
    proxy.cut_streams();
    let force = RemoveContainerOptions { force: true, ..RemoveContainerOptions::default() };
    rig.docker.remove_container(&name(start.assignment), Some(force)).await.unwrap();
    proxy.down(false);
    let end = finished(job.end().await);
    assert_eq!((end.verdict, end.code, end.gap), (Verdict::Infrastructure, None, true), "{end:?}");
    rig.finish().await;
}

#[tokio::test]
async fn c37_a_container_that_is_said_to_run_after_its_stream_has_ended_is_waited_for() {
    let proxy = Proxy::new();
    let rig = Rig::at(&proxy.socket()).await;
    let start = rig.script("echo on; exit 5");
    proxy.lie(|mut it: Value| {
        if it["State"]["Status"] == "exited" {
            it["State"] = json!({
                "Status": "running", "Running": true, "Pid": 1 << 30, "ExitCode": 0,
                "StartedAt": it["State"]["StartedAt"], "FinishedAt": "0001-01-01T00:00:00Z",
            });
        }
        Some(it)
    });
    let job = rig.begin(&start);
    job.printed("on\n").await;
    until("it has ended", async || rig.state(start.assignment).await == "exited").await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(!job.is_over(), "running is not over, whatever else is said");
    proxy.tell_the_truth();
    let end = finished(job.end().await);
    assert_eq!((end.verdict, end.code), (Verdict::Failure, Some(5)));
    rig.finish().await;
}

#[tokio::test]
async fn c37_without_an_integer_for_an_exit_code_nothing_is_a_success() {
    let proxy = Proxy::new();
    let rig = Rig::at(&proxy.socket()).await;
    for code in [Value::Null, json!(1_u64 << 40)] {
        let wanted = code.clone();
        proxy.lie(if wanted.is_null() {
            |mut it| {
                drop(it["State"].as_object_mut().unwrap().remove("ExitCode"));
                Some(it)
            }
        } else {
            |mut it| {
                it["State"]["ExitCode"] = json!(1_u64 << 40);
                Some(it)
            }
        });
        let (text, end) = rig.output(&rig.script("echo on")).await;
        assert_eq!((text.as_str(), end.verdict, end.code), ("on\n", Verdict::Infrastructure, None), "{code}: {end:?}");
        assert!(end.reason.contains("exit code"), "{}", end.reason);
    }
    rig.finish().await;
}

#[tokio::test]
async fn c37_a_container_that_docker_forgets_is_no_success_and_does_not_run_on() {
    let proxy = Proxy::new();
    let rig = Rig::at(&proxy.socket()).await;
    let start = rig.script("echo on; while :; do sleep 0.1; done");
    let job = rig.begin(&start);
    job.printed("on\n").await;
    proxy.lie(|_| None);
    // The agent looks again when the attach process is gone.
    proxy.cut_streams();
    let end = finished(job.end().await);
    assert_eq!((end.verdict, end.code), (Verdict::Infrastructure, None));
    assert!(end.reason.contains("removed while it ran"), "{}", end.reason);
    rig.finish().await;
}

#[tokio::test]
async fn c37_silence_that_is_longer_than_any_call_may_take_is_harmless() {
    let rig = Rig::new().await;
    let (text, end) = rig.output(&rig.script("echo on; sleep 13; echo off; exit 3")).await;
    assert_eq!((text.as_str(), end.code, end.gap), ("on\noff\n", Some(3), false));
    rig.finish().await;
}
