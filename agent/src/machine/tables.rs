//! Table tests of the machine: one race or rule each.

use jiff::Timestamp;
use pilotlight_wire::{JobId, Verdict, agent::JobRef};
use uuid::Uuid;

use super::*;

pub(super) fn id(n: u128) -> AssignmentId {
    AssignmentId::from_uuid(Uuid::from_u128(n))
}

pub(super) fn at(seconds: u64) -> Moment {
    let wall = Timestamp::from_second(1_000_000 + i64::try_from(seconds).unwrap()).unwrap();
    Moment { boot: Duration::from_secs(500 + seconds), wall }
}

pub(super) fn start(n: u128, gpus: &[&str]) -> Start {
    Start {
        assignment: id(n),
        job: JobRef {
            id: JobId::from_uuid(Uuid::from_u128(n)),
            forge: "direct".parse().unwrap(),
            label: "cpu-small".parse().unwrap(),
            name: "test".to_owned(),
        },
        work: serde_json::from_str(r#"{"kind":"job","image":"busybox"}"#).unwrap(),
        gpus: gpus.iter().map(|gpu| GpuId((*gpu).to_owned())).collect(),
        volumes: vec![],
        remaining_seconds: 3600,
        max_log_bytes: 1 << 30,
        stop_grace_seconds: 10,
    }
}

pub(super) fn policy() -> Policy {
    Policy { lease_seconds: 600, result_grace_seconds: 3600, sample_seconds: 5, cpu_jobs: 1 }
}

pub(super) fn setup(run: u64, found: Vec<Found>) -> Setup {
    let gpus = ["GPU-0", "GPU-1"].map(|gpu| GpuId(gpu.to_owned())).into();
    Setup { run, boot_id: "boot".to_owned(), gpus, policy: (run > 1).then(policy), found, disk_free: u64::MAX }
}

pub(super) fn finished(verdict: Verdict) -> End {
    End::Finished {
        verdict,
        exit_code: Some(0),
        reason: None,
        log_gap: false,
        usage: None,
        finished_at: Timestamp::UNIX_EPOCH,
    }
}

fn enrolled() -> Machine {
    let (mut machine, effects) = Machine::new(setup(1, vec![]), at(0));
    assert_eq!(effects, []);
    assert_eq!(machine.handle(Event::Enrolled(policy()), at(0)), [Effect::Sync]);
    machine
}

/// Answers the sync that was sent last, as sent now.
fn answer(machine: &mut Machine, directives: Vec<Directive>, now: Moment) -> Vec<Effect> {
    let n = machine.sync_request(at(0)).seq.n;
    machine.handle(Event::Synced { n, sent: now.boot, directives, lease_seconds: 600 }, now)
}

fn starts(n: u128) -> Vec<Directive> {
    vec![Directive::Start(Box::new(start(n, &[])))]
}

fn cancel(n: u128) -> Directive {
    Directive::Cancel { assignment: id(n) }
}

fn emitted(effects: &[Effect]) -> Vec<(u64, &AssignmentEventKind)> {
    effects.iter().filter_map(|e| if let Effect::Emit(_, e) = e { Some((e.n, &e.event)) } else { None }).collect()
}

fn ends_with(machine: &mut Machine, n: u128, bytes: u64, now: Moment) {
    assert_eq!(emitted(&machine.handle(Event::Ended(id(n), finished(Verdict::Success), bytes), now)).len(), 1);
}

#[test]
fn the_file_comes_before_the_job_and_the_job_runs_once() {
    let mut machine = enrolled();
    let effects = answer(&mut machine, starts(1), at(1));
    assert!(
        matches!(&effects[..], [Effect::Persist(p, Record::Started { .. }), Effect::Deliver(d), Effect::Run(r), Effect::Sync]
            if *p == id(1) && *d == id(1) && r.assignment == id(1)),
        "{effects:?}"
    );
    assert_eq!(answer(&mut machine, starts(1), at(2)), [], "a repeated Start does nothing");
    let listed = machine.sync_request(at(0)).assignments;
    assert_eq!((listed[0].id, listed[0].stage), (id(1), Stage::Preparing));
    assert_eq!(listed[0].remaining_seconds, Some(3601));
}

#[test]
fn an_assignment_goes_only_after_the_ack_and_the_whole_log() {
    let mut machine = enrolled();
    let _run = answer(&mut machine, starts(1), at(1));
    let progress =
        Progress::Started { image_ready_at: at(2).wall, started_at: at(3).wall, image_id: Some("sha256:1".to_owned()) };
    let effects = machine.handle(Event::Progress(id(1), progress.clone()), at(3));
    assert!(matches!(emitted(&effects)[..], [(1, AssignmentEventKind::Started { .. })]));
    assert_eq!(machine.handle(Event::Progress(id(1), progress), at(4)), [Effect::Sync], "said once only");
    let effects = machine.handle(Event::Ended(id(1), finished(Verdict::Success), 7), at(5));
    assert!(matches!(emitted(&effects)[..], [(2, AssignmentEventKind::Finished(f))] if f.log_bytes == 7));
    assert!(effects.contains(&Effect::Log(id(1), LogEnd::At(7))));
    assert_eq!(machine.handle(Event::LogComplete(id(1)), at(6)), [], "not acknowledged yet");
    assert_eq!(machine.handle(Event::Acked(id(1), 1, at(6).boot), at(6)), [], "only the first event is");
    assert_eq!(machine.handle(Event::Acked(id(1), 2, at(6).boot), at(6)), [Effect::Log(id(1), LogEnd::Confirm(7))]);
    assert_eq!(machine.sync_request(at(0)).assignments[0].stage, Stage::Finished, "still listed");
    assert_eq!(machine.handle(Event::LogComplete(id(1)), at(7)), [Effect::Forget(id(1)), Effect::Sync]);
    assert_eq!(machine.sync_request(at(0)).assignments, []);
}

#[test]
fn an_old_answer_does_not_start_a_finished_job_again() {
    let mut machine = enrolled();
    let _run = answer(&mut machine, starts(1), at(1));
    ends_with(&mut machine, 1, 0, at(2));
    let held = machine.sync_request(at(0)).seq.n;
    let _confirm = machine.handle(Event::Acked(id(1), 1, at(3).boot), at(3));
    assert!(machine.handle(Event::LogComplete(id(1)), at(3)).contains(&Effect::Forget(id(1))));
    let old = Event::Synced { n: held, sent: at(2).boot, directives: starts(1), lease_seconds: 600 };
    assert_eq!(machine.handle(old.clone(), at(4)), [], "sent before the assignment was forgotten");
    assert_eq!(answer(&mut machine, vec![], at(5)), []);
    assert_eq!(machine.handle(old, at(6)), [], "superseded");
}

#[test]
fn a_cancel_before_the_start_is_recorded_and_answered_and_the_start_ignored() {
    let mut machine = enrolled();
    let effects = answer(&mut machine, vec![cancel(1)], at(1));
    assert!(matches!(&effects[..2], [Effect::Persist(_, Record::NeverArrived), Effect::Deliver(_)]), "{effects:?}");
    assert!(matches!(emitted(&effects)[..], [(1, AssignmentEventKind::Finished(f))]
        if f.verdict == Verdict::Cancelled && f.log_bytes == 0 && f.exit_code.is_none()));
    assert_eq!(answer(&mut machine, vec![cancel(1)], at(2)), []);
    assert_eq!(answer(&mut machine, starts(1), at(2)), []);
    // Crashed between file and event: the restarted agent says it.
    let found = Found { id: id(1), record: Record::NeverArrived, events: vec![], acked: 0 };
    let (_, effects) = Machine::new(setup(2, vec![found]), at(3));
    assert_eq!(emitted(&effects).len(), 1);
}

#[test]
fn start_and_cancel_in_one_answer_run_and_end_it() {
    let mut machine = enrolled();
    let effects = answer(&mut machine, [starts(1), vec![cancel(1), cancel(1)]].concat(), at(1));
    assert_eq!(effects.last(), Some(&Effect::Wish(id(1), Wish::Cancel)), "{effects:?}");
    ends_with(&mut machine, 1, 0, at(2));
    assert_eq!(answer(&mut machine, vec![cancel(1)], at(3)), [], "its event is on the way already");
}

#[test]
fn jobs_that_the_machine_cannot_hold_are_refused() {
    let reason = |machine: &mut Machine, start: Start| {
        let effects = answer(machine, vec![Directive::Start(Box::new(start))], at(1));
        assert!(!effects.iter().any(|effect| matches!(effect, Effect::Run(_))), "{effects:?}");
        match emitted(&effects)[..] {
            [(1, AssignmentEventKind::Refused { reason })] => reason.clone(),
            _ => panic!("{effects:?}"),
        }
    };
    let mut machine = enrolled();
    assert!(reason(&mut machine, start(1, &["GPU-0", "GPU-7"])).contains("GPU-7"));
    let _run = answer(&mut machine, vec![Directive::Start(Box::new(start(2, &["GPU-0"])))], at(1));
    assert!(reason(&mut machine, start(3, &["GPU-0"])).contains("held by"));
    ends_with(&mut machine, 2, 0, at(2));
    let sample = HostSample {
        at: at(2).wall,
        cpu_percent: 0.0,
        memory_used_bytes: 0,
        disk_free_bytes: MIN_DISK_FREE - 1,
        load1: 0.0,
    };
    assert_eq!(machine.handle(Event::Sampled(sample), at(2)), [Effect::Sync]);
    assert!(reason(&mut machine, start(4, &["GPU-0"])).contains("disk is full"));
}

#[test]
fn the_deadline_ends_a_job_once() {
    let mut machine = enrolled();
    let _run = answer(&mut machine, starts(1), at(0));
    for second in (0..3600).step_by(300) {
        assert_eq!(answer(&mut machine, vec![], at(second)), []);
    }
    assert_eq!(machine.wake_after(at(3599)), Some(Duration::from_secs(1)));
    assert_eq!(machine.handle(Event::Tick, at(3600)), [Effect::Wish(id(1), Wish::Timeout)]);
    assert_eq!(machine.handle(Event::Tick, at(3601)), []);
    assert_eq!(answer(&mut machine, vec![cancel(1)], at(3602)), [], "a wish only goes forward");
    let effects = answer(&mut machine, vec![Directive::Terminate { reason: "gone".to_owned() }], at(3603));
    assert_eq!(effects, [Effect::Wish(id(1), Wish::Terminate)]);
}

#[test]
fn a_lapsed_agent_without_a_job_leaves() {
    let mut machine = enrolled();
    assert_eq!(machine.wake_after(at(0)), Some(Duration::from_secs(600)));
    assert_eq!(answer(&mut machine, vec![], at(10)), []);
    assert_eq!(machine.handle(Event::Tick, at(609)), []);
    assert_eq!(machine.handle(Event::Tick, at(610)), [Effect::Leave(Leave::Lapsed)]);
    assert_eq!(machine.handle(Event::Tick, at(611)), [], "once");
    assert_eq!(machine.wake_after(at(611)), None);
}

#[test]
fn the_lease_counts_from_sending() {
    let mut machine = enrolled();
    let n = machine.sync_request(at(0)).seq.n;
    let synced = Event::Synced { n, sent: at(5).boot, directives: vec![], lease_seconds: 600 };
    assert_eq!(machine.handle(synced, at(30)), []);
    assert_eq!(machine.wake_after(at(30)), Some(Duration::from_secs(575)));
}

#[test]
fn a_lapsed_agent_finishes_its_job_and_keeps_the_result_for_a_grace() {
    let mut machine = enrolled();
    let _run = answer(&mut machine, starts(1), at(0));
    assert_eq!(machine.handle(Event::Tick, at(2000)), [], "the job goes on");
    ends_with(&mut machine, 1, 10, at(3000));
    assert_eq!(machine.handle(Event::Tick, at(6599)), []);
    let mut answered = machine.clone();
    assert_eq!(machine.handle(Event::Tick, at(6600)), [Effect::Leave(Leave::Lapsed)]);
    // A scaler that is back within the grace gets the result, and the agent lives on.
    assert_eq!(answer(&mut answered, vec![], at(6599)), []);
    assert_eq!(answered.handle(Event::Tick, at(6600)), []);
    let _confirm = answered.handle(Event::Acked(id(1), 1, at(6601).boot), at(6601));
    assert!(answered.handle(Event::LogComplete(id(1)), at(6601)).contains(&Effect::Forget(id(1))));
}

#[test]
fn an_event_that_is_acknowledged_before_the_next_sync_renews_the_lease_too() {
    let mut machine = enrolled();
    let _run = answer(&mut machine, starts(1), at(0));
    ends_with(&mut machine, 1, 10, at(3000));
    assert_eq!(
        machine.handle(Event::Acked(id(1), 1, at(6000).boot), at(6001)),
        [Effect::Log(id(1), LogEnd::Confirm(10))]
    );
    let effects = machine.handle(Event::LogComplete(id(1)), at(6002));
    assert_eq!(effects, [Effect::Forget(id(1)), Effect::Sync], "the scaler may have a job for it already");
    // The answer to a sync that was sent before is no step back.
    let n = machine.sync_request(at(0)).seq.n;
    let old = Event::Synced { n, sent: at(5000).boot, directives: vec![], lease_seconds: 600 };
    assert_eq!(machine.handle(old, at(6003)), []);
    assert_eq!(machine.handle(Event::Tick, at(6599)), []);
    assert_eq!(machine.handle(Event::Tick, at(6600)), [Effect::Leave(Leave::Lapsed)]);
}

#[test]
fn an_agent_that_was_never_enrolled_waits_and_one_that_was_has_a_lease() {
    let (mut machine, _) = Machine::new(setup(1, vec![]), at(0));
    assert_eq!(machine.handle(Event::Tick, at(1_000_000)), []);
    let (mut machine, _) = Machine::new(setup(2, vec![]), at(0));
    assert_eq!(machine.handle(Event::Tick, at(599)), []);
    assert_eq!(machine.handle(Event::Tick, at(600)), [Effect::Leave(Leave::Lapsed)]);
}

#[test]
fn a_refused_enrolment_ends_the_agent_but_no_job() {
    let (mut machine, _) = Machine::new(setup(1, vec![]), at(0));
    assert_eq!(machine.handle(Event::EnrolRefused, at(1)), [Effect::Leave(Leave::Lapsed)]);

    let mut machine = enrolled();
    let effects = answer(&mut machine, starts(1), at(0));
    let Some(Effect::Persist(_, record)) = effects.first().cloned() else { panic!("{effects:?}") };
    let found = Found { id: id(1), record, events: vec![], acked: 0 };
    let (mut machine, effects) = Machine::new(setup(2, vec![found]), at(60));
    assert!(matches!(&effects[..], [Effect::Run(start)] if start.remaining_seconds == 3540), "{effects:?}");
    assert_eq!(machine.handle(Event::EnrolRefused, at(61)), []);
    let effects = machine.handle(Event::Ended(id(1), finished(Verdict::Success), 0), at(70));
    assert_eq!(effects.last(), Some(&Effect::Leave(Leave::Lapsed)));
}

#[test]
fn terminate_ends_jobs_flushes_and_leaves() {
    let terminate = || vec![Directive::Terminate { reason: "idle".to_owned() }];
    let mut machine = enrolled();
    let effects = answer(&mut machine, terminate(), at(1));
    assert_eq!(effects, [Effect::Leave(Leave::Terminated)], "nothing to wait for");

    let mut machine = enrolled();
    let _run = answer(&mut machine, starts(1), at(0));
    assert_eq!(answer(&mut machine, terminate(), at(1)), [Effect::Wish(id(1), Wish::Terminate)]);
    assert_eq!(machine.sync_request(at(0)).note.as_deref(), Some("leaving: idle"));
    assert_eq!(answer(&mut machine, [terminate(), starts(2)].concat(), at(2)), [], "no new job");
    let mut stuck = machine.clone();
    assert_eq!(stuck.handle(Event::Tick, at(30)), []);
    assert_eq!(stuck.handle(Event::Tick, at(31)), [Effect::Leave(Leave::Terminated)], "a job that will not end");

    ends_with(&mut machine, 1, 5, at(3));
    let mut deaf = machine.clone();
    assert_eq!(deaf.wake_after(at(3)), Some(FLUSH_LIMIT));
    assert_eq!(deaf.handle(Event::Tick, at(6)), [Effect::Leave(Leave::Terminated)], "results that nobody takes");
    let _confirm = machine.handle(Event::Acked(id(1), 1, at(4).boot), at(4));
    let effects = machine.handle(Event::LogComplete(id(1)), at(4));
    assert_eq!(effects.last(), Some(&Effect::Leave(Leave::Terminated)), "all said");
}

#[test]
fn gone_ends_jobs_and_flushes_nothing() {
    let mut machine = enrolled();
    let _run = answer(&mut machine, starts(1), at(0));
    assert_eq!(machine.handle(Event::Gone, at(1)), [Effect::Wish(id(1), Wish::Terminate)]);
    let effects = machine.handle(Event::Ended(id(1), finished(Verdict::Cancelled), 5), at(2));
    assert_eq!(effects.last(), Some(&Effect::Leave(Leave::Terminated)));
    // At enrolment, and after a Terminate that was still listening.
    let (mut machine, _) = Machine::new(setup(1, vec![]), at(0));
    assert_eq!(machine.handle(Event::Gone, at(0)), [Effect::Leave(Leave::Terminated)]);
}

#[test]
fn a_restarted_agent_delivers_what_has_ended_and_runs_the_rest() {
    let mut machine = enrolled();
    let effects = answer(&mut machine, [starts(1), starts(2)].concat(), at(0));
    let records: Vec<_> = effects
        .iter()
        .filter_map(|effect| if let Effect::Persist(id, record) = effect { Some((*id, record.clone())) } else { None })
        .collect();
    let begun = AssignmentEvent {
        n: 1,
        at: at(1).wall,
        event: AssignmentEventKind::Started { image_ready_at: at(1).wall, image_id: None },
    };
    let ended = AssignmentEvent { n: 2, at: at(2).wall, event: cancelled_before_arrival() };
    let found = |events: [Vec<AssignmentEvent>; 2], acked| {
        let with = records.iter().cloned().zip(events);
        with.map(|((id, record), events)| Found { id, record, events, acked }).collect::<Vec<_>>()
    };
    let (mut machine, effects) =
        Machine::new(setup(2, found([vec![begun.clone(), ended.clone()], vec![begun.clone()]], 1)), at(9));
    assert!(matches!(&effects[..], [Effect::Run(start)] if start.assignment == id(2)), "{effects:?}");
    let effects = machine.handle(Event::Enrolled(policy()), at(9));
    assert!(effects.contains(&Effect::Deliver(id(1))) && effects.contains(&Effect::Deliver(id(2))));
    assert!(effects.contains(&Effect::Log(id(1), LogEnd::At(0))), "finished is not acknowledged");
    let again = Progress::Started { image_ready_at: at(1).wall, started_at: at(1).wall, image_id: None };
    assert_eq!(machine.handle(Event::Progress(id(2), again), at(9)), [Effect::Sync], "said before the restart");
    let effects = machine.handle(Event::Ended(id(2), finished(Verdict::Success), 0), at(10));
    assert!(matches!(emitted(&effects)[..], [(2, _)]), "numbers go on");

    let (mut machine, _) = Machine::new(setup(2, found([vec![begun.clone(), ended], vec![begun]], 2)), at(9));
    let effects = machine.handle(Event::Enrolled(policy()), at(9));
    assert!(effects.contains(&Effect::Log(id(1), LogEnd::Confirm(0))), "acknowledged before the restart");
}

#[test]
fn no_number_of_the_scaler_overflows() {
    let mut machine = enrolled();
    let endless = Policy { lease_seconds: u64::MAX, result_grace_seconds: u64::MAX, ..policy() };
    assert_eq!(machine.handle(Event::Enrolled(endless), at(0)), [Effect::Sync]);
    let start = Start { remaining_seconds: u64::MAX, ..start(1, &[]) };
    assert_eq!(answer(&mut machine, vec![Directive::Start(Box::new(start))], at(0)).len(), 4);
    assert!(machine.wake_after(at(1)).is_some());
    ends_with(&mut machine, 1, u64::MAX, at(2));
    assert!(machine.wake_after(at(1_000_000)).is_some());
}
