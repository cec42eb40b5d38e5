//! Sending a job's log: the spool from where the scaler's log ends, until the scaler has all of it (link 6).

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    time::Duration,
};

use bytes::Bytes;
use pilotlight_runtime::failpoint;
use pilotlight_wire::{AssignmentId, agent::MAX_LOG_CHUNK};
use tokio::{
    sync::{mpsc, watch},
    time::sleep,
};
use tracing::{error, warn};

use crate::{
    link::{self, Answer, Session},
    machine::{Event, LogEnd},
};

/// How soon the spool is looked at again: after a tenth of the time for which it has been quiet, within these bounds.
const ACTIVE: Duration = Duration::from_millis(20);
const QUIET: Duration = Duration::from_millis(250);

/// One assignment's log on its way. At most one chunk is in memory.
#[derive(Debug)]
pub(crate) struct Upload {
    pub(crate) id: AssignmentId,
    pub(crate) spool: PathBuf,
    pub(crate) end: watch::Receiver<LogEnd>,
}

impl Upload {
    /// Sends until the scaler has said, after the last event was acknowledged, that it has all; then tells the
    /// dispatcher. A chunk is sent where the scaler's log is believed to end; a 409 says where it really does, further
    /// on (this agent was restarted) or back (the scaler lost what it had not fsynced).
    ///
    /// # Errors
    /// When the spool cannot be read; the agent must not go on then.
    pub(crate) async fn run(mut self, session: Session, events: mpsc::Sender<Event>) -> io::Result<()> {
        let (mut size, mut quiet, mut backoff) = (0, Duration::ZERO, link::backoff());
        loop {
            let end = *self.end.borrow_and_update();
            let wanted = match end {
                LogEnd::Open => MAX_LOG_CHUNK,
                LogEnd::At(bytes) | LogEnd::Confirm(bytes) => {
                    usize::try_from(bytes.saturating_sub(size)).unwrap_or(usize::MAX).min(MAX_LOG_CHUNK)
                }
            };
            let chunk = if wanted == 0 { Bytes::new() } else { self.chunk(size, wanted).await? };
            let nothing = chunk.is_empty();
            match end {
                LogEnd::Confirm(0) => return self.complete(events).await,
                LogEnd::At(bytes) | LogEnd::Confirm(bytes) if nothing && wanted > 0 => {
                    let what = format!("{} ends before byte {bytes}", self.spool.display());
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, what));
                }
                LogEnd::Open | LogEnd::At(_) if nothing => {
                    let pause = (quiet / 10).clamp(ACTIVE, QUIET);
                    // Woken by the end of the log, once that is known, and by the end of the assignment.
                    tokio::select! {
                        changed = self.end.changed() => if changed.is_err() { return Ok(()) },
                        () = sleep(pause), if end == LogEnd::Open => quiet += pause,
                    }
                    continue;
                }
                LogEnd::Open | LogEnd::At(_) | LogEnd::Confirm(_) => {}
            }
            match session.log(self.id, size, chunk).await {
                Answer::Ok(now) | Answer::Expected(now) => {
                    failpoint!("agent.log.taken", now > size);
                    if now < size {
                        warn!(assignment = %self.id, size, now, "the scaler lost log bytes; sending them again");
                    }
                    if now == size && !nothing {
                        // It neither took the chunk nor wants another one.
                        sleep(backoff.next().unwrap_or(link::MAX_BACKOFF)).await;
                        continue;
                    }
                    (size, quiet, backoff) = (now, Duration::ZERO, link::backoff());
                    if let LogEnd::Confirm(bytes) = end
                        && now >= bytes
                    {
                        if now > bytes {
                            error!(assignment = %self.id, now, bytes, "the scaler's log is longer than the spool");
                        }
                        return self.complete(events).await;
                    }
                }
                Answer::Gone => {
                    let _dispatcher_left = events.send(Event::Gone).await;
                    return Ok(());
                }
                other @ (Answer::Refused(_) | Answer::None(_)) => {
                    warn!(assignment = %self.id, offset = size, answer = %other, "log not taken");
                    sleep(backoff.next().unwrap_or(link::MAX_BACKOFF)).await;
                }
            }
        }
    }

    async fn complete(&self, events: mpsc::Sender<Event>) -> io::Result<()> {
        failpoint!("agent.log.complete");
        let _dispatcher_left = events.send(Event::LogComplete(self.id)).await;
        Ok(())
    }

    async fn chunk(&self, offset: u64, limit: usize) -> io::Result<Bytes> {
        let path = self.spool.clone();
        tokio::task::spawn_blocking(move || read_at(&path, offset, limit)).await?
    }
}

/// Up to `limit` bytes from `offset` on. A spool that is not there is empty: the job has not begun.
fn read_at(path: &Path, offset: u64, limit: usize) -> io::Result<Bytes> {
    let mut file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Bytes::new()),
        file => file?,
    };
    let there = usize::try_from(file.metadata()?.len().saturating_sub(offset)).unwrap_or(usize::MAX).min(limit);
    if there == 0 {
        return Ok(Bytes::new());
    }
    file.seek(SeekFrom::Start(offset))?;
    let mut bytes = vec![0; there];
    file.read_exact(&mut bytes)?;
    Ok(bytes.into())
}
