//! Removing what dead agents left: all of it, and nobody else's.

use std::{collections::BTreeSet, time::Duration};

use pilotlight_agent::{
    container::{Networks, reap},
    job::Wish,
};
use pilotlight_wire::Verdict;
use rustix::process::{Signal, kill_process, test_kill_process};
use tokio::time::timeout;

use crate::rig::{Rig, finished, until};

#[tokio::test]
async fn the_reaper_takes_what_belongs_to_no_assignment_of_its_own_instance() {
    let (rig, other) = (Rig::new().await, Rig::new().await);
    let script = "echo on; sleep 500";
    let (kept, lost, foreign) = (rig.script(script), rig.script(script), other.script(script));
    for (rig, start) in [(&rig, &kept), (&rig, &lost), (&other, &foreign)] {
        let job = rig.begin(start);
        job.printed("on\n").await;
        job.lose().await;
    }
    reap(&rig.context.engine, rig.context.instance, &BTreeSet::from([kept.assignment])).await.unwrap();
    assert_eq!(rig.state(lost.assignment).await, "absent");
    assert_eq!(rig.cgroups(Some(lost.assignment)), Vec::<std::path::PathBuf>::new());
    assert_eq!(rig.state(kept.assignment).await, "running");
    assert_eq!(other.state(foreign.assignment).await, "running");

    let job = rig.begin(&kept);
    job.wish(Wish::Cancel);
    assert_eq!(finished(job.end().await).verdict, Verdict::Cancelled);
    assert_eq!(rig.containers().await, Vec::<String>::new());
    // The spare network went, too: an agent reaps before it makes one.
    rig.clear().await;
    other.clear().await;
}

#[tokio::test]
async fn teardown_ends_jobs_and_attach_processes_even_stopped_ones() {
    let rig = Rig::new().await;
    let job = rig.begin(&rig.script("trap '' TERM; (setsid sleep 500 &); echo on; while :; do sleep 1; done"));
    job.printed("on\n").await;
    let attach = job.attach();
    kill_process(attach, Signal::STOP).unwrap();
    job.lose().await;
    rig.clear().await;
    until("the attach process is gone", async || test_kill_process(attach).is_err()).await;
}

#[tokio::test]
async fn what_is_being_made_when_an_agent_leaves_is_there_for_its_last_cleaning() {
    let rig = Rig::new().await;
    until("the spare network", async || rig.networks().await == 1).await;
    let (engine, networks) = (&rig.context.engine, &rig.context.networks);
    networks.take().await.unwrap();
    // Whoever wants the next one goes away in the middle of the call; Docker goes on with it.
    assert!(timeout(Duration::ZERO, networks.take()).await.is_err());
    engine.settle().await;
    assert_eq!(rig.networks().await, 2);
    rig.clear().await;
}

#[tokio::test]
async fn a_network_that_appears_after_its_agent_was_killed_goes_and_one_in_use_stays() {
    let rig = Rig::new().await;
    let job = rig.begin(&rig.script("echo on; sleep 500"));
    job.printed("on\n").await;
    until("the next spare network", async || rig.networks().await == 2).await;
    let unused = rig.context.networks.take().await.unwrap();
    // The next agent knows neither of the two; it makes one of its own.
    let next = Networks::new(rig.context.engine.clone(), rig.context.instance);
    let keeper = tokio::spawn(async move { next.keep().await });
    until("the job's network and the next agent's own", async || {
        let names = rig.network_names().await;
        names.len() == 2 && !names.contains(&unused)
    })
    .await;
    keeper.abort();
    job.wish(Wish::Cancel);
    assert_eq!(finished(job.end().await).verdict, Verdict::Cancelled);
    rig.clear().await;
}
