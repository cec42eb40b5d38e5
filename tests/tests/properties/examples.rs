//! Single histories, found by the properties or by hand.

use jiff::{SignedDuration, Timestamp};
use pilotlight_scaler::fleet::{
    Action, Applied, Event, Instance, Planned, World, event::Synced, instance::AssignmentState,
};
use pilotlight_wire::{
    Verdict,
    agent::{AssignmentEvent, AssignmentEventKind, Seq, Stage},
};

use crate::{
    ops::Op,
    rig::{Rig, reports},
    settings::Shape,
};

#[test]
fn a_repeated_event_changes_nothing_and_a_gap_is_named() {
    let mut rig = Rig::new(Shape::PLAIN);
    rig.run(&Op::Submit(0));
    rig.pass();
    rig.run(&Op::Enrol(0, true));
    rig.pass();
    let (instance, assignment, _, job) = rig.nth_assignment(0).unwrap();
    let at: Timestamp = rig.now;
    let started = |n| Event::AssignmentEvent {
        instance,
        assignment,
        event: AssignmentEvent { n, at, event: AssignmentEventKind::Started { image_ready_at: at, image_id: None } },
    };
    let gap = rig.world.apply(started(2), rig.now).unwrap_err();
    assert_eq!(gap.to_string(), "event 1 is expected next");
    assert_eq!(rig.world.apply(started(1), rig.now), Ok(Applied::Done));
    let before = rig.world.job(job).cloned();
    rig.advance(SignedDuration::from_secs(5));
    assert_eq!(rig.world.apply(started(1), rig.now), Ok(Applied::Done));
    assert_eq!(rig.world.job(job).cloned(), before);
    let machine = rig.world.instance(instance).unwrap();
    assert_eq!(machine.assignments[&assignment].state, AssignmentState::Running);
}

/// Found by a property: after a restart within the same millisecond a new machine sorted before an older one, so that
/// jobs were packed another way and one more machine was launched.
#[test]
fn a_restart_within_a_millisecond_packs_the_same() {
    for seed in 0..64 {
        let mut rig = Rig::with_seed(seed, Shape::PLAIN);
        rig.run(&Op::Submit(0));
        rig.pass();
        rig.restart();
        rig.apply(Event::ListRead { began_at: rig.now, listed: Vec::new() });
        // A small one is there; these need a large one each.
        for label in [2, 0, 2] {
            rig.run(&Op::Submit(label));
            rig.pass();
        }
    }
}

/// Found by a property: a job that was adopted near its deadline and refused was queued again with what was left of its
/// time. What it runs is lost with the database, so it cannot be queued again at all.
#[test]
fn an_adopted_job_that_its_machine_refuses_is_not_queued_again() {
    let mut rig = Rig::new(Shape::PLAIN);
    rig.run(&Op::Submit(0));
    rig.pass();
    rig.run(&Op::Enrol(0, true));
    rig.pass();
    rig.lose_database();
    rig.run(&Op::Sync(0));
    rig.pass();
    let (_, _, _, job) = rig.nth_assignment(0).unwrap();
    rig.run(&Op::Refused(0));
    let ended = rig.world.job(job).and_then(|job| job.ended()).unwrap();
    assert_eq!(ended.verdict, Verdict::Infrastructure);
    assert!(ended.reason.as_deref().unwrap().ends_with("lost with the scaler's database: disk full"));
}

/// Found by the simulator: past `max_lifetime` + 10 min the hard end came the moment the last job was over, and took what
/// the agent had not sent of its log along.
#[test]
fn the_hard_end_leaves_time_for_the_log_of_the_last_job() {
    let mut rig = Rig::new(Shape { lifetime_hours: 1, ..Shape::PLAIN });
    rig.run(&Op::Submit(0));
    rig.pass();
    rig.run(&Op::Enrol(0, true));
    rig.pass();
    for _ in 0..24 {
        rig.advance(SignedDuration::from_mins(5));
        rig.run(&Op::Sync(0));
        rig.pass();
    }
    rig.run(&Op::Finished(0, true));
    assert_eq!(rig.pass().actions, [], "ten bytes of log are still on the machine");
    rig.run(&Op::LogClosed(0));
    let ends: Vec<_> = rig.pass().actions.into_iter().map(|planned| planned.action).collect();
    assert!(matches!(&ends[..], [Action::Terminate { .. }]), "{ends:?}");
}

/// Found by the simulator: a job ran and wrote, its `started` did not arrive before its machine was lost, and its log was
/// closed as whole.
#[test]
fn the_log_of_a_lost_machine_is_marked_though_its_job_was_not_heard_to_start() {
    let mut rig = Rig::new(Shape::PLAIN);
    rig.run(&Op::Submit(0));
    rig.pass();
    rig.run(&Op::Enrol(0, true));
    rig.pass();
    let (instance, _, _, job) = rig.nth_assignment(0).unwrap();
    rig.list_of(&rig.listed.clone(), Some(instance));
    rig.pass();
    rig.run(&Op::Destroyed(0, false));
    rig.run(&Op::List);
    rig.run(&Op::List);
    let logs: Vec<Action> = rig.pass().actions.into_iter().map(|planned| planned.action).collect();
    assert_eq!(logs, [Action::CloseLog { job, incomplete: true }]);
}

