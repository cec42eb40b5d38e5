//! Everything that happens to the fleet, and what the world answers.

use jiff::{SignedDuration, Timestamp};
use pilotlight_wire::{
    AssignmentId, ForgeName, InstanceId, JobId, LabelName,
    agent::{AssignmentEvent, AssignmentReport, HostSample, Inventory, Seq},
    api::DrainTarget,
};

use super::{demand::Job, forge::Reading, world::Settings};
use crate::provider::Listed;

/// Everything that happens.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A client submitted a job.
    Submitted(Box<Submission>),
    /// A client cancelled a job.
    JobCancelled(JobId),
    /// All that can come of a finished job's log is in the log store, and it was closed.
    LogClosed(JobId),
    /// An agent proved that it is the instance's and asks to be taken.
    Enrolled(Box<Enrol>),
    /// An agent's regular word.
    Synced(Box<Synced>),
    /// The reply to a held sync goes out now; the lease counts from here.
    SyncAnswered(InstanceId),
    /// An agent tells of an assignment.
    AssignmentEvent {
        /// Who tells.
        instance: InstanceId,
        /// Of what.
        assignment: AssignmentId,
        /// What.
        event: AssignmentEvent,
    },
    /// The provider made the machine.
    Created(InstanceId),
    /// The provider did not make the machine, or nobody knows.
    CreateFailed {
        /// The machine.
        instance: InstanceId,
        /// What it means.
        class: CreateFailure,
        /// What the provider said.
        message: String,
    },
    /// The provider accepted the destroy.
    DestroyAccepted(InstanceId),
    /// The destroy failed.
    DestroyFailed {
        /// The machine.
        instance: InstanceId,
        /// What the provider said.
        message: String,
    },
    /// A provider's list was read.
    ListRead {
        /// When the call began.
        began_at: Timestamp,
        /// What carries our controller's mark.
        listed: Vec<Listed>,
    },
    /// A provider's list could not be read: nothing is known, and nothing destructive follows.
    ListFailed {
        /// What the provider said.
        message: String,
    },
    /// An admin wants machines to take no new work and go.
    Drain {
        /// Which.
        target: DrainTarget,
        /// Cancel what runs on them.
        now: bool,
    },
    /// An admin ends `drain --all`.
    Resumed,
    /// An admin keeps a machine for debugging.
    Held {
        /// Which.
        instance: InstanceId,
        /// How long from now.
        duration: SignedDuration,
    },
    /// An admin needs a machine no longer.
    Released(InstanceId),
    /// An admin changed the config.
    Reloaded(Box<Settings>),
    /// An admin changed the config to something invalid; the old one is kept.
    ReloadFailed {
        /// What is wrong with it.
        message: String,
    },
    /// An admin wants what nobody knows to be destroyed.
    ReapOrphans,
    /// A forge was read.
    DemandRead(Box<Reading>),
    /// A forge could not be read: what is known of it stands, and nothing destructive follows.
    DemandFailed {
        /// Which.
        forge: ForgeName,
        /// What it said.
        message: String,
    },
    /// A runner was registered.
    Granted {
        /// Its job row.
        job: JobId,
        /// The forge's number of the registration.
        id: i64,
    },
    /// A runner was not registered, or nobody knows.
    GrantFailed {
        /// Its job row.
        job: JobId,
        /// What the forge said.
        message: String,
    },
    /// A runner's registration is known to be gone, and with it every task that it had.
    RegistrationOver(JobId),
    /// A runner's registration could not be ended.
    RegistrationFailed {
        /// Its job row.
        job: JobId,
        /// What the forge said.
        message: String,
    },
    /// Somebody stepped the system's clock.
    ClockStepped {
        /// How far, ahead or back.
        by: SignedDuration,
        /// How far our time has gone with it that never passed.
        skipped: SignedDuration,
    },
}

