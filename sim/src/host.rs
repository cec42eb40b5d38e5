//! A machine: its disk, its containers, its network.

use std::collections::{BTreeMap, BTreeSet};

use pilotlight_agent::{assignment::Record, job::End};
use pilotlight_wire::{
    AssignmentId, GpuId, InstanceId, JobId,
    agent::{AssignmentEvent, Policy},
};

use crate::agent::Agent;

/// A machine.
pub(crate) struct Host {
    pub(crate) id: InstanceId,
    pub(crate) gpus: BTreeSet<GpuId>,
    booted: u64,
    /// False once its hardware or its power is gone.
    pub(crate) alive: bool,
    /// How far its wall clock is off, milliseconds.
    pub(crate) clock_off: i64,
    /// Until when nothing that it sends arrives, and nothing that it is answered.
    pub(crate) requests_cut: u64,
    pub(crate) answers_cut: u64,
    pub(crate) disk: HostDisk,
    pub(crate) containers: BTreeMap<AssignmentId, Container>,
    pub(crate) agent: Option<Agent>,
    /// Which of its agents lives: what concerns an earlier one is nobody's any more.
    pub(crate) life: u64,
}

/// What outlives an agent.
#[derive(Debug, Default)]
pub(crate) struct HostDisk {
    pub(crate) run: u64,
    pub(crate) bearer: bool,
    pub(crate) policy: Option<Policy>,
    /// Never again.
    pub(crate) done: bool,
    pub(crate) assignments: BTreeMap<AssignmentId, OnDisk>,
}

/// One assignment on disk.
#[derive(Debug)]
pub(crate) struct OnDisk {
    pub(crate) record: Record,
    pub(crate) events: Vec<AssignmentEvent>,
    pub(crate) acked: u64,
    /// There was a container.
    pub(crate) started: bool,
    /// How it ended, and how many bytes its spool has.
    pub(crate) outcome: Option<(End, u64)>,
}

/// A container, which needs no agent to run.
#[derive(Clone, Debug)]
pub(crate) struct Container {
    pub(crate) job: JobId,
    pub(crate) started: u64,
    /// When it ends by itself.
    pub(crate) ends: u64,
    pub(crate) bytes: u64,
    pub(crate) code: i32,
    /// When and how it ended.
    pub(crate) exited: Option<(u64, i32)>,
}

impl Container {
    /// How many bytes it has written.
    pub(crate) fn written(&self, now: u64) -> u64 {
        let until = self.exited.map_or(now, |(at, _)| at).min(self.ends);
        let whole = (self.ends - self.started).max(1);
        if until >= self.ends { self.bytes } else { self.bytes * until.saturating_sub(self.started) / whole }
    }
}

/// What happens on a machine.
#[derive(Debug)]
pub(crate) enum HostEvent {
    /// An agent starts.
    AgentUp {
        life: u64,
    },
    /// It asks to be taken in.
    Enrol {
        life: u64,
    },
    /// A sync is due.
    Sync {
        life: u64,
    },
    /// It looks at its host.
    Sample {
        life: u64,
    },
    /// Time passes.
    Tick {
        life: u64,
    },
    /// The image is there, and the container can be started.
    Prepared {
        life: u64,
        assignment: AssignmentId,
    },
    /// A container is over by itself.
    Exits {
        assignment: AssignmentId,
    },
    /// A container has had its grace.
    Killed {
        assignment: AssignmentId,
    },
    /// An event or bytes of a log are to be sent.
    Deliver {
        life: u64,
        assignment: AssignmentId,
    },
    Upload {
        life: u64,
        assignment: AssignmentId,
    },
}

impl Host {
    pub(crate) fn new(id: InstanceId, gpus: BTreeSet<GpuId>, now: u64) -> Self {
        Self {
            id,
            gpus,
            booted: now,
            alive: true,
            clock_off: 0,
            requests_cut: 0,
            answers_cut: 0,
            disk: HostDisk::default(),
            containers: BTreeMap::new(),
            agent: None,
            life: 0,
        }
    }

    /// Milliseconds since it was turned on, on the clock that nobody can set.
    pub(crate) fn boot(&self, now: u64) -> u64 {
        now - self.booted
    }

    /// Whether a job's container runs on it.
    pub(crate) fn runs(&self, assignment: AssignmentId) -> bool {
        self.alive && self.containers.get(&assignment).is_some_and(|container| container.exited.is_none())
    }
}
