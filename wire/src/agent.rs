//! What an agent and the scaler say to each other (design 5, link 1 to 6). The agent only dials out.
//!
//! | call | body | answer |
//! |---|---|---|
//! | `POST /agent/v1/enrol` | [`EnrolRequest`] | [`EnrolResponse`] |
//! | `POST /agent/v1/sync` (held) | [`SyncRequest`] | [`SyncResponse`] |
//! | `POST /agent/v1/assignments/{id}/events` | [`AssignmentEvent`] | [`EventAck`], 409 with `expected` |
//! | `PUT /agent/v1/assignments/{id}/log?offset=N` | job bytes, at most [`MAX_LOG_CHUNK`] | [`LogSize`], 409 with `size` |

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{AssignmentId, ForgeName, GpuId, InstanceId, JobId, LabelName, Secret, Task, Usage, Verdict, Volume, Work};

/// The most bytes one log upload carries.
pub const MAX_LOG_CHUNK: usize = 1024 * 1024;

/// How long the scaler holds a sync without news, seconds.
pub const SYNC_HOLD_SECONDS: u64 = 25;

/// What an instance finds at its first start: the one document that turns a machine into an agent.
/// Nothing in it works after enrolment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bootstrap {
    /// Base URL of the scaler, without a trailing slash.
    pub scaler_url: String,
    /// The instance that this machine is.
    pub instance: InstanceId,
    /// Single-use secret: HMAC of the instance id (link 1).
    pub secret: Secret,
    /// What leaving means.
    pub power: PowerMode,
    /// The GPUs this instance may use; all others are ignored. Absent: every GPU of the machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpus: Option<Vec<GpuId>>,
    /// Whether jobs may use the built-in image `pilotlight/host`.
    #[serde(default)]
    pub host_image: bool,
}

/// What the agent does to its machine when it leaves. Comes from the bootstrap only, so that an agent started by hand
/// can never power a box off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PowerMode {
    /// The process ends; the machine stays.
    #[default]
    Exit,
    /// The machine is turned off.
    Poweroff,
}

/// Exchanges the bootstrap secret for a bearer token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EnrolRequest {
    /// The instance named in the bootstrap.
    pub instance: InstanceId,
    /// The secret of the bootstrap.
    pub secret: Secret,
    /// 32 random bytes in hex, fsynced before the first use and used again after a restart.
    pub nonce: String,
    /// The agent's version.
    pub agent_version: String,
    /// When the agent's process first started on this machine.
    pub agent_started_at: Timestamp,
    /// What the machine has.
    pub inventory: Inventory,
    /// Whether the agent judges the machine fit for jobs.
    pub health: Health,
    /// The bearer of an earlier enrolment, if there was one: a scaler that lost its database knows by it that the
    /// agent is not a second one with stolen user-data (link 1).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bearer: Option<Secret>,
}

/// What a machine has, as its agent found it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inventory {
    /// The GPUs that the instance may use and the agent can see.
    pub gpus: Vec<Gpu>,
    /// NVIDIA driver version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Processors.
    pub cpus: u32,
    /// Memory, bytes.
    pub memory_bytes: u64,
    /// Free bytes on the file system of the agent's directory.
    pub disk_free_bytes: u64,
    /// Docker's version; absent when Docker did not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub docker: Option<String>,
    /// Kernel release.
    pub kernel: String,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// The driver's UUID.
    pub uuid: GpuId,
    /// Model, such as `NVIDIA H200`.
    pub model: String,
    /// PCI address.
    pub pci: String,
}

/// The agent's verdict on its machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// One sentence per problem; empty is healthy.
    pub problems: Vec<String>,
}

/// What the agent needs to know to begin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnrolResponse {
    /// `instance.nonce.HMAC`: valid until the instance is gone.
    pub bearer: Secret,
    /// How to behave.
    pub policy: Policy,
    /// The scaler's clock.
    pub server_time: Timestamp,
}

/// How an agent behaves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// How long the agent lives without an answer, counted from *sending* the sync that was last answered.
    pub lease_seconds: u64,
    /// How long a lapsed agent keeps unsent results and logs before it leaves.
    pub result_grace_seconds: u64,
    /// How often host samples are sent.
    pub sample_seconds: u64,
    /// Jobs without GPUs at once; used to share out the machine's memory.
    pub cpu_jobs: u32,
}

/// Orders syncs. A higher pair supersedes the held sync, which returns empty at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Seq {
    /// Raised on disk at each agent start.
    pub run: u64,
    /// Raised with each sync of one run.
    pub n: u64,
}

