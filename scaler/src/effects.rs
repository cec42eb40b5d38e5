//! What the plan asks for, done. An effect makes one call and returns what came of it as an event; it never retries by
//! itself, the next plan does.

use std::{sync::Arc, time::Duration};

use pilotlight_runtime::{Report, clock::Clock, failpoint};
use pilotlight_wire::{
    InstanceId, JobId,
    agent::{Bootstrap, PowerMode},
};
use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    control::Handle,
    fleet::{Action, Event, Instance, ProviderConfig, World, event::CreateFailure},
    keys::Keys,
    logs::LogStore,
    provider::{CreateError, Tags, local::LocalProvider},
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
            // The agent learns of these through its held sync.
            Action::Assign { .. } | Action::Drain { .. } => {}
            Action::Forget(_) => {}
        }
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
