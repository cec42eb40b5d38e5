//! One assignment, as the machine has it.

use jiff::Timestamp;
use pilotlight_wire::{
    AssignmentId, Verdict,
    agent::{AssignmentEvent, AssignmentEventKind, Finished, Stage, Start},
};

use super::{Effect, LogEnd};
use crate::{assignment::Record, job::Wish};

#[derive(Clone, Debug)]
pub(super) struct Assignment {
    pub(super) record: Record,
    pub(super) stage: Stage,
    pub(super) detail: Option<String>,
    pub(super) wish: Wish,
    pub(super) started: bool,
    pub(super) events: u64,
    pub(super) acked: u64,
    pub(super) log: LogEnd,
    pub(super) log_complete: bool,
}

impl Assignment {
    pub(super) fn new(record: Record) -> Self {
        Self {
            record,
            stage: Stage::Accepted,
            detail: None,
            wish: Wish::Run,
            started: false,
            events: 0,
            acked: 0,
            log: LogEnd::Open,
            log_complete: false,
        }
    }

    pub(super) fn active(&self) -> bool {
        self.stage != Stage::Finished
    }

    pub(super) fn start(&self) -> Option<&Start> {
        match &self.record {
            Record::Started { start, .. } => Some(start),
            Record::NeverArrived => None,
        }
    }

    pub(super) fn emit(
        &mut self,
        id: AssignmentId,
        at: Timestamp,
        event: AssignmentEventKind,
        effects: &mut Vec<Effect>,
    ) {
        self.events += 1;
        effects.push(Effect::Emit(id, AssignmentEvent { n: self.events, at, event }));
    }

    /// The last word on an assignment: its event and the end of its log.
    pub(super) fn finish(
        &mut self,
        id: AssignmentId,
        at: Timestamp,
        event: AssignmentEventKind,
        effects: &mut Vec<Effect>,
    ) {
        self.stage = Stage::Finished;
        self.detail = None;
        self.log = LogEnd::At(log_bytes(&event));
        self.emit(id, at, event, effects);
        effects.push(Effect::Log(id, self.log));
        effects.push(Effect::Sync);
    }
}

/// Bytes of log that an event leaves to be sent: a refused job has none.
pub(super) fn log_bytes(event: &AssignmentEventKind) -> u64 {
    match event {
        AssignmentEventKind::Finished(finished) => finished.log_bytes,
        _ => 0,
    }
}

pub(super) fn cancelled_before_arrival() -> AssignmentEventKind {
    AssignmentEventKind::Finished(Finished {
        verdict: Verdict::Cancelled,
        exit_code: None,
        reason: Some("cancelled before it reached the machine".to_owned()),
        log_bytes: 0,
        log_gap: false,
        usage: None,
    })
}