/// The agent's regular word: what it has, and how it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SyncRequest {
    /// Order among this agent's syncs.
    pub seq: Seq,
    /// Every assignment that has a file on the agent's disk.
    pub assignments: Vec<AssignmentReport>,
    /// Host metrics, every few seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample: Option<HostSample>,
    /// Free text on what the agent is about to do, such as why it will leave.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// One assignment as its agent has it. It says enough for a scaler that lost its database to adopt the job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AssignmentReport {
    /// The assignment.
    pub id: AssignmentId,
    /// Whose job it is. Absent for a cancel of an assignment that never arrived.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<JobRef>,
    /// The GPUs it holds.
    #[serde(default)]
    pub gpus: Vec<GpuId>,
    /// Seconds left to its deadline, counted on a clock that nobody can set: the machine's wall clock may be wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remaining_seconds: Option<u64>,
    /// How far it is.
    pub stage: Stage,
    /// A line for the job's author, such as the progress of a pull.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

/// Names a job for people and for adoption.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRef {
    /// The job.
    pub id: JobId,
    /// Where it comes from.
    pub forge: ForgeName,
    /// What it asked for.
    pub label: LabelName,
    /// What its author calls it.
    pub name: String,
}

/// How far an assignment is on the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// On disk, nothing done yet.
    Accepted,
    /// The image is being made ready.
    Preparing,
    /// The container was started.
    Running,
    /// The container has ended; cleaning up.
    Finishing,
    /// All is said; waiting for the scaler to acknowledge.
    Finished,
}

/// How the machine is, from the kernel's counters.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostSample {
    /// When it was taken.
    pub at: Timestamp,
    /// Processors in use, 0 to 100 over all of them.
    pub cpu_percent: f32,
    /// Memory in use, bytes.
    pub memory_used_bytes: u64,
    /// Free bytes on the file system of the agent's directory.
    pub disk_free_bytes: u64,
    /// Load average over one minute.
    pub load1: f64,
}

/// The scaler's answer to a sync.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SyncResponse {
    /// What to do; each is idempotent by its assignment's id.
    pub directives: Vec<Directive>,
    /// The new lease, counted by the agent from sending this sync.
    pub lease_seconds: u64,
    /// The scaler's clock.
    pub server_time: Timestamp,
}

/// What the scaler wants of an agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Directive {
    /// Run a job. Repeated until the assignment is listed or its `finished` has come.
    Start(Box<Start>),
    /// End a job. Repeated until its `finished` has come.
    Cancel {
        /// The assignment to end; it may never have arrived.
        assignment: AssignmentId,
    },
    /// End a runner, unless it has taken a job: nothing waits for it any more. Repeated until it says either.
    Withdraw {
        /// The assignment.
        assignment: AssignmentId,
    },
    /// End everything, clean up, leave by the power mode.
    Terminate {
        /// Why, for the agent's log.
        reason: String,
    },
}

/// One job to run, or one runner.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Start {
    /// The idempotency key.
    pub assignment: AssignmentId,
    /// Whose job it is.
    pub job: JobRef,
    /// What to run.
    pub work: Work,
    /// The GPUs it gets; empty for a CPU job.
    pub gpus: Vec<GpuId>,
    /// Directories of the machine that it may see.
    pub volumes: Vec<Volume>,
    /// Seconds left to the deadline. The agent alone ends a job by timeout (link 3).
    pub remaining_seconds: u64,
    /// Bytes of log kept; past it bytes are counted and dropped, with a notice.
    pub max_log_bytes: u64,
    /// Seconds between SIGTERM and SIGKILL when the job is ended early.
    pub stop_grace_seconds: u64,
}

/// One thing that happened to an assignment; numbered from 1, from the agent's disk outbox.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AssignmentEvent {
    /// Its number.
    pub n: u64,
    /// When it happened, by the agent's clock.
    pub at: Timestamp,
    /// What happened.
    pub event: AssignmentEventKind,
}

/// What happened to an assignment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum AssignmentEventKind {
    /// The container was started.
    Started {
        /// When the image was ready.
        image_ready_at: Timestamp,
        /// The image's digest or id, so that a log can be traced to what ran.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        image_id: Option<String>,
    },
    /// The runner took a job from its forge. Comes after `started`; a runner that is not needed never says it.
    Picked(Task),
    /// Never started, for a reason of the machine's: the only event after which a direct job is queued again by itself.
    Refused {
        /// Why.
        reason: String,
    },
    /// Over.
    Finished(Finished),
}

/// How an assignment ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finished {
    /// Whose fault, if any.
    pub verdict: Verdict,
    /// The container's own exit code; absent when it never ran or the code is not known (link 4).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// One sentence when the verdict is not plain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// How many bytes the log has; it is closed when the scaler has as many.
    pub log_bytes: u64,
    /// Whether bytes of the job's output are missing from the log.
    #[serde(default)]
    pub log_gap: bool,
    /// What it used; absent when it never ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

/// The scaler has an event. A body of its own, because a foreign 200 (a captive proxy) must not pass for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventAck {
    /// The number of the event that it expects next.
    pub expected: u64,
}

/// How much of a log the scaler has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogSize {
    /// Bytes.
    pub size: u64,
}
