//! Ending what a runner leaves behind: its task, if it had one that nobody runs any more, and its registration.

use pilotlight_wire::{RunnerGrant, Task};
use reqwest::Method;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    ForgeError, Gitea, Leftover,
    api::{Job, Repository},
};

impl Gitea {
    /// Makes sure that a runner's registration is gone, and that no job hangs on it.
    ///
    /// # Errors
    /// When that is not sure yet; it is to be tried again.
    pub async fn end(&self, left: Leftover) -> Result<(), ForgeError> {
        let actions = self.actions_of(left.repository.as_deref());
        let name = self.runner_name(left.job);
        let ids: Vec<i64> = match &left.grant {
            // A used one is removed by the server at the end of its job.
            Some(grant) => self.api.has_runner(&actions, grant.id).await?.then_some(grant.id).into_iter().collect(),
            None => {
                let runners = self.api.runners(&actions).await?;
                runners.into_iter().filter(|runner| runner.name == name).map(|runner| runner.id).collect()
            }
        };
        for id in ids {
            // First no more jobs, then a look at what it has: `busy` lies, and to remove one at work would leave its job
            // hanging (spec gitea 3, 8).
            self.api.disable_runner(&actions, id).await?;
            let running = self.api.jobs(&actions, "in_progress").await?;
            match running.iter().find(|job| job.runner_id == Some(id)) {
                None => self.api.delete_runner(&actions, id).await?,
                Some(job) => self.end_job(&actions, id, job, &left).await?,
            }
        }
        if left.rerun {
            self.rerun(&left).await?;
        }
        Ok(())
    }

    /// Ends a running job of a runner that is no more.
    async fn end_job(&self, actions: &str, id: i64, job: &Job, left: &Leftover) -> Result<(), ForgeError> {
        let Some(grant) = &left.grant else {
            // Its credentials went with a database. The server ends the job itself, once it was silent for long
            // (ZOMBIE_TASK_TIMEOUT).
            tracing::warn!(forge = %self.config.name, job = job.id, "a job hangs until the server ends it");
            return self.api.delete_runner(actions, id).await;
        };
        let tasks: Vec<(i64, u32)> = match &left.task {
            Some(Task { id, steps, .. }) => vec![(*id, *steps)],
            // Its agent never said which: of the tasks that run there the server takes the end of its own only.
            None => self.tasks_like(job).await?.into_iter().map(|task| (task, 0)).collect(),
        };
        let mut last = None;
        for (task, steps) in tasks {
            match self.end_task(grant, task, steps, left).await {
                Ok(()) => return Ok(()),
                Err(error) if error.is_unregistered() => return Ok(()),
                Err(error) => last = Some(error),
            }
        }
        last.map_or(Ok(()), Err)
    }

    /// The reason goes into the job's log, then the job ends (spec gitea 5.4). The order matters: a log that comes after
    /// the end is lost.
    async fn end_task(&self, grant: &RunnerGrant, task: i64, steps: u32, left: &Leftover) -> Result<(), ForgeError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Ack {
            #[serde(default)]
            ack_index: Value,
        }
        let identity = Some((grant.uuid.as_str(), &grant.token));
        let id = task.to_string();
        let held: Ack = self.api.runner_call("UpdateLog", &json!({"taskId": id}), identity).await?;
        let index = held.ack_index.as_str().map_or_else(|| held.ack_index.to_string(), ToOwned::to_owned);
        let index = index.parse::<i64>().unwrap_or(0).to_string();
        let now = left.ended_at.max(left.began_at);
        let row = json!({"time": now, "content": format!("Pilotlight: {}", left.reason)});
        let log = json!({"taskId": id, "index": index, "rows": [row], "noMore": true});
        let _ack: Value = self.api.runner_call("UpdateLog", &log, identity).await?;
        let result = if left.cancelled { "RESULT_CANCELLED" } else { "RESULT_FAILURE" };
        let steps: Vec<Value> = (0..steps)
            .map(|step| json!({"id": step.to_string(), "result": result, "startedAt": left.began_at, "stoppedAt": now}))
            .collect();
        let state = json!({"id": id, "result": result, "startedAt": left.began_at, "stoppedAt": now, "steps": steps});
        let _state: Value = self.api.runner_call("UpdateTask", &json!({"state": state}), identity).await?;
        tracing::info!(forge = %self.config.name, task, reason = left.reason, "ended a task that nobody ran any more");
        Ok(())
    }

    /// Running tasks of a job's name.
    async fn tasks_like(&self, job: &Job) -> Result<Vec<i64>, ForgeError> {
        #[derive(Deserialize)]
        struct Listed {
            id: i64,
            #[serde(default)]
            name: String,
            #[serde(default)]
            status: String,
        }
        #[derive(Deserialize)]
        struct Page {
            #[serde(default)]
            workflow_runs: Option<Vec<Listed>>,
        }
        let Some(repository) = job.repository() else { return Ok(Vec::new()) };
        let page: Page = self.api.call(Method::GET, &format!("{}/tasks?limit=50", repository.actions()), None).await?;
        let tasks = page.workflow_runs.unwrap_or_default().into_iter();
        let like =
            tasks.filter(|task| task.name == job.name && matches!(task.status.as_str(), "running" | "in_progress"));
        Ok(like.map(|task| task.id).collect())
    }

    /// Runs a job again whose machine was lost. A job that has another attempt by now is left alone.
    async fn rerun(&self, left: &Leftover) -> Result<(), ForgeError> {
        let Some(repository) = Repository::parse(&left.of.repository) else { return Ok(()) };
        #[derive(Deserialize)]
        struct Run {
            #[serde(default)]
            run_attempt: u32,
        }
        let actions = repository.actions();
        let run: Run = self.api.call(Method::GET, &format!("{actions}/runs/{}", left.of.run), None).await?;
        if run.run_attempt > left.of.attempt || left.of.id == 0 {
            return Ok(());
        }
        let path = format!("{actions}/runs/{}/jobs/{}/rerun", left.of.run, left.of.id);
        let _made: Value = self.api.call(Method::POST, &path, None).await?;
        tracing::info!(forge = %self.config.name, job = left.of.id, "running a job again whose machine was lost");
        Ok(())
    }
}
