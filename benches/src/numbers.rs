//! Numbers, as people read them.

use std::time::Duration;

/// Durations of one kind.
#[derive(Debug, Default)]
pub struct Times(Vec<Duration>);

impl Times {
    /// One that lies so many per cent of the way from the shortest to the longest.
    #[must_use]
    pub fn percentile(&self, percent: usize) -> Duration {
        let last = self.0.len().saturating_sub(1);
        self.0.get((last * percent).div_ceil(100)).copied().unwrap_or_default()
    }

    /// Median, 99th percentile and maximum.
    #[must_use]
    pub fn show(&self) -> String {
        let [p50, p99, most] = [50, 99, 100].map(|percent| millis(self.percentile(percent)));
        format!("p50 {p50}  p99 {p99}  max {most} ms ({})", self.0.len())
    }
}

impl FromIterator<Duration> for Times {
    fn from_iter<I: IntoIterator<Item = Duration>>(times: I) -> Self {
        let mut times: Vec<Duration> = times.into_iter().collect();
        times.sort_unstable();
        Self(times)
    }
}

fn millis(time: Duration) -> String {
    format!("{:.1}", time.as_secs_f64() * 1e3)
}

/// Prints a line of the table.
#[expect(clippy::print_stdout, reason = "a measurement prints what it measured")]
pub fn row(what: &str, measured: &str, budget: &str) {
    println!("{what:<58} {measured:>44}   {budget}");
}
