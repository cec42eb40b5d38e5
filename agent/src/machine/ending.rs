//! When jobs are ended and when the agent leaves: deadlines, the lease, `Terminate`.

use std::time::Duration;

use pilotlight_wire::agent::Policy;

use super::{Effect, Machine, Moment};
use crate::{assignment::Record, job::Wish};

/// How long `Terminate` waits for jobs to end.
pub const JOBS_END_LIMIT: Duration = Duration::from_secs(30);

/// How long an agent that was told to leave goes on sending results once no job runs.
pub const FLUSH_LIMIT: Duration = Duration::from_secs(3);

/// Why an agent leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    /// The scaler was silent for longer than the lease, or does not know this agent.
    Lapsed,
    /// The scaler said so.
    Terminated,
}

impl Leave {
    /// The word in the `done` mark and in logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Lapsed => "lapsed",
            Self::Terminated => "terminated",
        }
    }
}

/// The permission to live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lease {
    /// Never enrolled: how long that may take is the scaler's business.
    Unbounded,
    /// Ends then, on the boot clock.
    Until(Duration),
    /// The scaler will never give one.
    Refused,
}

impl Lease {
    /// An agent that was enrolled before counts from its start: its last answer is not known any more.
    pub(super) fn at_start(policy: Option<&Policy>, now: Moment) -> Self {
        policy.map_or(Self::Unbounded, |policy| {
            Self::Until(now.boot.saturating_add(Duration::from_secs(policy.lease_seconds)))
        })
    }

    /// An answer to what was sent then; answers may overtake each other.
    pub(super) fn renew(&mut self, sent: Duration, seconds: u64) {
        let end = sent.saturating_add(Duration::from_secs(seconds));
        *self = match *self {
            Self::Until(later) => Self::Until(later.max(end)),
            Self::Unbounded | Self::Refused => Self::Until(end),
        };
    }
}

/// Whether the agent works or is about to leave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Serving,
    Ending { since: Duration, listens: bool, reason: String },
    Left,
}

impl Machine {
    pub(super) fn serving(&self) -> bool {
        self.mode == Mode::Serving
    }

    fn busy(&self) -> bool {
        self.assignments.values().any(super::Assignment::active)
    }

    /// Ends every job and prepares to leave. `listens`: whether the scaler still takes results.
    pub(super) fn end(&mut self, now: Moment, listens: bool, reason: &str, effects: &mut Vec<Effect>) {
        match &mut self.mode {
            Mode::Left => return,
            Mode::Ending { listens: still, .. } => *still &= listens,
            Mode::Serving => {
                self.mode = Mode::Ending { since: now.boot, listens, reason: reason.to_owned() };
            }
        }
        for id in self.assignments.keys().copied().collect::<Vec<_>>() {
            self.wish(id, Wish::Terminate, effects);
        }
    }

    /// What time alone brings about.
    pub(super) fn settle(&mut self, now: Moment, effects: &mut Vec<Effect>) {
        let due: Vec<_> = self
            .assignments
            .iter()
            .filter(|(_, assignment)| match &assignment.record {
                Record::Started { deadline, .. } => deadline.remaining(now, &self.boot_id).is_zero(),
                Record::NeverArrived => false,
            })
            .map(|(&id, _)| id)
            .collect();
        for id in due {
            self.wish(id, Wish::Timeout, effects);
        }
        if let Some((at, leave)) = self.leaves_at()
            && now.boot >= at
        {
            self.mode = Mode::Left;
            effects.push(Effect::Leave(leave));
        }
    }

    /// When the agent leaves if nothing else happens; `None` while a job keeps it, or it has left.
    fn leaves_at(&self) -> Option<(Duration, Leave)> {
        let at = match (&self.mode, self.lease) {
            (Mode::Left, _) => return None,
            (&Mode::Ending { since, listens, .. }, _) => {
                let last = since + JOBS_END_LIMIT;
                let flushed = match (self.busy(), listens && self.enrolled && !self.assignments.is_empty()) {
                    (true, _) => last,
                    (false, true) => last.min(self.quiet_since.max(since) + FLUSH_LIMIT),
                    (false, false) => Duration::ZERO,
                };
                return Some((flushed, Leave::Terminated));
            }
            (Mode::Serving, Lease::Unbounded) => return None,
            (Mode::Serving, _) if self.busy() => return None,
            (Mode::Serving, Lease::Refused) => Duration::ZERO,
            (Mode::Serving, Lease::Until(end)) if self.assignments.is_empty() => end,
            (Mode::Serving, Lease::Until(end)) => {
                let grace = self.policy.as_ref().map_or(0, |policy| policy.result_grace_seconds);
                end.max(self.quiet_since).saturating_add(Duration::from_secs(grace))
            }
        };
        Some((at, Leave::Lapsed))
    }

    /// How long until [`super::Event::Tick`] would change something; `None` when time alone changes nothing.
    #[must_use]
    pub fn wake_after(&self, now: Moment) -> Option<Duration> {
        let deadlines =
            self.assignments.values().filter(|assignment| assignment.wish == Wish::Run).filter_map(|assignment| {
                match &assignment.record {
                    Record::Started { deadline, .. } if assignment.active() => {
                        Some(deadline.remaining(now, &self.boot_id))
                    }
                    _ => None,
                }
            });
        deadlines.chain(self.leaves_at().map(|(at, _)| at.saturating_sub(now.boot))).min()
    }

    /// For the scaler's log: what the agent is about to do.
    pub(super) fn note(&self) -> Option<String> {
        match &self.mode {
            Mode::Ending { reason, .. } => Some(format!("leaving: {reason}")),
            Mode::Serving | Mode::Left => None,
        }
    }
}
