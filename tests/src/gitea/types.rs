//! What the API tells of runs, jobs and runners, as far as tests look at it.

use jiff::Timestamp;
use serde::{Deserialize, Deserializer, de::DeserializeOwned};

/// Where a run, job or step stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// A run that was just made.
    Requested,
    /// Blocked: by `needs`, a concurrency group or a missing approval.
    Waiting,
    /// Ready for a runner.
    Queued,
    /// A runner has it. A job that is being cancelled reads the same.
    InProgress,
    /// Over; see the conclusion.
    Completed,
}

/// How a run, job or step ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Conclusion {
    /// Well.
    Success,
    /// Not well.
    Failure,
    /// Somebody ended it.
    Cancelled,
    /// Its condition did not hold.
    Skipped,
}

/// A job of a run.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Job {
    /// Its id; a re-run has another.
    pub id: u64,
    /// Its run.
    pub run_id: u64,
    /// Which attempt of the run it belongs to, from 1.
    pub run_attempt: u64,
    /// Its name in the workflow.
    pub name: String,
    /// Its `runs-on`, evaluated. A caller of a reusable workflow has none.
    #[serde(deserialize_with = "null_as_default")]
    pub labels: Vec<String>,
    /// Where it stands.
    pub status: Status,
    /// How it ended.
    #[serde(default)]
    pub conclusion: Option<Conclusion>,
    /// The API's URL of it: the only place that names the repository.
    pub url: String,
    /// The page to look at it.
    pub html_url: String,
    /// The runner that has it or had it.
    #[serde(default)]
    pub runner_id: Option<u64>,
    /// The name of that runner.
    #[serde(default)]
    pub runner_name: Option<String>,
    /// Its steps, once a runner has told them.
    pub steps: Vec<Step>,
    /// When it was made.
    #[serde(deserialize_with = "set")]
    pub created_at: Option<Timestamp>,
    /// When a runner took it.
    #[serde(deserialize_with = "set")]
    pub started_at: Option<Timestamp>,
    /// When it ended.
    #[serde(deserialize_with = "set")]
    pub completed_at: Option<Timestamp>,
}

/// A step of a job.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Step {
    /// Its name.
    pub name: String,
    /// Its number, from 0.
    pub number: u64,
    /// Where it stands.
    pub status: Status,
    /// How it ended.
    #[serde(default)]
    pub conclusion: Option<Conclusion>,
}

/// A run of a workflow.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Run {
    /// Its id; re-runs keep it.
    pub id: u64,
    /// Its number in its repository.
    pub run_number: u64,
    /// Which attempt the last one is, from 1.
    pub run_attempt: u64,
    /// Where it stands.
    pub status: Status,
    /// How it ended.
    #[serde(default)]
    pub conclusion: Option<Conclusion>,
    /// The page to look at it.
    pub html_url: String,
}

/// A runner as the API shows it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct RunnerView {
    /// Its id.
    pub id: u64,
    /// Its name; need not be unique.
    pub name: String,
    /// `online` when it called within the last minute, else `offline`.
    pub status: String,
    /// Whether it sent logs or states within the last ten seconds, which a silent job does not.
    pub busy: bool,
    /// Whether it gets no jobs.
    pub disabled: bool,
    /// Whether it goes with its first job.
    pub ephemeral: bool,
    /// What it serves.
    pub labels: Vec<LabelView>,
}

/// A label of a runner.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct LabelView {
    /// Its name.
    pub name: String,
}

impl RunnerView {
    /// The names of its labels.
    #[must_use]
    pub fn label_names(&self) -> Vec<&str> {
        self.labels.iter().map(|label| label.name.as_str()).collect()
    }
}

/// A task: what a runner gets of a job. Only the list of these has the ids that the runner's protocol uses.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct TaskView {
    /// Its id.
    pub id: u64,
    /// The job's name.
    pub name: String,
    /// The run's number in its repository; not its id.
    pub run_number: u64,
    /// Its status, in other words than a job's: `running`, `success`, ….
    pub status: String,
}

fn null_as_default<'de, D: Deserializer<'de>, T: DeserializeOwned + Default>(deserializer: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// A time that is not set reads as the beginning of 1970.
fn set<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Timestamp>, D::Error> {
    let time = Timestamp::deserialize(deserializer)?;
    Ok((time > Timestamp::UNIX_EPOCH).then_some(time))
}
