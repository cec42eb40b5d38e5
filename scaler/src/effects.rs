//! What the plan asks for, done. An effect makes one call and returns what came of it as an event; it never retries by
//! itself, the next plan does.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use pilotlight_runtime::{Report, clock::Clock, failpoint};
use pilotlight_wire::{
    ForgeName, InstanceId, JobId, Verdict, Work,
    agent::{Bootstrap, PowerMode},
};
use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    control::Handle,
    fleet::{Action, Dirty, Event, Instance, Job, ProviderConfig, World, event::CreateFailure, view},
    forge::{
        Gitea,
        gitea::{Leftover, Order},
    },
    keys::Keys,
    logs::LogStore,
    provider::{CreateError, Tags, local::LocalProvider},
    store::Store,
};

/// How often the provider's list is read when nothing is to be proved. The local one is a directory; a cloud's costs more.
const LIST_EVERY: Duration = Duration::from_secs(2);

/// How often it is read while a machine is to be proved gone.
const LIST_SOON: Duration = Duration::from_millis(200);

/// How long a list call may take.
const LIST_TIMEOUT: Duration = Duration::from_secs(60);

/// Does what the plan asks for.
#[derive(Clone, Debug)]
pub struct Effects {
    /// Where results go.
    pub control: Handle,
    /// Makes and destroys machines.
    pub local: Arc<LocalProvider>,
    /// Forges, besides the built-in queue.
    pub forges: Arc<BTreeMap<ForgeName, Gitea>>,
    /// What runs; of a runner its credentials.
    pub store: Store,
    /// Job logs.
    pub logs: LogStore,
    /// Derives enrolment secrets.
    pub keys: Arc<Keys>,
    /// The base URL that agents dial.
    pub agent_url: String,
    /// Every effect in flight.
    pub tasks: TaskTracker,
    /// Whether the list is wanted soon.
    pub soon: watch::Sender<bool>,
}

impl Effects {
    /// Starts what an action asks for, if anything is to be done outside the world.
    pub fn start(&self, action: &Action, world: &World) {
        let effects = self.clone();
        match action {
            Action::Launch(instance) => drop(self.tasks.spawn(effects.create((**instance).clone()))),
            Action::Create(id) => {
                if let Some(instance) = world.instance(*id).cloned() {
                    drop(self.tasks.spawn(effects.create(instance)));
                }
            }
            Action::Terminate { instance: id, .. } | Action::Destroy(id) | Action::Reap(id) => {
                drop(self.tasks.spawn(effects.destroy(*id)));
            }
            Action::CloseLog { job, incomplete } => drop(self.tasks.spawn(effects.close_log(*job, *incomplete))),
            Action::Grant { job, .. } | Action::Mint(job) => {
                let again = matches!(action, Action::Mint(_));
                if let Some((forge, order)) = world.job(*job).and_then(|job| self.order(world, job, again)) {
                    drop(self.tasks.spawn(effects.grant(forge, order)));
                }
            }
            Action::EndRegistration(job) => {
                if let Some((forge, left)) = world.job(*job).and_then(|job| self.leftover(job)) {
                    drop(self.tasks.spawn(effects.end_registration(forge, left)));
                }
            }
            // The agent learns of these through its held sync.
            Action::Assign { .. } | Action::Drain { .. } | Action::Withdraw { .. } => {}
            Action::Forget(_) => {}
        }
    }

    /// Reads every forge that has something to say now rather than later.
    pub fn wake_forges(&self, world: &World, dirty: &Dirty) {
        for job in dirty.jobs.iter().filter_map(|id| world.job(*id)).filter(|job| job.runner.is_some()) {
            if let Some(forge) = self.forges.get(&job.forge) {
                forge.wake();
            }
        }
    }

    /// What is to be registered for a runner's row. Of a forge or label that the config no longer has nothing is.
    fn order(&self, world: &World, job: &Job, again: bool) -> Option<(Gitea, Order)> {
        let forge = self.forges.get(&job.forge)?.clone();
        let (instance, _, assignment) = world.placed(job)?;
        let runner = job.runner.as_ref()?;
        let order = Order {
            job: job.id,
            label: job.label.clone(),
            repository: runner.repository.clone(),
            image: world.settings().pools.get(&job.pool)?.runner_image.clone()?,
            price_per_hour: world.price_per_hour(instance, job.gpus),
            preface: view::preface(job, instance, assignment),
            again,
        };
        Some((forge, order))
    }

    /// What a runner leaves behind.
    fn leftover(&self, job: &Job) -> Option<(Gitea, Leftover)> {
        let forge = self.forges.get(&job.forge)?.clone();
        let (runner, ended) = (job.runner.as_ref()?, job.ended()?);
        let lost = ended.verdict == Verdict::Infrastructure && runner.has_picked();
        let left = Leftover {
            job: job.id,
            of: runner.job.clone(),
            repository: runner.repository.clone(),
            task: runner.task.clone(),
            grant: None,
            cancelled: ended.verdict == Verdict::Cancelled,
            reason: ended.reason.clone().unwrap_or_else(|| "its runner ended without a result".to_owned()),
            began_at: runner.picked_at.unwrap_or(job.queued_at),
            ended_at: ended.at,
            rerun: lost && forge.config().rerun_lost && runner.job.attempt == 1,
        };
        Some((forge, left))
    }

