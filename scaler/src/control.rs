//! The one owner of the world (design 4).
//!
//! One task takes messages from one channel, applies them, plans once, commits one transaction with all that changed,
//! and only then replies and spawns what the plan asks for. Nothing else writes. If the commit fails, nothing is
//! replied or spawned and the scaler ends with exit code 74 (link 9).

use std::{collections::HashMap, sync::Arc};

use jiff::{SignedDuration, Timestamp};
use pilotlight_runtime::{
    Report,
    clock::{Clock, Step},
};
use pilotlight_wire::{InstanceId, JobId, Work};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::{
    effects::Effects,
    fleet::{Applied, Dirty, Event, Order, Plan, Planned, Refusal, World, plan, view},
    logs::LogStore,
    metrics::Metrics,
    store::{Commit, Store, StoreError},
};

/// At most so many messages go into one pass.
const BATCH: usize = 1024;

/// How often the system's clock is compared with ours.
const CLOCK_CHECK: std::time::Duration = std::time::Duration::from_secs(10);

enum Message {
    Apply { event: Box<Event>, payload: Option<Box<(JobId, Work)>>, reply: Option<Reply> },
    Read(Look),
}

type Look = Box<dyn FnOnce(&World, &Plan, Timestamp) + Send>;

type Reply = oneshot::Sender<Result<Applied, Refusal>>;

/// Why the control task did not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the scaler is shutting down")]
pub struct Stopped;

/// How everything else reaches the world. Clones share it.
#[derive(Clone, Debug)]
pub struct Handle {
    messages: mpsc::Sender<Message>,
    wakers: Wakers,
}

/// Wakes held syncs whose instance changed. A wake-up is only a hint: what to do is asked of the world again.
#[derive(Clone, Debug, Default)]
struct Wakers(Arc<std::sync::Mutex<HashMap<InstanceId, Arc<Notify>>>>);

impl Handle {
    /// Tells the world what happened; returns when that is committed.
    ///
    /// # Errors
    /// `Err(Stopped)` when the scaler ends, `Ok(Err(refusal))` when the event cannot be.
    pub async fn apply(&self, event: Event) -> Result<Result<Applied, Refusal>, Stopped> {
        self.send(event, None).await
    }

    /// Submits a job with what it runs, in one transaction.
    ///
    /// # Errors
    /// As [`Handle::apply`].
    pub async fn submit(&self, event: Event, id: JobId, payload: Work) -> Result<Result<Applied, Refusal>, Stopped> {
        self.send(event, Some((id, payload))).await
    }

    /// Tells the world what happened without waiting; for results of effects.
    pub async fn tell(&self, event: Event) {
        // At shutdown the result is lost, and the next scaler makes the call again.
        let _stopping = self.messages.send(Message::Apply { event: Box::new(event), payload: None, reply: None }).await;
    }

    /// Reads the world as it is, with the plan of the last pass.
    ///
    /// # Errors
    /// When the scaler ends.
    pub async fn read<T: Send + 'static>(
        &self,
        look: impl FnOnce(&World, &Plan, Timestamp) -> T + Send + 'static,
    ) -> Result<T, Stopped> {
        let (reply, answer) = oneshot::channel();
        let look = Box::new(move |world: &World, plan: &Plan, now| {
            // The asker may have gone.
            let _gone = reply.send(look(world, plan, now));
        });
        self.messages.send(Message::Read(look)).await.map_err(|_closed| Stopped)?;
        answer.await.map_err(|_closed| Stopped)
    }

    /// What wakes a held sync of this instance.
    #[must_use]
    pub fn waker(&self, instance: InstanceId) -> Arc<Notify> {
        let mut wakers = self.wakers.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        Arc::clone(wakers.entry(instance).or_default())
    }

    async fn send(&self, event: Event, payload: Option<(JobId, Work)>) -> Result<Result<Applied, Refusal>, Stopped> {
        let (reply, answer) = oneshot::channel();
        let message = Message::Apply { event: Box::new(event), payload: payload.map(Box::new), reply: Some(reply) };
        self.messages.send(message).await.map_err(|_closed| Stopped)?;
        answer.await.map_err(|_closed| Stopped)
    }
}

/// The control task's own end of the channel.
#[derive(Debug)]
pub struct Inbox {
    messages: mpsc::Receiver<Message>,
    wakers: Wakers,
}

impl std::fmt::Debug for Message {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Apply { event, .. } => f.debug_tuple("Apply").field(event).finish(),
            Self::Read(_) => f.write_str("Read"),
        }
    }
}

/// Makes the channel.
#[must_use]
pub fn channel() -> (Handle, Inbox) {
    let (sender, messages) = mpsc::channel(4096);
    let wakers = Wakers::default();
    (Handle { messages: sender, wakers: wakers.clone() }, Inbox { messages, wakers })
}

/// Owns the world until shutdown.
#[derive(Debug)]
pub struct Control {
    /// The world as the store has it.
    pub world: World,
    /// Where it is committed.
    pub store: Store,
    /// Time.
    pub clock: Clock,
    /// What the plan asks for.
    pub effects: Effects,
    /// Numbers.
    pub metrics: Metrics,
}