/// Found by the simulator: a machine appeared after its destroy had been accepted for want of it, and was listed for ever
/// with nobody to destroy it.
#[test]
fn a_destroy_that_did_nothing_is_made_again() {
    let mut rig = Rig::new(Shape::PLAIN);
    rig.run(&Op::Submit(0));
    rig.pass();
    rig.run(&Op::CreateFailed(0, true));
    rig.pass();
    let instance = rig.world.instances().next().unwrap().id;
    rig.apply(Event::DestroyAccepted(instance));
    rig.listed.insert(instance);
    let mut destroys = 0;
    for _ in 0..60 {
        rig.advance(SignedDuration::from_secs(2));
        rig.run(&Op::List);
        let planned = rig.pass();
        destroys += planned.actions.iter().filter(|planned| planned.action == Action::Destroy(instance)).count();
    }
    assert!((1..4).contains(&destroys), "again, but not at every list: {destroys}");
}

/// Found by the simulator: an agent refused a job at once, and a sync that it had sent before came after that. The claim was
/// dropped, the next sync still listed it, and it was adopted: a queued job was placed again and its GPUs given twice.
#[test]
fn what_is_over_is_not_adopted_by_syncs_that_crossed_its_end() {
    let mut rig = Rig::new(Shape::PLAIN);
    rig.run(&Op::Submit(0));
    rig.pass();
    rig.run(&Op::Enrol(0, true));
    rig.pass();
    let (instance, _, _, job) = rig.nth_assignment(0).unwrap();
    let listing = reports(&rig.world, rig.world.instance(instance).unwrap());
    assert_eq!(listing.len(), 1);
    let sync = |n, assignments| {
        let seq = Seq { run: 9, n };
        Event::Synced(Box::new(Synced { instance, nonce: "n".to_owned(), seq, assignments, sample: None }))
    };
    rig.run(&Op::Refused(0));
    for assignments in [vec![], listing, vec![]] {
        rig.advance(SignedDuration::from_millis(10));
        rig.apply(sync(rig.now.as_millisecond().unsigned_abs(), assignments));
        assert!(rig.world.job(job).unwrap().is_queued());
        assert!(rig.world.instance(instance).unwrap().is_vacant());
        rig.pass();
    }
    assert!(rig.world.instance(instance).unwrap().assignments.is_empty(), "the agent has no file of it any more");
}

/// After a lost database an agent may list an assignment that is over and whose end an earlier
/// scaler had taken in. It holds no GPU, and when it is no longer listed nobody will ever say how it ended.
#[test]
fn what_was_over_before_the_database_was_lost_holds_nothing_and_ends() {
    let mut rig = Rig::new(Shape::PLAIN);
    rig.run(&Op::Submit(0));
    rig.pass();
    rig.run(&Op::Enrol(0, true));
    rig.pass();
    let (machine, over, _, job) = rig.nth_assignment(0).unwrap();
    rig.lose_database();
    let kept = rig.forgotten.get_mut(&machine).unwrap();
    kept[0].stage = Stage::Finished;
    rig.run(&Op::Sync(0));
    rig.pass();
    let instance = rig.world.instance(machine).unwrap();
    assert_eq!(instance.free_gpu_ids().count(), instance.gpu_ids.len(), "its GPUs are free");
    rig.forgotten.insert(machine, Vec::new());
    let seq = Seq { run: 9, n: 1 };
    let nonce = "n".to_owned();
    let synced = Synced { instance: machine, nonce, seq, assignments: Vec::new(), sample: None };
    rig.apply(Event::Synced(Box::new(synced)));
    let ended = rig.world.job(job).and_then(|job| job.ended()).unwrap();
    assert_eq!(ended.reason.as_deref(), Some("it is over, and its result was lost with the scaler's database"));
    let claim = rig.world.instance(machine).unwrap().assignments.get(&over);
    assert!(claim.is_none_or(|claim| !claim.is_live()), "and the machine is free");
}

/// A scaler that found the clock stepped at its start, six hours ahead, made the destroy call that
/// the last one had not heard of six hours later, and judged no machine silent before.
#[test]
fn a_clock_that_was_stepped_between_two_scalers_delays_nothing() {
    let mut rig = Rig::new(Shape::PLAIN);
    rig.run(&Op::Submit(0));
    rig.pass();
    rig.run(&Op::Enrol(0, true));
    rig.pass();
    rig.run(&Op::Finished(0, true));
    rig.run(&Op::LogClosed(0));
    rig.advance(SignedDuration::from_mins(11));
    let ends = rig.pass();
    assert!(matches!(ends.actions[0].action, Action::Terminate { .. }), "{ends:?}");
    let skipped = SignedDuration::from_hours(6);
    rig.advance(skipped);
    let instances: Vec<Instance> = rig.world.instances().cloned().collect();
    rig.world = World::stepped(rig.settings(), 9, rig.now, (skipped, skipped), instances, []);
    let again = rig.pass();
    assert!(matches!(again.actions[..], [Planned { action: Action::Destroy(_), .. }]), "{again:?}");
}
