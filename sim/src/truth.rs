//! What really happened, which only the simulator knows.

use std::collections::BTreeMap;

use pilotlight_scaler::fleet::demand::Ended;
use pilotlight_wire::JobId;

/// What really happened.
#[derive(Debug, Default)]
pub(crate) struct Truth {
    /// How many jobs are to be submitted in all.
    pub(crate) wanted: usize,
    pub(crate) jobs: BTreeMap<JobId, JobTruth>,
}

/// What a job does, and what became of it.
#[derive(Clone, Debug)]
pub(crate) struct JobTruth {
    pub(crate) label: &'static str,
    /// How long it runs, milliseconds.
    pub(crate) runs_for: u64,
    /// How many bytes it writes.
    pub(crate) bytes: u64,
    /// How it exits if it is left alone.
    pub(crate) code: i32,
    /// How often a container of it was started.
    pub(crate) starts: u32,
    /// Whether a container of it came to its own end.
    pub(crate) completed: bool,
    /// Whether somebody asked for its end.
    pub(crate) cancelled: bool,
    /// Whether the scaler ever accepted it.
    pub(crate) accepted: bool,
    /// Whether the database that knew it was lost before it was over.
    pub(crate) forgotten: bool,
    /// How it ended, by the scaler's word, once its log was closed.
    pub(crate) settled: Option<Ended>,
}