/// A job as a client submitted it; the label's own values fill what is absent.
#[derive(Clone, Debug, PartialEq)]
pub struct Submission {
    /// The client's id.
    pub id: JobId,
    /// What it asks for.
    pub label: LabelName,
    /// What its author calls it.
    pub name: String,
    /// SHA-256 of the body.
    pub body_hash: String,
    /// From assignment to deadline.
    pub timeout: Option<SignedDuration>,
    /// Higher goes first.
    pub priority: Option<i32>,
}

/// An enrolment whose secret was verified.
#[derive(Clone, Debug, PartialEq)]
pub struct Enrol {
    /// The machine.
    pub instance: InstanceId,
    /// The agent's nonce.
    pub nonce: String,
    /// The agent's version.
    pub agent_version: String,
    /// When the agent's process began.
    pub agent_started_at: Timestamp,
    /// What the machine has.
    pub inventory: Inventory,
    /// What is wrong with it.
    pub problems: Vec<String>,
    /// Whether it showed a bearer that we made: it has enrolled before, with this nonce.
    pub proven: bool,
}

/// An agent's regular word.
#[derive(Clone, Debug, PartialEq)]
pub struct Synced {
    /// Who.
    pub instance: InstanceId,
    /// The nonce in its bearer.
    pub nonce: String,
    /// Its order among this agent's syncs: one that was overtaken says nothing.
    pub seq: Seq,
    /// Every assignment that has a file on its disk.
    pub assignments: Vec<AssignmentReport>,
    /// How the machine is.
    pub sample: Option<HostSample>,
}

/// What a failed create means (design 4, 9).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CreateFailure {
    /// No machine of this kind now.
    Capacity,
    /// The arguments can never work.
    Invalid,
    /// Nobody knows.
    MayExist,
}

/// What the world answers to an event that changed it or was a repeat.
#[derive(Clone, Debug, PartialEq)]
pub enum Applied {
    /// Done, or it was done already.
    Done,
    /// The job, as it is now.
    Job(Box<Job>),
    /// The job that was submitted before, as it is now.
    Known(Box<Job>),
    /// What the agent should do.
    Directives(Vec<Order>),
    /// The machines concerned.
    Instances(Vec<InstanceId>),
    /// What an admin has now ordered to be reaped.
    Orphans(Vec<InstanceId>),
}

/// What an agent should do; the shell adds the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Run it.
    Start(AssignmentId),
    /// End it.
    Cancel(AssignmentId),
    /// End it unless it has taken a job.
    Withdraw(AssignmentId),
    /// End everything and leave.
    Terminate,
}

/// Why an event was not applied. The world is as it was.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No such instance.
    #[error("no such instance")]
    UnknownInstance,
    /// The instance is proved gone, or about to be and never enrolled.
    #[error("the instance is gone")]
    InstanceGone,
    /// Another agent enrolled first.
    #[error("another agent has enrolled as this instance")]
    OtherNonce,
    /// The instance has no such assignment.
    #[error("the instance has no such assignment")]
    UnknownAssignment,
    /// An event is missing before this one.
    #[error("event {expected} is expected next")]
    EventGap {
        /// The next number.
        expected: u64,
    },
    /// No such job.
    #[error("no such job")]
    UnknownJob,
    /// A known id with another body.
    #[error("the job exists with other contents")]
    OtherBody,
    /// No such label.
    #[error("no label {label}; this scaler serves: {known}")]
    UnknownLabel {
        /// What was asked for.
        label: LabelName,
        /// What there is.
        known: String,
    },
    /// No placement of the pool could ever hold the job.
    #[error("label {label} asks for gpus = {gpus}, and no placement of its pool has as many: {have}")]
    TooLarge {
        /// The label.
        label: LabelName,
        /// What it asks for.
        gpus: u32,
        /// What there is.
        have: String,
    },
    /// No such pool.
    #[error("no pool of that name")]
    UnknownPool,
    /// The instance cannot be held.
    #[error("the instance is being destroyed, it is too late to hold it")]
    Leaving,
    /// A hold without an end would be a leak.
    #[error("a machine can be held for 24 h at most; hold it again before that is over")]
    HoldTooLong,
}
