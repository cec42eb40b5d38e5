//! What clients and the scaler say to each other (design 7, link 6). Scripts may rely on every field here.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    AssignmentId, DirectJob, ForgeName, InstanceId, JobId, LabelName, PlacementName, PoolName, Usage, Verdict,
    agent::HostSample,
};

/// Response header: how many bytes the log has.
pub const LOG_SIZE_HEADER: &str = "pilotlight-log-size";
/// Response header: `open` or `closed`.
pub const LOG_STATE_HEADER: &str = "pilotlight-log-state";
/// How long a log or job request with `follow` is held without news, seconds.
pub const FOLLOW_HOLD_SECONDS: u64 = 25;

/// The longest hold, seconds (design 4).
pub const MAX_HOLD_SECONDS: u64 = 24 * 3600;

/// The most bytes one log answer carries.
pub const MAX_LOG_ANSWER: usize = 8 * 1024 * 1024;

/// `PUT /api/v1/jobs/{uuid}`: a known id with the same body is 200, with another body 409.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SubmitJob {
    /// What the job asks for.
    pub label: LabelName,
    /// What its author calls it; the image and command when empty.
    #[serde(default)]
    pub name: String,
    /// What to run.
    pub spec: DirectJob,
    /// Seconds from assignment to the deadline; the label's own when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u64>,
    /// Higher goes first; the label's own when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<i32>,
}

/// Where a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// Waiting for a machine.
    Queued,
    /// A machine has it; the container has not started.
    Assigned,
    /// The container was started.
    Running,
    /// Over.
    Finished,
}

impl JobState {
    /// The word used in JSON and tables.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Assigned => "assigned",
            Self::Running => "running",
            Self::Finished => "finished",
        }
    }
}

/// A job as clients see it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobView {
    /// Its id.
    pub id: JobId,
    /// Where it comes from.
    pub forge: ForgeName,
    /// What its author calls it.
    pub name: String,
    /// What it asked for.
    pub label: LabelName,
    /// Where it is.
    pub state: JobState,
    /// How it ended.
    pub verdict: Option<Verdict>,
    /// The container's own exit code.
    pub exit_code: Option<i32>,
    /// One sentence: why it waits, or why it ended so.
    pub reason: Option<String>,
    /// The machine it is or was on.
    pub instance: Option<InstanceId>,
    /// How many GPUs it asked for.
    pub gpus: u32,
    /// When it was accepted.
    pub queued_at: Timestamp,
    /// When its container was started.
    pub started_at: Option<Timestamp>,
    /// When it was over.
    pub finished_at: Option<Timestamp>,
    /// When each phase was reached.
    pub phases: Phases,
    /// A line on what happens now, such as the progress of a pull.
    pub detail: Option<String>,
    /// What it used.
    pub usage: Option<Usage>,
    /// What it cost by the placement's price, in the currency of the config.
    pub cost: Option<f64>,
    /// Whether bytes of its output are missing from the log.
    pub log_gap: bool,
    /// For a forge's job: which one it is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forge_job: Option<ForgeJobView>,
}

/// A job at its forge.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForgeJobView {
    /// The forge's number; 0 while it is not known.
    pub id: i64,
    /// The number of its workflow's run.
    pub run: i64,
    /// `owner/name`.
    pub repository: String,
    /// Where a person reads about it.
    pub url: String,
    /// False while the runner that was granted for it waits: it takes this job or another of the same label.
    pub taken: bool,
}

/// When a job reached each phase from queue to end. A job that found a warm machine has no `launched` to `enrolled`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Phases {
    /// Accepted.
    pub queued: Option<Timestamp>,
    /// First seen by the planner.
    pub planned: Option<Timestamp>,
    /// Its machine was asked of the provider.
    pub launched: Option<Timestamp>,
    /// The agent's process began on it.
    pub booted: Option<Timestamp>,
    /// The agent enrolled.
    pub enrolled: Option<Timestamp>,
    /// GPUs were given to it.
    pub assigned: Option<Timestamp>,
    /// The image was there.
    pub image_ready: Option<Timestamp>,
    /// The container was started.
    pub started: Option<Timestamp>,
    /// The container had ended and the result was known.
    pub finished: Option<Timestamp>,
}

