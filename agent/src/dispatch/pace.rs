//! When the next sync and the next sample are due.

use std::time::Duration;

use backon::ExponentialBackoff;
use tokio::time::Instant;

use crate::link;

/// Between syncs that nobody asked for: a scaler that answers at once for no reason is not asked in a tight loop.
const GAP: Duration = Duration::from_millis(200);
/// How long news that are nice to know may wait for company.
const SOON: Duration = Duration::from_secs(1);
/// Syncs under way at most; a new one waits for an answer then.
const MOST: usize = 8;

#[derive(Debug)]
pub(super) struct Pace {
    sync: Option<Instant>,
    last_sent: Instant,
    backoff: ExponentialBackoff,
    sample: Option<(Instant, Duration)>,
}

impl Pace {
    pub(super) fn new() -> Self {
        Self { sync: None, last_sent: Instant::now(), backoff: link::backoff(), sample: None }
    }

    /// The scaler must know.
    pub(super) fn now(&mut self) {
        self.by(Instant::now());
    }

    /// The scaler would like to know.
    pub(super) fn soon(&mut self) {
        self.by(self.last_sent + SOON);
    }

    pub(super) fn sent(&mut self) {
        self.sync = None;
        self.last_sent = Instant::now();
    }

    /// `newest`: no later one is under way.
    pub(super) fn answered(&mut self, newest: bool) {
        self.backoff = link::backoff();
        if newest {
            self.by(self.last_sent + GAP);
        }
    }

    pub(super) fn failed(&mut self) {
        let pause = self.backoff.next().unwrap_or(link::MAX_BACKOFF);
        self.by(Instant::now() + pause);
    }

    /// When to send the next sync while `under_way` are not answered; `None`: when something happens.
    pub(super) fn next_sync(&self, under_way: usize) -> Option<Instant> {
        self.sync.filter(|_| under_way < MOST)
    }

    pub(super) fn sample_every(&mut self, period: Duration) {
        self.sample = Some((Instant::now(), period));
    }

    pub(super) fn next_sample(&self) -> Option<Instant> {
        self.sample.map(|(at, _)| at)
    }

    /// What was last sampled has changed.
    pub(super) fn sample_now(&mut self) {
        if let Some((at, _)) = &mut self.sample {
            *at = Instant::now();
        }
    }

    pub(super) fn sampled(&mut self) {
        if let Some((at, period)) = &mut self.sample {
            *at = Instant::now() + *period;
        }
    }

    fn by(&mut self, at: Instant) {
        self.sync = Some(self.sync.map_or(at, |sync| sync.min(at)));
    }
}
