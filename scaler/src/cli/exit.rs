//! Exit codes (design 7) and the one error type that carries them.

use std::io;

use pilotlight_wire::{Verdict, api::JobView};

use crate::RunError;

/// The command line was wrong.
pub const USAGE: u8 = 64;
/// Unknown label, unusable image, or other bad input.
pub const BAD_INPUT: u8 = 65;
/// The store failed: what is in memory is ahead of what is on disk.
pub const STORE: u8 = 74;
/// The scaler gives no answer.
pub const UNREACHABLE: u8 = 69;
/// The machine, Docker, the network or Pilotlight itself failed.
pub const INFRASTRUCTURE: u8 = 75;
/// No token, or not a good one.
pub const NO_PERMISSION: u8 = 77;
/// The config has errors.
pub const CONFIG: u8 = 78;
/// The job's deadline passed.
pub const TIMEOUT: u8 = 124;
/// The job was cancelled.
pub const CANCELLED: u8 = 130;

/// The exit code of a scaler that could not start or go on.
#[must_use]
pub fn of_run(error: &RunError) -> u8 {
    match error {
        // Nothing is wrong with the config: it will do once there is room.
        full if is_full_disk(full) => STORE,
        RunError::Store(_) => STORE,
        RunError::Keys(_) | RunError::StateDir { .. } | RunError::Listen { .. } => CONFIG,
        RunError::Locked(_) | RunError::Logs(_) | RunError::Forge(_) | RunError::Serve(_) => INFRASTRUCTURE,
    }
}

fn is_full_disk(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut causes = std::iter::successors(Some(error), |error| error.source());
    causes
        .any(|cause| cause.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::StorageFull))
}

/// Why a command failed, and the code it exits with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Failure {
    pub(crate) code: u8,
    /// What is wrong and what to do.
    pub(crate) message: String,
}

impl Failure {
    pub(crate) fn new(code: u8, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

/// The exit code for a finished job: its own where it has one, ours where it has not.
pub(crate) fn of_job(job: &JobView) -> u8 {
    let own = job.exit_code.map(|code| u8::try_from(code).unwrap_or(1));
    match job.verdict {
        Some(Verdict::Success) => own.unwrap_or(0),
        // A job that failed by other means than its code (out of memory) must not look like a success.
        Some(Verdict::Failure) => own.map_or(BAD_INPUT, |code| code.max(1)),
        Some(Verdict::Cancelled) => CANCELLED,
        Some(Verdict::Timeout) => TIMEOUT,
        Some(Verdict::Infrastructure) | None => INFRASTRUCTURE,
    }
}
