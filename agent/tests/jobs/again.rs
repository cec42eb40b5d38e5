//! Agents that die and come back: no job runs twice, no result and no line is lost.

use std::fs;

use bollard::query_parameters::*;
use pilotlight_agent::{container::Order, job::AssignmentDir};
use pilotlight_wire::{Verdict, Work, agent::Start};
use rustix::process::{Signal, kill_process};

use crate::rig::{Rig, finished, name, until};

const GAP: &str = "[pilotlight] output may be missing here";

/// Makes a job's container as an agent that was killed before it had started it.
async fn make(rig: &Rig, start: &Start) {
    let context = &rig.context;
    let image = context.engine.prepare_image("pilotlight/host", true, |_| {}).await.unwrap();
    let Work::Job(spec) = &start.work else { panic!("{start:?}") };
    let order = Order {
        name: &name(start.assignment),
        instance: context.instance,
        start,
        spec,
        image: &image,
        network: &context.networks.take().await.unwrap(),
        cgroup: &context.engine.cgroup(context.instance, start.assignment),
        memory: 64 * 1024 * 1024,
    };
    context.engine.create(&order).await.unwrap();
}

#[tokio::test]
async fn a_running_job_is_taken_up_again() {
    let rig = Rig::new().await;
    let start = rig.script("for i in $(seq 40); do echo line $i; sleep 0.05; done; exit 4");
    let job = rig.begin(&start);
    job.printed("line 3\n").await;
    job.lose().await;
    let mut job = rig.begin(&start);
    job.started().await;
    let spool = job.dir.spool();
    let end = finished(job.end().await);
    assert_eq!((end.verdict, end.code, end.gap), (Verdict::Failure, Some(4), false));
    assert_eq!(fs::read_to_string(spool).unwrap(), lines(40));
    rig.finish().await;
}

#[tokio::test]
async fn a_container_that_never_ran_is_made_again() {
    let rig = Rig::new().await;
    let start = rig.script("echo ran; exit 3");
    make(&rig, &start).await;
    let (text, end) = rig.output(&start).await;
    assert_eq!((text.as_str(), end.code, end.gap), ("ran\n", Some(3), false));
    // Likewise when the agent had got as far as the marker.
    let start = rig.script("echo ran; exit 3");
    make(&rig, &start).await;
    let dir = AssignmentDir::new(rig.dir.path(), start.assignment);
    fs::create_dir_all(dir.path()).unwrap();
    fs::write(dir.started(), "").unwrap();
    let (text, end) = rig.output(&start).await;
    assert_eq!((text.as_str(), end.code, end.gap), ("ran\n", Some(3), false));
    rig.finish().await;
}

#[tokio::test]
async fn a_job_that_ended_while_nobody_looked_has_its_result_and_its_lines() {
    let rig = Rig::new().await;
    let start = rig.script("for i in $(seq 10); do echo line $i; sleep 0.05; done; exit 6");
    let job = rig.begin(&start);
    job.printed("line 3\n").await;
    job.lose().await;
    until("it has ended", async || rig.state(start.assignment).await == "exited").await;
    let (text, end) = rig.output(&start).await;
    assert_eq!((end.code, end.gap), (Some(6), false));
    assert_eq!(text, lines(10));
    rig.finish().await;
}

#[tokio::test]
async fn the_last_output_is_waited_for_after_a_restart_too() {
    let rig = Rig::new().await;
    let start = rig.script("echo on; sleep 0.5; for i in $(seq 2000); do echo line $i; done");
    let mut job = rig.begin(&start);
    job.started().await;
    job.printed("on\n").await;
    let attach = job.attach();
    kill_process(attach, Signal::STOP).unwrap();
    job.lose().await;
    until("it has ended", async || rig.state(start.assignment).await == "exited").await;
    let mut job = rig.begin(&start);
    tokio::select! {
        () = tokio::time::sleep(std::time::Duration::from_secs(1)) => {}
        () = job.started() => panic!("it is over"),
    }
    kill_process(attach, Signal::CONT).unwrap();
    let spool = job.dir.spool();
    let end = finished(job.end().await);
    assert_eq!((end.code, end.gap), (Some(0), false));
    assert_eq!(fs::read_to_string(spool).unwrap(), format!("on\n{}", lines(2000)));
    rig.finish().await;
}

#[tokio::test]
async fn a_reader_that_died_with_the_agent_leaves_a_gap_that_is_seen() {
    let rig = Rig::new().await;
    let start = rig.script("echo -n on; sleep 1; echo lost; exit 2");
    let job = rig.begin(&start);
    job.printed("on").await;
    kill_process(job.attach(), Signal::KILL).unwrap();
    job.lose().await;
    until("it has ended", async || rig.state(start.assignment).await == "exited").await;
    let (text, end) = rig.output(&start).await;
    assert_eq!((end.code, end.gap), (Some(2), true));
    assert!(text.starts_with(&format!("on\n{GAP}")) && text.ends_with('\n'), "{text}");
    rig.finish().await;
}

#[tokio::test]
async fn a_reader_that_dies_is_replaced_and_the_job_goes_on() {
    let rig = Rig::new().await;
    let start = rig.script("for i in $(seq 40); do echo line $i; sleep 0.05; done; exit 8");
    let job = rig.begin(&start);
    job.printed("line 3\n").await;
    kill_process(job.attach(), Signal::KILL).unwrap();
    let spool = job.dir.spool();
    let end = finished(job.end().await);
    assert_eq!((end.verdict, end.code, end.gap), (Verdict::Failure, Some(8), true));
    let text = fs::read_to_string(spool).unwrap();
    assert_eq!(text.matches(GAP).count(), 1, "{text}");
    assert!(text.ends_with("line 40\n"), "{text}");
    rig.finish().await;
}

#[tokio::test]
async fn a_job_whose_container_is_gone_is_not_run_again() {
    let rig = Rig::new().await;
    let start = rig.script("echo on; sleep 500");
    let job = rig.begin(&start);
    job.printed("on\n").await;
    job.lose().await;
    let force = RemoveContainerOptions { force: true, ..RemoveContainerOptions::default() };
    rig.docker.remove_container(&name(start.assignment), Some(force)).await.unwrap();
    let (text, end) = rig.output(&start).await;
    assert_eq!((end.verdict, end.code), (Verdict::Infrastructure, None));
    assert_eq!(text, "on\n");
    rig.finish().await;
}

#[tokio::test]
async fn what_was_left_after_a_recorded_end_is_removed() {
    let rig = Rig::new().await;
    let start = rig.script("exit 5");
    let first = rig.begin(&start).end().await;
    make(&rig, &start).await;
    assert_eq!(rig.state(start.assignment).await, "created");
    assert_eq!(rig.begin(&start).end().await, first);
    rig.finish().await;
}

fn lines(n: u32) -> String {
    (1..=n).map(|n| format!("line {n}\n")).collect()
}
