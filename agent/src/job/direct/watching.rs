//! A container that runs: until it ends by itself or is to be ended.

use std::{pin::Pin, time::Duration};

use pilotlight_runtime::{Report, failpoint};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::{
    Task,
    sight::{Sight, own_code},
    wished,
};
use crate::{
    container::{Engine, EngineError, Exit, Found},
    job::{Wish, output::Output},
};

/// How long the attach process may take to the end of the stream after the container's exit.
const STREAM_END: Duration = Duration::from_secs(10);

/// How long Docker may be out of reach before a job that was not started is refused, and before one that was counts as
/// lost.
const DOCKER_AWAY: Duration = Duration::from_secs(60);
const DOCKER_GONE: Duration = Duration::from_secs(600);

/// An answer that took longer may be another dockerd's than the one that saw the container's end.
const PROMPT: Duration = Duration::from_millis(100);

/// Between two looks while Docker is out of reach.
const DOCKER_PAUSE: Duration = Duration::from_millis(500);

/// How a container that ran was left.
pub(super) enum Watched {
    /// It has ended.
    Exited {
        exit: Exit,
        /// The job's own code, or why nobody knows it.
        code: Result<Option<i32>, String>,
        /// Whether output may be missing.
        gap: bool,
        /// Whether it was to end.
        wish: Wish,
    },
    /// Nobody knows how it ended.
    Lost { reason: String, gap: bool, wish: Wish },
}

impl Task {
    /// Inspects, and gives a Docker that is being restarted time to come back. A job that has been started is worth
    /// waiting for; another machine may take one that has not.
    pub(super) async fn look(&self) -> Result<Found, EngineError> {
        let patience = if self.dir.started().exists() { DOCKER_GONE } else { DOCKER_AWAY };
        let since = Instant::now();
        loop {
            match self.context.engine.inspect(&self.name).await {
                Err(error) if since.elapsed() < patience => {
                    tracing::warn!(error = %Report(&error), "Docker does not answer");
                    sleep(DOCKER_PAUSE).await;
                }
                result => return result,
            }
        }
    }

