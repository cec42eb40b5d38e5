//! A container that runs: until it ends by itself or is to be ended.

use std::time::Duration;

use pilotlight_runtime::{Report, failpoint};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::{Task, wished};
use crate::{
    container::{Exit, Found},
    job::{Wish, output::Output},
};

/// How long the attach process may take to the end of the stream after the container's exit.
const STREAM_END: Duration = Duration::from_secs(10);

/// How long Docker may be out of reach before the job counts as lost.
const DOCKER_GONE: Duration = Duration::from_secs(600);

/// Between two looks while Docker is out of reach.
const DOCKER_PAUSE: Duration = Duration::from_millis(500);

/// How a container that ran was left.
pub(super) enum Watched {
    /// It has ended.
    Exited {
        exit: Exit,
        /// Whether output may be missing.
        gap: bool,
        /// Whether it was to end.
        wish: Wish,
    },
    /// Nobody knows how it ended.
    Lost { reason: String, gap: bool, wish: Wish },
}

impl Task {
    /// Watches the container and its output, and ends it when that is wished.
    pub(super) async fn watch(&mut self, mut output: Output, mut gap: bool) -> Watched {
        let mut wish = Wish::Run;
        let mut kill_at: Option<Instant> = None;
        let mut docker_gone: Option<Instant> = None;
        let mut waited = false;
        loop {
            match self.context.engine.inspect(&self.name).await {
                Ok(Found::Running { .. }) => {
                    docker_gone = None;
                    // A wait that returns at once although the container runs must not become a busy loop.
                    if std::mem::take(&mut waited) {
                        sleep(DOCKER_PAUSE).await;
                    }
                }
                Ok(Found::Exited(exit)) => return self.exited(exit, &mut output, gap, wish).await,
                Ok(Found::Absent | Found::Created) => {
                    let reason = "its container was removed while it ran".to_owned();
                    return Watched::Lost { reason, gap, wish };
                }
                Err(error) => {
                    let since = *docker_gone.get_or_insert_with(Instant::now);
                    tracing::warn!(error = %Report(&error), "Docker does not answer; the job may go on");
                    if since.elapsed() >= DOCKER_GONE {
                        let reason = format!("Docker did not answer for {} s", DOCKER_GONE.as_secs());
                        return Watched::Lost { reason, gap, wish };
                    }
                    sleep(DOCKER_PAUSE).await;
                }
            }
            if output.is_over() && docker_gone.is_none() && !self.attacher.saw_end() {
                gap |= self.attach_again(&mut output).await;
            }
            tokio::select! {
                () = self.context.engine.wait(&self.name) => waited = true,
                () = output.ended(), if !output.is_over() => {}
                wished = wished(&mut self.channels.wish, wish) => {
                    wish = wished;
                    kill_at = Some(self.begin_end(wish).await);
                }
                () = until(kill_at) => {
                    self.cgroup.kill().await;
                    // A container whose processes are gone and that Docker still shows gets another try.
                    kill_at = Some(Instant::now() + STREAM_END);
                }
            }
        }
    }

    /// Asks the job to end, and says when it is to be killed.
    async fn begin_end(&self, wish: Wish) -> Instant {
        if wish == Wish::Terminate {
            return Instant::now();
        }
        if let Err(error) = self.context.engine.signal(&self.name, "SIGTERM").await {
            tracing::warn!(error = %Report(&error), "SIGTERM not sent");
            return Instant::now();
        }
        Instant::now() + Duration::from_secs(self.start.stop_grace_seconds)
    }

    /// Attaches again after the reader of a running container has died. Returns whether output may be missing.
    async fn attach_again(&self, output: &mut Output) -> bool {
        match self.attacher.start(&self.start, true).await {
            Ok(started) => *output = started,
            Err(error) => {
                // The container may have ended in this moment; the next look tells.
                tracing::warn!(error = %Report(&error), "not attached again");
                sleep(DOCKER_PAUSE).await;
            }
        }
        true
    }

    /// Takes in the last output of a container that has ended. A reader that died before the end of the stream leaves a
    /// gap, even when nothing is left to attach to.
    pub(super) async fn exited(&self, exit: Exit, output: &mut Output, gap: bool, wish: Wish) -> Watched {
        failpoint!("agent.container.exited");
        self.end_of_stream(output).await;
        failpoint!("agent.output.ended");
        let cut = !self.attacher.saw_end();
        if cut {
            self.attacher.mark_gap();
        }
        Watched::Exited { exit, gap: gap || cut, wish }
    }

    /// Waits for the last of the output. A stream that somebody else holds open is left after a while.
    async fn end_of_stream(&self, output: &mut Output) {
        if timeout(STREAM_END, output.ended()).await.is_err() {
            tracing::warn!(container = self.name, "the output did not end with the container");
            self.attacher.end().await;
            output.ended().await;
        }
    }
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}