impl Control {
    /// Runs until `shutdown`.
    ///
    /// # Errors
    /// When a commit fails: the process must exit, the world in memory is ahead of the store.
    pub async fn run(mut self, mut inbox: Inbox, shutdown: CancellationToken) -> Result<(), StoreError> {
        let mut batch = Vec::new();
        let mut clock_check = tokio::time::interval(CLOCK_CHECK);
        let mut plan = None;
        loop {
            let now = self.clock.now();
            let planned = self.pass(std::mem::take(&mut batch), &inbox.wakers, plan.take(), now).await?;
            let wait = planned.wake_at.map(|at| self.clock.until(at));
            plan = Some(planned);
            tokio::select! {
                () = shutdown.cancelled() => return Ok(()),
                received = inbox.messages.recv_many(&mut batch, BATCH) => {
                    if received == 0 {
                        return Ok(());
                    }
                }
                () = sleep(wait) => {}
                _ = clock_check.tick() => {
                    if let Some(step) = self.clock.step() {
                        batch.push(self.stepped(&step).await?);
                    }
                }
            }
        }
    }

    /// What is kept by age is so much younger than it will look, and is told so before our time moves.
    async fn stepped(&self, step: &Step) -> Result<Message, StoreError> {
        let Step { by, skipped, .. } = *step;
        tracing::warn!(
            step_seconds = by.as_secs(),
            "the system's clock was stepped; nothing is judged dead for one grace period"
        );
        keep_longer(&self.store, &self.effects.logs, skipped).await?;
        self.clock.follow(step);
        Ok(Message::Apply { event: Box::new(Event::ClockStepped { by, skipped }), payload: None, reply: None })
    }

    /// One pass: apply all, plan once, commit once, then reply and act.
    ///
    /// Without news the last plan holds: what agents say every few seconds and what is only read would otherwise cost a
    /// plan each, which grows with the fleet.
    async fn pass(
        &mut self,
        batch: Vec<Message>,
        wakers: &Wakers,
        last: Option<Plan>,
        now: Timestamp,
    ) -> Result<Plan, StoreError> {
        let mut news = false;
        let mut replies = Vec::new();
        let mut reads = Vec::new();
        let mut payloads = Vec::new();
        for message in batch {
            match message {
                Message::Read(look) => reads.push(look),
                Message::Apply { event, payload, reply } => {
                    news |= !is_routine(&event);
                    let result = self.world.apply(*event, now);
                    if result.is_ok() {
                        payloads.extend(payload.map(|payload| *payload));
                    }
                    replies.extend(reply.map(|reply| (reply, result)));
                }
            }
        }
        let mut dirty = self.world.take_dirty();
        news |= !dirty.is_empty() | self.world.take_heard_again();
        if let Some(last) = last
            && !news
            && last.wake_at.is_none_or(|at| now < at)
        {
            for (reply, result) in replies {
                // The asker may have gone.
                let _gone = reply.send(result);
            }
            for look in reads {
                look(&self.world, &last, now);
            }
            return Ok(last);
        }
        let planned = plan(&self.world, now);
        self.world.record(&planned, now);
        let Dirty { instances, jobs } = self.world.take_dirty();
        dirty.instances.extend(instances);
        dirty.jobs.extend(jobs);
        if !dirty.is_empty() {
            self.store.commit(self.commit(&dirty, payloads, now)).await?;
        }
        for (reply, result) in replies {
            // The asker may have gone.
            let _gone = reply.send(result);
        }
        for Planned { action, reason } in &planned.actions {
            let line = view::action_line(action, reason);
            tracing::info!(
                action = line.what,
                subject = line.subject,
                reason = line.reason,
                text = line.text,
                "planned"
            );
            self.metrics.action(&line.what, reason.word());
            self.effects.start(action, &self.world);
        }
        self.effects.list_soon(planned.list_soon);
        self.effects.wake_forges(&self.world, &dirty);
        self.metrics.observe(&self.world, &dirty);
        for look in reads {
            look(&self.world, &planned, now);
        }
        self.world.forget_settled(&dirty);
        wakers.wake(&self.world, &dirty);
        Ok(planned)
    }

    fn commit(&self, dirty: &Dirty, payloads: Vec<(JobId, Work)>, now: Timestamp) -> Commit {
        Commit {
            now,
            instances: dirty.instances.iter().map(|id| (*id, self.world.instance(*id).cloned())).collect(),
            jobs: dirty.jobs.iter().filter_map(|id| self.world.job(*id).cloned()).collect(),
            payloads,
        }
    }
}

/// Whether an event changes nothing that a plan depends on, unless it leaves something to commit: a machine that was
/// heard only lives longer, and the last plan wakes no later for it.
fn is_routine(event: &Event) -> bool {
    matches!(event, Event::Synced(_) | Event::SyncAnswered(_))
}

impl Wakers {
    fn wake(&self, world: &World, dirty: &Dirty) {
        let mut wakers = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        for id in &dirty.instances {
            if let Some(waker) = wakers.get(id) {
                waker.notify_waiters();
            }
            if world.instance(*id).is_none_or(|instance| !instance.is_live()) {
                wakers.remove(id);
            }
        }
    }
}

/// Lets logs and jobs that are over be kept for as long as they would have been without a skip in time.
///
/// # Errors
/// When the store fails. A log that cannot be marked only goes early.
pub async fn keep_longer(store: &Store, logs: &LogStore, skipped: SignedDuration) -> Result<(), StoreError> {
    if !skipped.is_positive() {
        return Ok(());
    }
    store.keep_settled_longer(skipped).await?;
    if let Err(error) = logs.keep_longer(skipped).await {
        tracing::warn!(error = %Report(&error), "old logs may be deleted early");
    }
    Ok(())
}

/// Orders, if the answer is orders.
#[must_use]
pub fn orders(applied: Applied) -> Vec<Order> {
    match applied {
        Applied::Directives(orders) => orders,
        _ => Vec::new(),
    }
}

async fn sleep(wait: Option<std::time::Duration>) {
    match wait {
        Some(wait) => tokio::time::sleep(wait).await,
        None => std::future::pending().await,
    }
}
