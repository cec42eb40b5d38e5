//! A Docker that does not answer for a while, or not as it should, played by a socket between the agent and the real one.

use std::{fs, time::Duration};

use pilotlight_agent::job::End;
use pilotlight_wire::{Verdict, Volume};

use crate::{
    proxy::{Call, How, Proxy},
    rig::{Rig, finished},
};

#[tokio::test]
async fn a_job_goes_on_while_docker_does_not_answer() {
    let proxy = Proxy::new();
    let rig = Rig::at(&proxy.socket()).await;
    let start = rig.script("echo on; sleep 1; echo off; exit 4");
    let job = rig.begin(&start);
    job.printed("on\n").await;
    proxy.down(true);
    job.printed("off\n").await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    proxy.down(false);
    let end = finished(job.end().await);
    assert_eq!((end.verdict, end.code, end.gap), (Verdict::Failure, Some(4), false));
    rig.finish().await;
}

/// One wrong answer at each step: the job runs once and has its own code, or it was refused and has not run.
async fn one_wrong_answer(calls: &[Call], how: How) {
    for &call in calls {
        let proxy = Proxy::new();
        let rig = Rig::at(&proxy.socket()).await;
        let marks = tempfile::tempdir().unwrap();
        let mut start = rig.script("echo ran | tee -a /marks/ran; sleep 1; exit 3");
        start.volumes.push(Volume {
            name: "marks".to_owned(),
            host: marks.path().to_str().unwrap().to_owned(),
            mount: "/marks".to_owned(),
            read_only: false,
        });
        proxy.spoil(call, how);
        let job = rig.begin(&start);
        let spool = job.dir.spool();
        let end = job.end().await;
        assert!(proxy.has_spoilt(), "{call:?} was never called");
        let ran = fs::read_to_string(marks.path().join("ran")).unwrap_or_default();
        match &end {
            End::Refused { reason } => assert_eq!(ran, "", "{call:?}: {reason}"),
            End::Finished { verdict, exit_code, .. } => {
                assert_eq!((*verdict, *exit_code, &*ran), (Verdict::Failure, Some(3), "ran\n"), "{call:?}: {end:?}");
                let text = fs::read_to_string(spool).unwrap();
                assert!(text.starts_with("ran\n"), "{call:?}: {text}");
            }
        }
        rig.finish().await;
    }
}

const INSPECT: Call = ("GET", "/containers/");
const CREATE: Call = ("POST", "/containers/create");
const START: Call = ("POST", "/start");
const WAIT: Call = ("POST", "/wait");
const REMOVE: Call = ("DELETE", "/containers/");
/// The last one is the attach process's own look, by the version that it speaks.
const CALLS: [Call; 8] =
    [INSPECT, ("GET", "/images/"), CREATE, ("POST", "/attach"), START, WAIT, REMOVE, ("GET", "/v1.41/containers/")];

#[tokio::test]
async fn one_error_of_dockers_costs_no_job() {
    one_wrong_answer(&CALLS, How::Failed).await;
}

#[tokio::test]
async fn what_docker_does_and_says_has_failed_is_not_done_twice() {
    one_wrong_answer(&[CREATE, START, REMOVE], How::DoneAndFailed).await;
}

#[tokio::test]
async fn one_answer_that_is_none_costs_no_job() {
    one_wrong_answer(&CALLS, How::Garbage).await;
    one_wrong_answer(&[INSPECT, CREATE, WAIT], How::Page).await;
}

#[tokio::test]
async fn an_error_while_a_job_is_taken_up_again_does_not_end_it() {
    let proxy = Proxy::new();
    let rig = Rig::at(&proxy.socket()).await;
    let start = rig.script("echo on; sleep 4; echo off; exit 3");
    let job = rig.begin(&start);
    job.printed("on\n").await;
    job.lose().await;
    proxy.spoil(INSPECT, How::Failed);
    let (text, end) = rig.output(&start).await;
    assert!(proxy.has_spoilt());
    assert_eq!((&*text, end.code, end.gap), ("on\noff\n", Some(3), false));
    rig.finish().await;
}
