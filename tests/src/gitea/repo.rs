//! A repository with its workflows, runs and logs.

use anyhow::{Context, Result, bail, ensure};
use base64::{Engine, prelude::BASE64_STANDARD};
use serde_json::{Value, json};

use super::{Answer, Api, Job, Run, Scope, Status, types::TaskView, until};

/// A repository, with the rights of whoever asks.
#[derive(Clone, Debug)]
pub struct Repo {
    api: Api,
    owner: String,
    name: String,
}

impl Repo {
    /// A repository that exists.
    #[must_use]
    pub fn new(api: &Api, owner: &str, name: &str) -> Self {
        Self { api: api.clone(), owner: owner.to_owned(), name: name.to_owned() }
    }

    /// Its owner and name with a slash in between.
    #[must_use]
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.owner, self.name)
    }

    /// It as a scope.
    #[must_use]
    pub fn scope(&self) -> Scope {
        Scope::Repo(self.owner.clone(), self.name.clone())
    }

    /// The same with somebody else's rights.
    #[must_use]
    pub fn by(&self, api: &Api) -> Self {
        Self { api: api.clone(), ..self.clone() }
    }

    /// Writes files, given by path and content, in one commit, which is a push to `main`.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn write(&self, files: &[(&str, &str)]) -> Result<()> {
        let mut changes = Vec::new();
        for (path, content) in files {
            let contents = self.path(&format!("/contents/{path}"));
            let old = self.api.ask("GET", &contents, None)?;
            let mut change = json!({"path": path, "content": BASE64_STANDARD.encode(content)});
            match old.status {
                200 => {
                    change["operation"] = "update".into();
                    change["sha"] = old.json::<Value>()?["sha"].take();
                }
                404 => change["operation"] = "create".into(),
                status => bail!("GET {contents}: {status} {}", old.body),
            }
            changes.push(change);
        }
        let commit = json!({"branch": "main", "message": "Change what the test needs", "files": changes});
        self.api.send("POST", &self.path("/contents"), Some(&commit)).map(drop)
    }

    /// Writes a workflow, as `train.yml`.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn workflow(&self, file: &str, content: &str) -> Result<()> {
        self.write(&[(&format!(".gitea/workflows/{file}"), content)])
    }

    /// Runs a workflow that has `on: workflow_dispatch`. Answers the run's id; its jobs exist.
    ///
    /// # Errors
    /// When there is no such workflow.
    pub fn dispatch(&self, file: &str) -> Result<u64> {
        self.dispatch_with(file, &json!({}))
    }

    /// As [`Repo::dispatch`], with inputs: an object of texts.
    ///
    /// # Errors
    /// As [`Repo::dispatch`].
    pub fn dispatch_with(&self, file: &str, inputs: &Value) -> Result<u64> {
        let path = self.actions(&format!("/workflows/{file}/dispatches?return_run_details=true"));
        let made: Value = self.api.post(&path, &json!({"ref": "main", "inputs": inputs}))?;
        made["workflow_run_id"].as_u64().with_context(|| format!("a run's id: {made}"))
    }

    /// Its runs, newest first.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn runs(&self) -> Result<Vec<Run>> {
        self.api.pages(&self.actions("/runs"), "workflow_runs")
    }

    /// A run.
    ///
    /// # Errors
    /// When there is none of that id.
    pub fn run(&self, id: u64) -> Result<Run> {
        self.api.get(&self.actions(&format!("/runs/{id}")))
    }

    /// The jobs of a run's last attempt.
    ///
    /// # Errors
    /// When there is no such run.
    pub fn jobs(&self, run: u64) -> Result<Vec<Job>> {
        self.api.pages(&self.actions(&format!("/runs/{run}/jobs")), "jobs")
    }

    /// The only job of a run's last attempt.
    ///
    /// # Errors
    /// When there is no such run, or it has none or several.
    pub fn only_job(&self, run: u64) -> Result<Job> {
        let mut jobs = self.jobs(run)?;
        ensure!(jobs.len() == 1, "one job of run {run}: {jobs:#?}");
        jobs.pop().context("one job")
    }

    /// A job.
    ///
    /// # Errors
    /// When there is none of that id.
    pub fn job(&self, id: u64) -> Result<Job> {
        self.api.get(&self.actions(&format!("/jobs/{id}")))
    }

    /// Its tasks, newest first.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn tasks(&self) -> Result<Vec<TaskView>> {
        self.api.pages(&self.actions("/tasks"), "workflow_runs")
    }

    /// A job's log as the API has it, each line after the time at which it was written; empty while no line has come.
    ///
    /// # Errors
    /// When the server refuses for another reason.
    pub fn log(&self, job: u64) -> Result<String> {
        let path = self.actions(&format!("/jobs/{job}/logs"));
        let answer = self.api.ask("GET", &path, None)?;
        ensure!(answer.is_good() || answer.status == 404, "GET {path}: {} {}", answer.status, answer.body);
        Ok(if answer.is_good() { answer.body } else { String::new() })
    }

    /// Runs all jobs of a run again.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn rerun(&self, run: u64) -> Result<()> {
        self.post(&format!("/runs/{run}/rerun")).map(drop)
    }

    /// Runs the failed jobs of a run again.
    ///
    /// # Errors
    /// When none failed.
    pub fn rerun_failed(&self, run: u64) -> Result<()> {
        self.post(&format!("/runs/{run}/rerun-failed-jobs")).map(drop)
    }

    /// Runs one job again, and those that need it.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn rerun_job(&self, run: u64, job: u64) -> Result<()> {
        self.post(&format!("/runs/{run}/jobs/{job}/rerun")).map(drop)
    }

    /// Waits until a run is over.
    ///
    /// # Errors
    /// When it is not within the patience; its jobs and their logs are in the error.
    pub fn completed(&self, run: u64) -> Result<Run> {
        let seen = until("the run is over", || self.run(run), |run| run.status == Status::Completed);
        seen.with_context(|| self.describe(run))
    }

    /// Waits until a job is in a state.
    ///
    /// # Errors
    /// When it does not come there within the patience; its log is in the error.
    pub fn until_job(&self, job: u64, state: Status) -> Result<Job> {
        let seen = until(&format!("job {job} is {state:?}"), || self.job(job), |job| job.status == state);
        seen.with_context(|| format!("its log: {}", self.log(job).unwrap_or_default()))
    }

    /// Waits until a job's log holds a text.
    ///
    /// # Errors
    /// When it does not within the patience.
    pub fn until_log(&self, job: u64, text: &str) -> Result<String> {
        until(&format!("{text:?} in the log of job {job}"), || self.log(job), |log| log.contains(text))
    }

    fn describe(&self, run: u64) -> String {
        let jobs = self.jobs(run).unwrap_or_default();
        let logs = jobs.iter().map(|job| format!("{job:#?}\n{}", self.log(job.id).unwrap_or_default()));
        logs.collect::<Vec<_>>().join("\n")
    }

    fn post(&self, path: &str) -> Result<Answer> {
        self.api.send("POST", &self.actions(path), None)
    }

    fn path(&self, path: &str) -> String {
        format!("/repos/{}/{}{path}", self.owner, self.name)
    }

    fn actions(&self, path: &str) -> String {
        self.path(&format!("/actions{path}"))
    }
}