impl Phases {
    /// Each phase's name and time, in order.
    #[must_use]
    pub fn in_order(&self) -> [(&'static str, Option<Timestamp>); 9] {
        [
            ("queued", self.queued),
            ("planned", self.planned),
            ("launched", self.launched),
            ("booted", self.booted),
            ("enrolled", self.enrolled),
            ("assigned", self.assigned),
            ("image_ready", self.image_ready),
            ("started", self.started),
            ("finished", self.finished),
        ]
    }
}

/// A machine as clients see it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InstanceView {
    /// Its id.
    pub id: InstanceId,
    /// Its pool.
    pub pool: PoolName,
    /// The rung of the ladder it came from.
    pub placement: PlacementName,
    /// The provider's kind, such as `local`.
    pub provider: String,
    /// `requested`, `booting`, `ready`, `draining`, `terminating` or `gone`.
    pub phase: String,
    /// How many GPUs it has.
    pub gpus: u32,
    /// What runs on it.
    pub assignments: Vec<AssignmentView>,
    /// When it was asked of the provider.
    pub created_at: Timestamp,
    /// When its agent enrolled.
    pub ready_at: Option<Timestamp>,
    /// Its hard end.
    pub expires_at: Timestamp,
    /// Until when an admin keeps it for debugging.
    #[serde(default)]
    pub held_until: Option<Timestamp>,
    /// Why it goes or went away.
    pub cause: Option<String>,
    /// When its agent was last heard.
    pub last_sync_at: Option<Timestamp>,
    /// How the machine was then.
    pub sample: Option<HostSample>,
}

/// One claim on a machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AssignmentView {
    /// Its id.
    pub id: AssignmentId,
    /// The job.
    pub job: JobId,
    /// How many GPUs.
    pub gpus: u32,
    /// When the agent ends it.
    pub deadline: Timestamp,
}

/// A pool as clients see it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PoolView {
    /// Its name.
    pub name: PoolName,
    /// What it serves.
    pub labels: Vec<LabelName>,
    /// Machines now.
    pub instances: u32,
    /// Machines at most.
    pub max_instances: u32,
    /// Machines that are kept without work.
    #[serde(default)]
    pub min_idle: u32,
    /// GPUs of the ready machines, and how many of them are taken.
    pub gpus: u32,
    /// GPUs taken by jobs.
    pub gpus_used: u32,
    /// Jobs waiting.
    pub jobs_queued: u32,
    /// Jobs on machines.
    pub jobs_running: u32,
    /// The ladder.
    pub placements: Vec<PlacementView>,
}

/// A rung of a pool's ladder as clients see it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlacementView {
    /// Its name.
    pub name: PlacementName,
    /// The provider's kind.
    pub provider: String,
    /// `ok`, `cooling`, `probing` (machines did not come up; one at a time is tried) or `stopped`.
    pub health: String,
    /// Why it cools or is stopped.
    pub reason: Option<String>,
    /// When it is tried again.
    pub until: Option<Timestamp>,
    /// Machines now.
    pub instances: u32,
    /// Machines at most, where the placement has a bound of its own.
    pub max_instances: Option<u32>,
}

/// `pilotlight status`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StatusView {
    /// Machines that are not gone.
    pub instances: u32,
    /// Jobs waiting.
    pub jobs_queued: u32,
    /// Jobs on machines.
    pub jobs_running: u32,
    /// Pools.
    pub pools: Vec<PoolView>,
    /// What a person should look at.
    pub alerts: Vec<Alert>,
    /// The scaler's version.
    pub version: String,
}

/// Something a person should look at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Alert {
    /// A stable word for programs.
    pub code: String,
    /// What is wrong and what to do.
    pub message: String,
    /// Since when.
    pub since: Timestamp,
}

/// `pilotlight plan`: what would happen now, and why.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanView {
    /// What the planner would do now.
    pub actions: Vec<PlanLine>,
    /// Jobs that wait, and for what.
    pub waiting: Vec<PlanLine>,
    /// Machines, and why each stays or goes.
    pub instances: Vec<PlanLine>,
    /// When the planner looks again without news.
    pub wake_at: Option<Timestamp>,
}

/// One line of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanLine {
    /// A stable word, such as `launch` or `waiting_for_capacity`.
    pub what: String,
    /// The job's or machine's id.
    pub subject: String,
    /// A stable word for the reason.
    pub reason: String,
    /// The line for people.
    pub text: String,
}

/// `POST /api/v1/drain`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DrainRequest {
    /// Which machines.
    pub target: DrainTarget,
    /// Cancel running jobs instead of letting them finish.
    #[serde(default)]
    pub now: bool,
}

/// Which machines to drain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DrainTarget {
    /// One machine.
    Instance(InstanceId),
    /// All of a pool.
    Pool(PoolName),
    /// All; nothing is launched until the next start, and waiting jobs stay queued.
    All,
}

/// The answer to a drain: the machines it concerns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainResponse {
    /// Machines that will go away.
    pub instances: Vec<InstanceId>,
}

/// `POST /api/v1/hold`: keep a machine for debugging.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HoldRequest {
    /// Which.
    pub instance: InstanceId,
    /// How long from now, seconds; at most [`MAX_HOLD_SECONDS`].
    pub seconds: u64,
}

/// `POST /api/v1/release`: the end of a hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReleaseRequest {
    /// Which.
    pub instance: InstanceId,
}

/// `GET /api/v1/orphans`, `POST /api/v1/reap`: what a provider lists under our name and the scaler does not know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Orphan {
    /// The kind of the provider that lists it.
    pub provider: String,
    /// The instance id in its tags.
    pub instance: InstanceId,
    /// Since when.
    pub since: Timestamp,
}
