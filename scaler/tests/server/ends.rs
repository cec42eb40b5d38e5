//! How machines and jobs end when something dies or is lost on the way.

use pilotlight_wire::{
    ErrorBody, Verdict,
    agent::{Directive, Seq},
};
use reqwest::Method;
use serde_json::json;

use super::rig::{Rig, finished, started, until};

#[tokio::test]
async fn a_machine_is_told_to_go_until_it_is_gone_whoever_restarts_and_then_nothing_else() {
    let mut rig = Rig::new().await;
    let job = rig.submit().await;
    let mut agent = rig.enrol().await;
    let bootstrap = rig.bootstrap().await;
    let id = agent.start().await.assignment;
    agent.event(id, 1, finished(Verdict::Success, Some(0), 0)).await;
    assert_eq!(rig.log(job, "offset=0").await.1, "closed");
    // As while Docker is down.
    std::fs::write(rig.dir.path().join("stuck"), "").unwrap();
    let drain = json!({"target": {"instance": agent.instance}});
    rig.call(Method::POST, "/api/v1/drain", Some(drain)).await;
    for restarted in [false, true] {
        if restarted {
            rig.stop().await.unwrap();
            rig.start().await;
        }
        let view = rig.instance(agent.instance).await;
        assert_eq!((&view["phase"], &view["cause"]), (&json!("terminating"), &json!("drained by an admin")));
        for _ in 0..2 {
            let directives = agent.directives().await;
            assert_eq!(directives, [Directive::Terminate { reason: "drained by an admin".to_owned() }]);
        }
    }
    until("an alert", async || rig.get("/api/v1/status").await["alerts"][0]["code"] == "destroy_failing").await;

    std::fs::remove_file(rig.dir.path().join("stuck")).unwrap();
    until("gone", async || rig.instance(agent.instance).await["phase"] == "gone").await;
    for restarted in [false, true] {
        if restarted {
            rig.stop().await.unwrap();
            rig.start().await;
        }
        let sync = agent.sync_as(Seq { run: 9, n: 1 }).send().await.unwrap();
        assert_eq!(sync.status(), 410);
        assert_eq!(sync.json::<ErrorBody>().await.unwrap().code, ErrorBody::INSTANCE_GONE);
        for answer in [agent.event(id, 2, started()).await, agent.log(id, 0, b"x").await] {
            assert_eq!((answer.0.as_u16(), &answer.1["code"]), (410, &json!(ErrorBody::INSTANCE_GONE)));
        }
        let enrol = rig.enrol_with(&bootstrap, &"ab".repeat(32)).await;
        assert_eq!(enrol.status(), 410);
    }
}

#[tokio::test]
async fn a_machine_s_assignments_are_its_own() {
    let rig = Rig::new().await;
    // Two fill the first machine.
    for _ in 0..3 {
        rig.submit().await;
    }
    let bootstraps = rig.bootstraps(2).await;
    let (mut first, mut second) = (rig.enrol_as(&bootstraps[0]).await, rig.enrol_as(&bootstraps[1]).await);
    let starts = |directives: Vec<Directive>| -> Vec<_> {
        directives
            .into_iter()
            .filter_map(|one| if let Directive::Start(start) = one { Some(*start) } else { None })
            .collect()
    };
    let mine = starts(first.directives().await).remove(0);
    let other = starts(second.directives().await).remove(0);
    assert_ne!(mine.assignment, other.assignment);
    assert_eq!(second.event(mine.assignment, 1, started()).await.0, 404);
    assert_eq!(second.log(mine.assignment, 0, b"x").await.0, 404);
    assert_eq!(rig.job(mine.job.id).await["state"], "assigned");
    assert_eq!(rig.log(mine.job.id, "offset=0").await.0, b"");
    assert_eq!(first.event(mine.assignment, 1, started()).await.0, 200);
}

#[tokio::test]
async fn a_log_whose_last_byte_came_just_before_the_scaler_died_is_closed_by_the_repeat() {
    let mut rig = Rig::new().await;
    let job = rig.submit().await;
    let mut agent = rig.enrol().await;
    let id = agent.start().await.assignment;
    agent.event(id, 1, started()).await;
    agent.log(id, 0, b"abc").await;
    agent.event(id, 2, finished(Verdict::Success, Some(0), 6)).await;
    rig.stop().await.unwrap();
    // Killed between the append and what follows it.
    let log = rig.state().join("logs").join(format!("{job}.log"));
    std::fs::write(log, "abcdef").unwrap();
    rig.start().await;
    let (status, body) = agent.log(id, 3, b"def").await;
    assert_eq!((status.as_u16(), &body["size"]), (409, &json!(6)), "the agent takes this for the end");
    assert_eq!(rig.log(job, "offset=0").await, (b"abcdef".to_vec(), "closed".to_owned()));
}

#[tokio::test]
async fn a_machine_whose_clock_is_wrong_does_not_make_its_jobs_old() {
    let rig = Rig::new().await;
    let job = rig.submit().await;
    let mut agent = rig.enrol().await;
    let id = agent.start().await.assignment;
    // The played agent lives in 1970.
    agent.event(id, 1, started()).await;
    agent.event(id, 2, finished(Verdict::Success, Some(0), 0)).await;
    until("closed", async || rig.log(job, "offset=0").await.1 == "closed").await;
    let view = rig.job(job).await;
    let phases: Vec<jiff::Timestamp> =
        ["queued", "launched", "booted", "enrolled", "assigned", "image_ready", "started", "finished"]
            .map(|phase| view["phases"][phase].as_str().unwrap().parse().unwrap())
            .into();
    assert!(phases.is_sorted(), "{view}");
}
