//! Jobs that are ended from above.

use std::time::Duration;

use pilotlight_agent::job::Wish;
use pilotlight_wire::Verdict;
use tokio::time::Instant;

use crate::rig::{Rig, finished};

#[tokio::test]
async fn ended_before_it_started() {
    let rig = Rig::new().await;
    for (wish, verdict) in [
        (Wish::Cancel, Verdict::Cancelled),
        (Wish::Timeout, Verdict::Timeout),
        (Wish::Terminate, Verdict::Infrastructure),
    ] {
        let job = rig.wished(&rig.script("echo ran"), wish);
        let spool = job.dir.spool();
        let end = finished(job.end().await);
        assert_eq!((end.verdict, end.code, end.usage), (verdict, None, None));
        assert_eq!(std::fs::read(spool).unwrap_or_default(), b"");
    }
    rig.finish().await;
}

#[tokio::test]
async fn a_cancelled_job_may_clean_up_and_keeps_its_exit_code() {
    let rig = Rig::new().await;
    let job = rig.begin(&rig.script("trap 'echo bye; exit 9' TERM; echo on; while :; do sleep 0.1; done"));
    job.printed("on\n").await;
    job.wish(Wish::Cancel);
    let spool = job.dir.spool();
    let end = finished(job.end().await);
    assert_eq!((end.verdict, end.code), (Verdict::Cancelled, Some(9)));
    assert_eq!(std::fs::read_to_string(spool).unwrap(), "on\nbye\n");
    assert!(end.usage.is_some());
    rig.finish().await;
}

#[tokio::test]
async fn a_job_that_ignores_its_deadline_is_killed_after_the_grace() {
    let rig = Rig::new().await;
    // Double-forked, in a session of its own, deaf: only the cgroup finds it.
    let script = "trap '' TERM; (setsid bash -c 'trap \"\" TERM; while :; do sleep 1; done' &); echo on; while :; do sleep 1; done";
    let mut start = rig.script(script);
    start.stop_grace_seconds = 1;
    let job = rig.begin(&start);
    job.printed("on\n").await;
    let began = Instant::now();
    job.wish(Wish::Timeout);
    let end = finished(job.end().await);
    assert_eq!((end.verdict, end.code), (Verdict::Timeout, Some(137)));
    assert!(began.elapsed() >= Duration::from_secs(1), "the grace is given");
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    rig.finish().await;
}

#[tokio::test]
async fn a_machine_that_goes_away_gives_no_grace_even_after_a_cancel() {
    let rig = Rig::new().await;
    let mut start = rig.script("trap '' TERM; echo on; while :; do sleep 1; done");
    start.stop_grace_seconds = 3600;
    let job = rig.begin(&start);
    job.printed("on\n").await;
    job.wish(Wish::Cancel);
    tokio::task::yield_now().await;
    job.wish(Wish::Terminate);
    let end = finished(job.end().await);
    assert_eq!((end.verdict, end.code), (Verdict::Infrastructure, Some(137)));
    rig.finish().await;
}

#[tokio::test]
async fn a_wish_from_before_a_restart_still_holds() {
    let rig = Rig::new().await;
    let start = rig.script("echo on; sleep 500");
    let job = rig.begin(&start);
    job.printed("on\n").await;
    job.lose().await;
    let end = finished(rig.wished(&start, Wish::Cancel).end().await);
    assert_eq!((end.verdict, end.code), (Verdict::Cancelled, Some(143)));
    rig.finish().await;
}
