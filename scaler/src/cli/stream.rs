//! A job's log to its reader, through every restart of the scaler: the offset asked for is the count of bytes that
//! the reader has taken, so none is lost and none comes twice (link 6).

use std::{io, time::Duration};

use pilotlight_wire::JobId;
use tokio::{
    io::{AsyncWrite, AsyncWriteExt},
    time::{Instant, sleep},
};

use super::{
    client::{CallError, Client},
    exit::{Failure, UNREACHABLE},
};

/// How long after acceptance a job is followed without any answer (link 6).
pub(crate) const PATIENCE: Duration = Duration::from_secs(600);
/// The least time between two calls that brought nothing new.
pub(crate) const PACE: Duration = Duration::from_millis(300);
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// Tells a line to a person.
pub(crate) type Notes<'a> = &'a (dyn Fn(&str) + Sync);

/// Waits between calls without an answer, and for how long in all.
#[derive(Debug)]
pub(crate) struct Patience {
    limit: Duration,
    failing: Option<(Instant, Duration)>,
}

impl Patience {
    pub(crate) fn new(limit: Duration) -> Self {
        Self { limit, failing: None }
    }

    /// There was an answer. Says whether it had been missed.
    pub(crate) fn answered(&mut self) -> bool {
        self.failing.take().is_some()
    }

    /// There was none. Waits before the next try; the first of a row says `true`.
    pub(crate) async fn missed(&mut self, error: CallError) -> Result<bool, Failure> {
        let now = Instant::now();
        let (since, wait) = self.failing.unwrap_or((now, FIRST_WAIT));
        if now.duration_since(since) >= self.limit {
            return Err(error.into());
        }
        let first = self.failing.is_none();
        self.failing = Some((since, (wait * 2).min(LONGEST_WAIT)));
        sleep(wait).await;
        Ok(first)
    }
}

/// How the copying of a log ended.
#[derive(Debug)]
pub(crate) enum StreamEnd {
    /// All of it was written.
    Complete,
    /// The reader takes no more.
    ReaderGone(io::Error),
}

/// Whose log, and how it is copied.
#[derive(Clone, Copy)]
pub(crate) struct Tail<'a> {
    pub(crate) client: &'a Client,
    pub(crate) id: JobId,
    /// To its closing, or only what is there now.
    pub(crate) follow: bool,
    /// Whether a scaler that refuses may think otherwise later: an accepted job is only refused by one in trouble.
    pub(crate) accepted: bool,
    pub(crate) notes: Notes<'a>,
}

impl Tail<'_> {
    /// Copies the log to `reader`.
    pub(crate) async fn copy(self, reader: &mut (impl AsyncWrite + Unpin)) -> Result<StreamEnd, Failure> {
        let mut patience = Patience::new(PATIENCE);
        let mut offset = 0;
        let mut ever_answered = self.accepted;
        loop {
            let asked = Instant::now();
            let before = offset;
            match self.once(&mut offset, reader).await {
                Ok(Turn::ReaderGone(error)) => return Ok(StreamEnd::ReaderGone(error)),
                Ok(Turn::Answered { complete }) => {
                    ever_answered = true;
                    if patience.answered() {
                        (self.notes)("the scaler answers again");
                    }
                    if complete {
                        return Ok(StreamEnd::Complete);
                    }
                    if offset == before && asked.elapsed() < PACE {
                        sleep(PACE).await;
                    }
                }
                Err(error) => {
                    let passing = self.accepted || matches!(error, CallError::NoAnswer { .. });
                    if !(ever_answered && passing) {
                        return Err(error.into());
                    }
                    if offset != before {
                        // Something came before it broke off, so the scaler was there just now.
                        patience.answered();
                    }
                    let text = error.to_string();
                    if patience.missed(error).await? {
                        (self.notes)(&format!("{text}; trying again for 10 minutes, the job goes on"));
                    }
                }
            }
        }
    }

    async fn once(&self, offset: &mut u64, reader: &mut (impl AsyncWrite + Unpin)) -> Result<Turn, CallError> {
        let mut answer = self.client.log(self.id, *offset, self.follow).await?;
        while let Some(chunk) = answer.chunk().await? {
            let written = async {
                reader.write_all(&chunk).await?;
                reader.flush().await
            };
            if let Err(error) = written.await {
                return Ok(Turn::ReaderGone(error));
            }
            *offset += u64::try_from(chunk.len()).unwrap_or(0);
        }
        let all = *offset >= answer.size;
        Ok(Turn::Answered { complete: all && (answer.closed || !self.follow) })
    }
}

enum Turn {
    Answered { complete: bool },
    ReaderGone(io::Error),
}

/// The failure of a follower that gave up on a job that goes on.
pub(crate) fn gave_up(id: JobId, failure: Failure) -> Failure {
    if failure.code != UNREACHABLE {
        return failure;
    }
    let message = format!(
        "{}\nthe job goes on; find it again with `pilotlight logs --follow {id}` and `pilotlight jobs --all`",
        { failure.message }
    );
    Failure::new(failure.code, message)
}
