//! `submit`: one job from its acceptance to its end (link 6, design 7).
//!
//! ```text
//! PUT until answered (30 s) ── refused ──> 65
//!   │ accepted
//!   ├─ the log, to stdout until closed ─┐
//!   ├─ progress, to stderr              ├─ the finished job: tables, result file, its exit code
//!   └─ first signal: cancel, until told ┘
//! second signal, at any time: leave
//! ```

use std::{convert::Infallible, future::pending, path::Path, time::Duration};

use pilotlight_runtime::durable;
use pilotlight_wire::{
    JobId, Usage, Verdict,
    api::{JobState, JobView, SubmitJob},
};
use reqwest::Method;
use serde::Serialize;
use tokio::{
    io::AsyncWrite,
    sync::watch,
    time::{Instant, sleep, timeout_at},
};

use super::{
    client::{CallError, Client},
    exit::{BAD_INPUT, CANCELLED, Failure, USAGE},
    stream::{Notes, PACE, PATIENCE, Patience, StreamEnd, Tail, gave_up},
    views,
};

/// How long acceptance is waited for (link 6).
const ACCEPTANCE: Duration = Duration::from_secs(30);

/// What `--result-file` holds, for callers that must tell the job's 75 from ours.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct ResultFile {
    /// Absent when we failed and do not know how the job ended.
    pub(crate) verdict: Option<Verdict>,
    pub(crate) exit_code: Option<i32>,
    pub(crate) reason: Option<String>,
    pub(crate) job: JobId,
    pub(crate) log_gap: bool,
    pub(crate) usage: Option<Usage>,
}

impl ResultFile {
    pub(crate) fn of(id: JobId, end: &Result<JobView, Failure>) -> Self {
        match end {
            Ok(job) => Self {
                verdict: job.verdict,
                exit_code: job.exit_code,
                reason: job.reason.clone(),
                job: id,
                log_gap: job.log_gap,
                usage: job.usage.clone(),
            },
            Err(failure) => Self {
                verdict: None,
                exit_code: None,
                reason: Some(failure.message.clone()),
                job: id,
                log_gap: false,
                usage: None,
            },
        }
    }

    /// Writes it whole or not at all.
    pub(crate) fn write(&self, path: &Path) -> Result<(), Failure> {
        let bad = |error: &dyn std::fmt::Display| {
            Failure::new(BAD_INPUT, format!("cannot write --result-file {}: {error}", path.display()))
        };
        let text = serde_json::to_vec(self).map_err(|error| bad(&error))?;
        durable::write(path, &text).map_err(|error| bad(&error))
    }
}

/// Makes sure that what is found at the path afterwards is ours, and that it can be written.
pub(crate) fn clear_result_file(path: &Path) -> Result<(), Failure> {
    if path.symlink_metadata().is_ok_and(|found| !found.is_file()) {
        return Err(Failure::new(USAGE, format!("--result-file {} is not a regular file", path.display())));
    }
    durable::remove(path)
        .map_err(|error| Failure::new(BAD_INPUT, format!("cannot write --result-file {}: {error}", path.display())))
}

/// One job to submit.
pub(crate) struct Submission<'a> {
    pub(crate) client: &'a Client,
    pub(crate) id: JobId,
    pub(crate) body: SubmitJob,
    /// How many signals have come.
    pub(crate) signals: watch::Receiver<u32>,
    pub(crate) notes: Notes<'a>,
}

