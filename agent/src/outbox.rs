//! The outbox: what happened to an assignment, on disk before it is said, said until it is acknowledged (link 3).
//!
//! ```text
//! events/1.json  events/2.json  …   every event of the assignment; they go with the assignment
//!        acked                      how many the scaler has acknowledged
//! ```
//!
//! Acknowledged events stay until the assignment goes. There are two or three of them; they tell a restarted agent
//! what was already said, and a scaler that went back to an older database can be told again.

use std::{fs, io, path::PathBuf, time::Duration};

use pilotlight_runtime::{durable, failpoint};
#[cfg(feature = "failpoints")]
use pilotlight_wire::agent::AssignmentEventKind;
use pilotlight_wire::{AssignmentId, agent::AssignmentEvent};
use tokio::sync::{mpsc, watch};
use tracing::{error, warn};

use crate::{
    assignment::unreadable,
    disk::blocking,
    job::AssignmentDir,
    link::{self, Answer, Session},
    machine::Event,
};

/// Puts an event on disk. The same number again replaces nothing that was sent: the caller numbers.
///
/// # Errors
/// When it cannot be written.
pub(crate) fn append(dir: &AssignmentDir, event: &AssignmentEvent) -> io::Result<()> {
    failpoint!("agent.started.unfiled", matches!(event.event, AssignmentEventKind::Started { .. }));
    failpoint!("agent.finished.unfiled", matches!(event.event, AssignmentEventKind::Finished(_)));
    durable::write(&event_file(dir, event.n), &serde_json::to_vec(event)?)?;
    failpoint!("agent.started.filed", matches!(event.event, AssignmentEventKind::Started { .. }));
    failpoint!("agent.finished.filed", matches!(event.event, AssignmentEventKind::Finished(_)));
    Ok(())
}

/// Reads all events, by number from 1, and how many of them are acknowledged.
///
/// # Errors
/// When one cannot be read or understood, or a number is missing.
pub(crate) fn load(dir: &AssignmentDir) -> io::Result<(Vec<AssignmentEvent>, u64)> {
    let mut events = Vec::new();
    for n in 1.. {
        match fs::read(event_file(dir, n)) {
            Ok(bytes) => {
                events.push(serde_json::from_slice(&bytes).map_err(|error| unreadable(&event_file(dir, n), &error))?);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => break,
            Err(error) => return Err(error),
        }
    }
    let acked = match fs::read_to_string(acked_file(dir)) {
        Ok(text) => text.trim().parse().map_err(|error| unreadable(&acked_file(dir), &error))?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
        Err(error) => return Err(error),
    };
    Ok((events, acked))
}

/// One assignment's outbox, as its delivery task has it.
#[derive(Debug)]
pub(crate) struct Outbox {
    pub(crate) id: AssignmentId,
    pub(crate) agent_dir: PathBuf,
    pub(crate) dir: AssignmentDir,
    /// The number of the last event on disk.
    pub(crate) last: watch::Receiver<u64>,
    pub(crate) acked: u64,
    /// The boot clock: the lease counts from sending.
    pub(crate) boottime: fn() -> Duration,
}

impl Outbox {
    /// Sends events in order, for as long as the assignment exists. Tells the dispatcher of every acknowledgement.
    ///
    /// # Errors
    /// When the disk fails; the agent must not go on then.
    pub(crate) async fn deliver(mut self, session: Session, events: mpsc::Sender<Event>) -> io::Result<()> {
        let mut backoff = link::backoff();
        loop {
            let last = *self.last.borrow_and_update();
            if self.acked >= last {
                if self.last.changed().await.is_err() {
                    return Ok(());
                }
                continue;
            }
            let event = self.read(self.acked + 1).await?;
            let sent = (self.boottime)();
            match session.event(self.id, &event).await {
                // The scaler's word on what it expects is the whole truth, whether it took the event or not.
                Answer::Ok(expected) | Answer::Expected(expected) if expected != event.n => {
                    failpoint!(
                        "agent.started.acknowledged",
                        matches!(event.event, AssignmentEventKind::Started { .. })
                    );
                    failpoint!("agent.finished.acknowledged", matches!(event.event, AssignmentEventKind::Finished(_)));
                    self.resume(expected, last).await?;
                    failpoint!("agent.finished.ack-filed", matches!(event.event, AssignmentEventKind::Finished(_)));
                    if self.acked < event.n {
                        tokio::time::sleep(backoff.next().unwrap_or(link::MAX_BACKOFF)).await;
                        continue;
                    }
                    backoff = link::backoff();
                    if events.send(Event::Acked(self.id, self.acked, sent)).await.is_err() {
                        return Ok(());
                    }
                }
                Answer::Gone => {
                    let _dispatcher_left = events.send(Event::Gone).await;
                    return Ok(());
                }
                other => {
                    warn!(assignment = %self.id, event = event.n, answer = %other, "event not acknowledged");
                    // A new event is no reason to hurry: it waits behind this one.
                    tokio::time::sleep(backoff.next().unwrap_or(link::MAX_BACKOFF)).await;
                }
            }
        }
    }

    async fn read(&self, n: u64) -> io::Result<AssignmentEvent> {
        let path = event_file(&self.dir, n);
        let bytes = tokio::fs::read(&path).await?;
        serde_json::from_slice(&bytes).map_err(|error| unreadable(&path, &error))
    }

    /// Goes on at the event that the scaler expects.
    async fn resume(&mut self, expected: u64, last: u64) -> io::Result<()> {
        let acked = expected.saturating_sub(1);
        if acked > last {
            error!(assignment = %self.id, acked, last, "the scaler has events that this agent never had");
        } else if acked < self.acked {
            error!(assignment = %self.id, acked, before = self.acked, "the scaler lost events; saying them again");
        }
        self.acked = acked.min(last);
        let (path, text) = (acked_file(&self.dir), self.acked.to_string());
        blocking(&self.agent_dir, move || durable::write(&path, text.as_bytes())).await
    }
}

fn event_file(dir: &AssignmentDir, n: u64) -> PathBuf {
    dir.events().join(format!("{n}.json"))
}

fn acked_file(dir: &AssignmentDir) -> PathBuf {
    dir.events().join("acked")
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use pilotlight_wire::agent::AssignmentEventKind;

    use super::*;

    #[test]
    fn events_come_back_in_order_and_what_is_half_written_does_not() {
        let root = tempfile::tempdir().unwrap();
        let dir = AssignmentDir::new(root.path(), "018f0000-0000-7000-8000-000000000001".parse().unwrap());
        fs::create_dir_all(dir.events()).unwrap();
        assert_eq!(load(&dir).unwrap(), (vec![], 0));
        let events: Vec<_> = (1..=11)
            .map(|n| AssignmentEvent {
                n,
                at: Timestamp::UNIX_EPOCH,
                event: AssignmentEventKind::Refused { reason: n.to_string() },
            })
            .collect();
        for event in &events {
            append(&dir, event).unwrap();
        }
        fs::write(dir.events().join("12.new"), "{").unwrap();
        fs::write(dir.events().join("acked"), "10\n").unwrap();
        assert_eq!(load(&dir).unwrap(), (events, 10));
        fs::write(dir.events().join("acked"), "").unwrap();
        assert_eq!(load(&dir).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
