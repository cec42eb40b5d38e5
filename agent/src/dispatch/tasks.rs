//! What runs beside the loop.

use std::{
    fs::File,
    future::Future,
    io,
    path::{Path, PathBuf},
    pin::pin,
};

use pilotlight_wire::{
    AssignmentId,
    agent::{EnrolRequest, EnrolResponse},
};
use tokio::{sync::mpsc, task::spawn_blocking, time::sleep};
use tracing::warn;

use crate::{
    job::{End, Progress},
    link::{self, Answer, Client},
    machine::Event,
};

/// Asks to be taken in until there is an answer, for ever: how long a boot may take is the scaler's business.
pub(super) async fn enrol(client: Client, request: EnrolRequest) -> Answer<EnrolResponse> {
    let mut backoff = link::backoff();
    loop {
        match client.enrol(&request).await {
            Answer::None(why) => {
                warn!(answer = %Answer::<()>::None(why), "not enrolled");
                sleep(backoff.next().unwrap_or(link::MAX_BACKOFF)).await;
            }
            answer => return answer,
        }
    }
}

/// Watches one job's task to its end.
///
/// # Errors
/// When the spool cannot be made durable.
pub(super) async fn job(
    id: AssignmentId,
    running: impl Future<Output = End>,
    mut told: mpsc::Receiver<Progress>,
    spool: PathBuf,
    events: mpsc::Sender<Event>,
) -> io::Result<()> {
    let mut running = pin!(running);
    let end = loop {
        tokio::select! {
            biased;
            Some(progress) = told.recv() => tell(&events, Event::Progress(id, progress)).await,
            end = &mut running => break end,
        }
    };
    while let Ok(progress) = told.try_recv() {
        tell(&events, Event::Progress(id, progress)).await;
    }
    // `finished` says how long the log is; after a power cut that must still be true.
    let log_bytes = spawn_blocking(move || durable_size(&spool)).await??;
    tell(&events, Event::Ended(id, end, log_bytes)).await;
    Ok(())
}

async fn tell(events: &mpsc::Sender<Event>, event: Event) {
    // The loop only goes away together with this task.
    let _loop_left = events.send(event).await;
}

fn durable_size(spool: &Path) -> io::Result<u64> {
    match File::open(spool) {
        Ok(file) => {
            file.sync_all()?;
            Ok(file.metadata()?.len())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(error),
    }
}
