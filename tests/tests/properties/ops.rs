//! Everything that can happen, at random.

use jiff::SignedDuration;
use pilotlight_scaler::fleet::{Event, Instance, Phase, instance::Call};
use pilotlight_wire::{
    JobId, Usage, Verdict,
    agent::{AssignmentEventKind, Finished},
    api::DrainTarget,
};
use proptest::prelude::*;

use crate::{
    rig::Rig,
    settings::{LABELS, settings},
};

#[derive(Clone, Debug)]
pub(crate) enum Op {
    Submit(usize),
    Cancel(usize),
    Created(usize),
    CreateFailed(usize, bool),
    Enrol(usize, bool),
    Sync(usize),
    Started(usize),
    Finished(usize, bool),
    Refused(usize),
    LogClosed(usize),
    /// The destroy is accepted; the machine may linger.
    Destroyed(usize, bool),
    DestroyFailed(usize),
    /// A machine goes, wanted or not.
    Vanish(usize),
    List,
    /// A list that was begun long ago and says what was then.
    StaleList(u32),
    /// A list that leaves one out that is there.
    ListWithout(usize),
    ListStopped(usize),
    ListFailed,
    Drain(usize, bool),
    DrainAll(bool),
    Resume,
    Hold(usize, u32),
    Release(usize),
    Reload,
    Advance(u32),
    /// The scaler is away for so many seconds.
    Restart(u32),
    LoseDatabase,
    ClockStepped(u32),
}

pub(crate) fn op() -> impl Strategy<Value = Op> {
    let n = 0..64_usize;
    prop_oneof![
        8 => (0..LABELS.len()).prop_map(Op::Submit),
        2 => n.clone().prop_map(Op::Cancel),
        4 => n.clone().prop_map(Op::Created),
        2 => (n.clone(), any::<bool>()).prop_map(|(n, capacity)| Op::CreateFailed(n, capacity)),
        8 => (n.clone(), prop::bool::weighted(0.9)).prop_map(|(n, healthy)| Op::Enrol(n, healthy)),
        6 => n.clone().prop_map(Op::Sync),
        5 => n.clone().prop_map(Op::Started),
        6 => (n.clone(), any::<bool>()).prop_map(|(n, good)| Op::Finished(n, good)),
        1 => n.clone().prop_map(Op::Refused),
        4 => n.clone().prop_map(Op::LogClosed),
        5 => (n.clone(), prop::bool::weighted(0.3)).prop_map(|(n, lingers)| Op::Destroyed(n, lingers)),
        2 => n.clone().prop_map(Op::DestroyFailed),
        1 => n.clone().prop_map(Op::Vanish),
        8 => Just(Op::List),
        3 => (1..600_u32).prop_map(Op::StaleList),
        3 => n.clone().prop_map(Op::ListWithout),
        1 => n.clone().prop_map(Op::ListStopped),
        2 => Just(Op::ListFailed),
        1 => (n.clone(), any::<bool>()).prop_map(|(n, now)| Op::Drain(n, now)),
        1 => any::<bool>().prop_map(Op::DrainAll),
        1 => Just(Op::Resume),
        2 => (n.clone(), 1..30_u32).prop_map(|(n, hours)| Op::Hold(n, hours)),
        1 => n.prop_map(Op::Release),
        1 => Just(Op::Reload),
        8 => (0..7200_u32).prop_map(Op::Advance),
        2 => (0..4000_u32).prop_map(Op::Restart),
        1 => Just(Op::LoseDatabase),
        1 => (0..10_000_u32).prop_map(Op::ClockStepped),
    ]
}

fn requested(instance: &Instance) -> bool {
    matches!(instance.phase, Phase::Requested { .. })
}

fn unready(instance: &Instance) -> bool {
    matches!(instance.phase, Phase::Requested { .. } | Phase::Booting)
}

fn destroying(instance: &Instance) -> bool {
    matches!(instance.phase, Phase::Terminating { destroy: Call::Sent { .. }, .. })
}