    /// Watches the container and its output, and ends it when that is wished.
    pub(super) async fn watch(&mut self, mut output: Output, mut gap: bool) -> Watched {
        let mut wish = Wish::Run;
        let mut kill_at: Option<Instant> = None;
        let mut docker_gone: Option<Instant> = None;
        let mut away = None;
        // What came of the wait that ended last: a code, or nothing when it was cut off.
        let mut waited: Option<Option<i32>> = None;
        // One wait lives on while other things happen: a dockerd that stops answers it and nothing else any more.
        let (engine, name) = (self.context.engine.clone(), self.name.clone());
        let mut wait = Wait::new(&engine, &name);
        loop {
            let asked = Instant::now();
            match self.context.engine.inspect(&self.name).await {
                Ok(Found::Running { .. }) => {
                    (docker_gone, away) = (None, None);
                    wait.saw(true);
                    // A wait that returns at once although the container runs must not become a busy loop.
                    if waited.take().is_some() {
                        sleep(DOCKER_PAUSE).await;
                    }
                }
                Ok(Found::Exited(exit)) => {
                    // Where systemd holds Docker's socket a call outlives a restart: it is answered late, by the next.
                    let late = asked.elapsed() > PROMPT;
                    if late {
                        away = Some(self.context.clock.now());
                    }
                    let broken = away.is_some() || waited == Some(None);
                    let waited = waited.flatten();
                    let sight = if broken { Sight::Broken { waited, away } } else { Sight::Whole };
                    return self.exited(exit, &mut output, sight, gap, wish).await;
                }
                Ok(Found::Absent | Found::Created) => {
                    let reason = "its container was removed while it ran".to_owned();
                    return self.lose(reason, &mut output, gap, wish).await;
                }
                Err(error) => {
                    let since = *docker_gone.get_or_insert_with(Instant::now);
                    away = Some(self.context.clock.now());
                    wait.saw(false);
                    tracing::warn!(error = %Report(&error), "Docker does not answer; the job may go on");
                    if since.elapsed() >= DOCKER_GONE {
                        let reason = format!("Docker did not answer for {} s", DOCKER_GONE.as_secs());
                        return self.lose(reason, &mut output, gap, wish).await;
                    }
                    sleep(DOCKER_PAUSE).await;
                }
            }
            if output.is_over() && docker_gone.is_none() && !self.attacher.left().at_the_end {
                gap |= self.attach_again(&mut output).await;
            }
            tokio::select! {
                code = wait.next() => waited = Some(code.or(waited.flatten())),
                () = output.ended(), if !output.is_over() => {}
                wished = wished(&mut self.channels.wish, wish) => {
                    wish = wished;
                    kill_at = Some(self.begin_end(wish).await);
                }
                () = until(kill_at) => {
                    // Nothing of it runs: whoever waits for that end need not wait for Docker.
                    if self.cgroup.kill().await && docker_gone.is_some() {
                        let reason = "killed while Docker did not answer".to_owned();
                        return self.lose(reason, &mut output, gap, wish).await;
                    }
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

    /// Takes in the last output of a container that has ended, and its code. A reader that died before the end of the
    /// stream leaves a gap, even when nothing is left to attach to.
    pub(super) async fn exited(
        &self,
        exit: Exit,
        output: &mut Output,
        mut sight: Sight,
        gap: bool,
        wish: Wish,
    ) -> Watched {
        failpoint!("agent.container.exited");
        self.end_of_stream(output).await;
        failpoint!("agent.output.ended");
        let engine = &self.context.engine;
        let left = self.attacher.left();
        if left.without_docker && sight == Sight::Whole {
            // An earlier agent may not have been there to see it; the attach process was.
            sight = Sight::Broken { waited: None, away: None };
        }
        // One that only did not answer for a while has seen the end as well as any.
        let same = sight != Sight::Whole && engine.remembers_start(&self.name, exit.started_at).await;
        let cut = !left.at_the_end;
        if cut {
            self.attacher.mark_gap().await;
        }
        let code = match sight {
            Sight::Broken { .. } if !same => {
                let live_restore = engine.restores_live().await.unwrap_or(false);
                own_code(&exit, sight, live_restore)
            }
            _ => Ok(exit.code),
        };
        let gap = self.attacher.gap().await || gap || cut;
        Watched::Exited { exit, code, gap, wish }
    }

    /// The same of a container of whose end nobody knows. It may still run, and print; now it must not.
    pub(super) async fn lose(&self, reason: String, output: &mut Output, gap: bool, wish: Wish) -> Watched {
        self.cgroup.kill().await;
        self.end_of_stream(output).await;
        let cut = !self.attacher.left().at_the_end;
        if cut {
            self.attacher.mark_gap().await;
        }
        Watched::Lost { reason, gap: self.attacher.gap().await || gap || cut, wish }
    }

    /// Waits for the last of the output, for as long as more comes. A stream that somebody else holds open is left after a
    /// while.
    async fn end_of_stream(&self, output: &mut Output) {
        let mut size = self.attacher.size();
        while timeout(STREAM_END, output.ended()).await.is_err() {
            let now = self.attacher.size();
            if now == size {
                tracing::warn!(container = self.name, "the output did not end with the container");
                self.attacher.end().await;
            }
            size = now;
        }
    }
}

/// Waits for a container's end, one call after another. A call survives that nobody listens for a while.
struct Wait<'a> {
    engine: &'a Engine,
    name: &'a str,
    call: Option<Pin<Box<dyn Future<Output = Option<i32>> + Send + 'a>>>,
    /// Whether the container was seen running before the call: what a Docker that is back answers is what it makes up.
    counts: bool,
}

impl<'a> Wait<'a> {
    fn new(engine: &'a Engine, name: &'a str) -> Self {
        Self { engine, name, call: None, counts: true }
    }

    /// The container was seen running, or Docker was not there.
    fn saw(&mut self, running: bool) {
        if self.call.is_none() {
            self.counts = running;
        }
    }

    /// The end of the call under way, or of a new one: the job's code, if it is known to be that.
    async fn next(&mut self) -> Option<i32> {
        let call = self.call.get_or_insert_with(|| Box::pin(self.engine.wait(self.name)));
        let code = call.await;
        self.call = None;
        code.filter(|_| self.counts)
    }
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}
