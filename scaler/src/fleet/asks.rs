//! Who waits for a machine.

use jiff::Timestamp;
use pilotlight_wire::{JobId, LabelName, PoolName};

use super::{
    demand::{JobState, Log, Refused},
    world::World,
};

/// Somebody who waits for GPUs. A copy of what packing asks for: at ten thousand jobs the planner's time is that of
/// fetching them from memory, and so it does that once.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ask<'a> {
    pub(super) id: JobId,
    pub(super) label: &'a LabelName,
    pub(super) pool: &'a PoolName,
    pub(super) gpus: u32,
    pub(super) priority: i32,
    pub(super) queued_at: Timestamp,
    pub(super) refusal: Option<&'a Refused>,
}

/// What jobs want of the planner.
#[derive(Debug, Default)]
pub(super) struct Asks<'a> {
    pub(super) all: Vec<Ask<'a>>,
    /// Jobs that are over and to whose logs nothing more will come, and whether some of it may be missing.
    pub(super) over: Vec<(JobId, bool)>,
}

pub(super) fn asks(world: &World) -> Asks<'_> {
    let mut asks = Asks::default();
    for job in world.jobs.values() {
        match &job.state {
            JobState::Queued => asks.all.push(Ask {
                id: job.id,
                label: &job.label,
                pool: &job.pool,
                gpus: job.gpus,
                priority: job.priority,
                queued_at: job.queued_at,
                refusal: job.refusal.as_ref(),
            }),
            JobState::Finished(ended) => {
                if let Log::Over { incomplete } = ended.log {
                    asks.over.push((job.id, incomplete));
                }
            }
            JobState::Placed { .. } => {}
        }
    }
    asks
}
