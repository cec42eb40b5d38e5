//! Waiting for a state, and telling the last one that was seen when it does not come.

use std::{fmt::Debug, time::Duration};

use anyhow::{Result, bail};
use tokio::time::Instant;

/// How long anything of a forge may take before the test gives up.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// How often a state is looked at.
const LOOK: Duration = Duration::from_millis(50);

/// Looks until a state is as it should be, and answers it.
///
/// # Errors
/// When looking fails, or the state does not come; the error shows the last one seen.
pub fn until<T: Debug>(what: &str, look: impl FnMut() -> Result<T>, good: impl Fn(&T) -> bool) -> Result<T> {
    until_within(PATIENCE, what, look, good)
}

/// As [`until`], for what takes longer by its nature.
///
/// # Errors
/// As [`until`].
pub fn until_within<T: Debug>(
    patience: Duration,
    what: &str,
    mut look: impl FnMut() -> Result<T>,
    good: impl Fn(&T) -> bool,
) -> Result<T> {
    let began = Instant::now();
    loop {
        let seen = look()?;
        if good(&seen) {
            return Ok(seen);
        }
        if began.elapsed() > patience {
            bail!("not within {} s: {what}; last seen: {seen:#?}", patience.as_secs());
        }
        std::thread::sleep(LOOK);
    }
}