impl Rig {
    #[expect(clippy::too_many_lines, reason = "one arm per kind of event")]
    pub(crate) fn run(&mut self, op: &Op) {
        match *op {
            Op::Submit(label) => self.submit(label),
            Op::Cancel(n) => {
                if let Some(&job) = self.jobs.get(n % self.jobs.len().max(1)) {
                    self.apply(Event::JobCancelled(job));
                }
            }
            Op::Created(n) => {
                if let Some(id) = self.nth(n, requested) {
                    self.listed.insert(id);
                    self.apply(Event::Created(id));
                }
            }
            Op::CreateFailed(n, capacity) => {
                // The provider's "invalid" would stop a placement for good, and the test's config is right.
                if let Some(instance) = self.nth(n, requested) {
                    self.create_fails(instance, capacity);
                }
            }
            Op::Enrol(n, healthy) => {
                if let Some(id) = self.nth(n, unready) {
                    self.listed.insert(id);
                    self.enrol(id, healthy);
                }
            }
            Op::Sync(n) => {
                let forgotten: Vec<_> = self.forgotten.keys().copied().filter(|id| self.listed.contains(id)).collect();
                let known = self.nth(n, |i| i.enrolment.is_some());
                if let Some(id) = forgotten.get(n % (forgotten.len() + 1)).copied().or(known) {
                    self.sync(id);
                }
            }
            Op::Started(n) => {
                self.event(n, AssignmentEventKind::Started { image_ready_at: self.now, image_id: None });
            }
            Op::Finished(n, good) => self.event(n, finished(good)),
            Op::Refused(n) => self.event(n, AssignmentEventKind::Refused { reason: "disk full".to_owned() }),
            Op::LogClosed(n) => {
                let open = self.world.jobs().filter(|job| job.ended().is_some() && !job.is_settled());
                let open: Vec<JobId> = open.map(|job| job.id).collect();
                if !open.is_empty() {
                    self.apply(Event::LogClosed(open[n % open.len()]));
                }
            }
            Op::Destroyed(n, lingers) => {
                if let Some(id) = self.nth(n, destroying) {
                    if !lingers {
                        self.listed.remove(&id);
                    }
                    self.apply(Event::DestroyAccepted(id));
                }
            }
            Op::DestroyFailed(n) => {
                if let Some(instance) = self.nth(n, destroying) {
                    self.apply(Event::DestroyFailed { instance, message: "no".to_owned() });
                }
            }
            Op::Vanish(n) => {
                if let Some(id) = self.nth(n, Instance::is_live) {
                    self.listed.remove(&id);
                }
            }
            Op::List => self.list(),
            Op::StaleList(seconds) => {
                let began_at = self.now.saturating_sub(SignedDuration::from_secs(seconds.into())).unwrap();
                let then = |id: &&pilotlight_wire::InstanceId| {
                    self.world.instance(**id).is_none_or(|instance| instance.changed_at < began_at)
                };
                let listed = self.listed.iter().filter(then).copied().collect();
                self.list_begun(began_at, &listed, None);
            }
            Op::ListWithout(n) => {
                let leaving = |i: &Instance| matches!(i.phase, Phase::Terminating { .. } | Phase::Gone { .. });
                let mut listed = self.listed.clone();
                if let Some(id) = self.nth(n, |instance| !leaving(instance)) {
                    listed.remove(&id);
                }
                self.list_of(&listed, None);
            }
            Op::ListStopped(n) => {
                let stopped = self.nth(n, Instance::is_live);
                self.list_of(&self.listed.clone(), stopped);
            }
            Op::ListFailed => self.apply(Event::ListFailed { message: "500".to_owned() }),
            Op::Drain(n, now) => {
                if let Some(id) = self.nth(n, Instance::is_live) {
                    self.apply(Event::Drain { target: DrainTarget::Instance(id), now });
                }
            }
            Op::DrainAll(now) => self.apply(Event::Drain { target: DrainTarget::All, now }),
            Op::Resume => self.apply(Event::Resumed),
            Op::Hold(n, hours) => {
                if let Some(instance) = self.nth(n, Instance::is_live) {
                    self.apply(Event::Held { instance, duration: SignedDuration::from_hours(hours.into()) });
                }
            }
            Op::Release(n) => {
                if let Some(id) = self.nth(n, |instance| instance.held_until.is_some()) {
                    self.apply(Event::Released(id));
                }
            }
            Op::Reload => {
                self.variant += 1;
                self.apply(Event::Reloaded(Box::new(settings(self.shape, self.variant))));
            }
            Op::Advance(seconds) => self.advance(SignedDuration::from_secs(seconds.into())),
            Op::Restart(seconds) => {
                self.advance(SignedDuration::from_secs(seconds.into()));
                self.restart();
            }
            Op::LoseDatabase => self.lose_database(),
            Op::ClockStepped(minutes) => {
                let skipped = SignedDuration::from_mins(minutes.into());
                self.advance(skipped);
                self.checks.grace(self.now.saturating_add(self.settings().lease).unwrap());
                self.apply(Event::ClockStepped { by: skipped, skipped });
            }
        }
    }
}

pub(crate) fn finished(good: bool) -> AssignmentEventKind {
    AssignmentEventKind::Finished(Finished {
        verdict: if good { Verdict::Success } else { Verdict::Failure },
        exit_code: Some(i32::from(!good)),
        reason: None,
        log_bytes: 10,
        log_gap: false,
        usage: Some(Usage::default()),
    })
}