impl Submission<'_> {
    /// Hands the job over; it is then the scaler's.
    pub(crate) async fn accept(&self) -> Result<JobView, Failure> {
        let second = self.second_signal();
        tokio::select! {
            accepted = self.put() => accepted,
            failure = second => Err(failure),
        }
    }

    /// Streams an accepted job's log to `stdout` and waits for its end.
    pub(crate) async fn follow(&self, stdout: &mut (impl AsyncWrite + Unpin)) -> Result<JobView, Failure> {
        let log = async {
            let tail = Tail { client: self.client, id: self.id, follow: true, accepted: true, notes: self.notes };
            if let StreamEnd::ReaderGone(error) = tail.copy(stdout).await? {
                let id = self.id;
                (self.notes)(&format!("stdout: {error}; the job goes on, its log is at `pilotlight logs {id}`"));
            }
            self.finished().await
        };
        let end = tokio::select! {
            end = log => end,
            never = self.progress() => match never {},
            never = self.cancel_when_asked() => match never {},
            failure = self.second_signal() => Err(failure),
        };
        end.map_err(|failure| gave_up(self.id, failure))
    }

    async fn put(&self) -> Result<JobView, Failure> {
        let deadline = Instant::now() + ACCEPTANCE;
        let mut patience = Patience::new(ACCEPTANCE);
        let path = format!("jobs/{}", self.id);
        let mut signals = self.signals.clone();
        loop {
            let error = match timeout_at(deadline, self.client.send(Method::PUT, &path, &self.body)).await {
                Ok(Ok(job)) => return Ok(job),
                Ok(Err(error @ CallError::NoAnswer { .. })) => error,
                Ok(Err(error)) => return Err(error.into()),
                Err(_) => CallError::NoAnswer { url: self.client.url().to_owned(), why: "it took too long".to_owned() },
            };
            let text = error.to_string();
            let waited = tokio::select! {
                waited = timeout_at(deadline, patience.missed(error.clone())) => waited,
                _ = signals.wait_for(|count| *count > 0) => return self.withdraw(deadline).await,
            };
            match waited {
                Ok(Ok(true)) => (self.notes)(&format!("{text}; trying for 30 seconds")),
                Ok(Ok(false)) => {}
                Ok(Err(_)) | Err(_) => return Err(self.never_answered(error)),
            }
        }
    }

    /// Cancels a job of which nobody knows whether the scaler has it.
    async fn withdraw(&self, deadline: Instant) -> Result<JobView, Failure> {
        (self.notes)("cancelling");
        let mut patience = Patience::new(ACCEPTANCE);
        loop {
            let error = match timeout_at(deadline, self.cancel()).await {
                Ok(Ok(job)) => return Ok(job),
                Ok(Err(CallError::Refused { .. })) => {
                    return Err(Failure::new(CANCELLED, "cancelled before the scaler had the job"));
                }
                Ok(Err(error)) => error,
                Err(_) => CallError::NoAnswer { url: self.client.url().to_owned(), why: "it took too long".to_owned() },
            };
            match timeout_at(deadline, patience.missed(error.clone())).await {
                Ok(Ok(_)) => {}
                Ok(Err(_)) | Err(_) => return Err(self.never_answered(error)),
            }
        }
    }

    fn never_answered(&self, error: CallError) -> Failure {
        let failure = Failure::from(error);
        let id = self.id;
        let message = format!(
            "{}\nwhether the job was accepted is not known; ask later with `pilotlight logs --follow {id}`, or end it \
             with `pilotlight cancel {id}`",
            failure.message
        );
        Failure::new(failure.code, message)
    }

    async fn cancel(&self) -> Result<JobView, CallError> {
        self.client.post(&format!("jobs/{}/cancel", self.id)).await
    }

    async fn job(&self) -> Result<JobView, CallError> {
        self.client.get(&format!("jobs/{}", self.id)).await
    }

    /// Waits for the job's end after its log has ended.
    async fn finished(&self) -> Result<JobView, Failure> {
        let mut patience = Patience::new(PATIENCE);
        loop {
            match self.job().await {
                Ok(job) if job.state == JobState::Finished => return Ok(job),
                Ok(_) => {
                    patience.answered();
                    sleep(PACE).await;
                }
                Err(error) => {
                    patience.missed(error).await?;
                }
            }
        }
    }

    /// Tells what happens until the job runs. A scaler that gives no answer is the log's business.
    async fn progress(&self) -> Infallible {
        let mut told = String::new();
        loop {
            if let Ok(job) = self.job().await {
                let line = views::progress(&job);
                if !line.is_empty() && line != told {
                    (self.notes)(&line);
                    told = line;
                }
                if matches!(job.state, JobState::Running | JobState::Finished) {
                    return pending().await;
                }
            }
            sleep(PACE).await;
        }
    }

    async fn cancel_when_asked(&self) -> Infallible {
        let mut signals = self.signals.clone();
        if signals.wait_for(|count| *count > 0).await.is_err() {
            return pending().await;
        }
        (self.notes)("cancelling the job; a second signal leaves at once");
        let mut patience = Patience::new(PATIENCE);
        while let Err(error) = self.cancel().await {
            if patience.missed(error).await.is_err() {
                break;
            }
        }
        pending().await
    }

    async fn second_signal(&self) -> Failure {
        let mut signals = self.signals.clone();
        if signals.wait_for(|count| *count > 1).await.is_err() {
            return pending().await;
        }
        let id = self.id;
        Failure::new(
            CANCELLED,
            format!("left at the second signal; make sure of the job with `pilotlight cancel {id}`"),
        )
    }
}