    async fn grant(self, forge: Gitea, order: Order) {
        let job = order.job;
        let (event, payload) = match forge.grant(order).await {
            Ok(grant) => (Event::Granted { job, id: grant.id }, Some(Work::Runner(Box::new(grant)))),
            Err(error) => {
                tracing::warn!(%job, error = error.line(), "runner not registered");
                (Event::GrantFailed { job, message: error.line() }, None)
            }
        };
        match payload {
            Some(payload) => drop(self.control.submit(event, job, payload).await),
            None => self.control.tell(event).await,
        }
    }

    async fn end_registration(self, forge: Gitea, mut left: Leftover) {
        let job = left.job;
        left.grant = match self.store.payload(job).await {
            Ok(Some(Work::Runner(grant))) => Some(*grant),
            Ok(_) => None,
            Err(error) => {
                let message = Report(&error).to_string();
                return self.control.tell(Event::RegistrationFailed { job, message }).await;
            }
        };
        let event = match forge.end(left).await {
            Ok(()) => Event::RegistrationOver(job),
            Err(error) => {
                tracing::warn!(%job, error = error.line(), "registration not ended");
                Event::RegistrationFailed { job, message: error.line() }
            }
        };
        self.control.tell(event).await;
    }

    /// Says whether something is to be proved gone.
    pub fn list_soon(&self, soon: bool) {
        self.soon.send_if_modified(|was| std::mem::replace(was, soon) != soon);
    }

    async fn create(self, instance: Instance) {
        failpoint!("scaler.create.unsent");
        let ProviderConfig::Local(config) = &instance.placement.provider;
        let bootstrap = Bootstrap {
            scaler_url: self.agent_url.clone(),
            instance: instance.id,
            secret: self.keys.enrol_secret(instance.id),
            power: PowerMode::Exit,
            gpus: Some(instance.gpu_ids.clone()),
            host_image: config.host_image,
        };
        let tags = Tags {
            pool: instance.pool.clone(),
            placement: instance.placement.name.clone(),
            created_at: instance.created_at,
            gpu_ids: instance.gpu_ids.clone(),
        };
        let event = match self.local.create(&bootstrap, config, &tags).await {
            Ok(()) => Event::Created(instance.id),
            Err(error) => {
                let message = Report(&error).to_string();
                tracing::warn!(instance = %instance.id, placement = %instance.placement.name, error = message, "create failed");
                let class = match error {
                    CreateError::Capacity(_) => CreateFailure::Capacity,
                    CreateError::Invalid(_) => CreateFailure::Invalid,
                    CreateError::MayExist(_) => CreateFailure::MayExist,
                };
                Event::CreateFailed { instance: instance.id, class, message }
            }
        };
        failpoint!("scaler.create.unrecorded");
        self.control.tell(event).await;
    }

    async fn destroy(self, instance: InstanceId) {
        let event = match self.local.destroy(instance).await {
            Ok(()) => Event::DestroyAccepted(instance),
            Err(error) => {
                let message = Report(&error).to_string();
                tracing::warn!(%instance, error = message, "destroy failed");
                Event::DestroyFailed { instance, message }
            }
        };
        failpoint!("scaler.destroy.unrecorded");
        self.control.tell(event).await;
    }

    async fn close_log(self, job: JobId, incomplete: bool) {
        let notice = incomplete.then_some("the machine is gone; output that it had not sent is missing here");
        let closed = async {
            self.logs.create(job).await?;
            self.logs.close(job, notice).await
        };
        // A log that cannot be closed on disk is closed all the same: followers must not wait for ever.
        if let Err(error) = closed.await {
            tracing::error!(%job, error = %Report(&error), "log not closed on disk");
        }
        self.control.tell(Event::LogClosed(job)).await;
    }

    /// Reads the provider's list for ever: every few seconds, and at once while something is to be proved gone.
    pub async fn keep_listing(self, clock: Clock, shutdown: CancellationToken) {
        let mut soon = self.soon.subscribe();
        loop {
            let began_at = clock.now();
            let event = match tokio::time::timeout(LIST_TIMEOUT, self.local.list()).await {
                Ok(Ok(listed)) => Event::ListRead { began_at, listed },
                Ok(Err(error)) => Event::ListFailed { message: Report(&error).to_string() },
                Err(_elapsed) => Event::ListFailed { message: "no answer within a minute".to_owned() },
            };
            self.control.tell(event).await;
            let pause = if *soon.borrow_and_update() { LIST_SOON } else { LIST_EVERY };
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
                _ = soon.changed() => {}
            }
        }
    }
}
