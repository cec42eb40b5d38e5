//! One network per job. The next one is made ahead of need: making it takes longer than starting a container.

use std::{
    collections::HashMap,
    sync::{Arc, PoisonError},
};

use bollard::models::NetworkCreateRequest;
use pilotlight_runtime::{Report, failpoint};
use pilotlight_wire::InstanceId;
use tokio::sync::{Mutex, Notify};
use uuid::Uuid;

use super::{Engine, EngineError, INSTANCE_LABEL, status};

/// The networks of one instance. Clones share the spare one.
#[derive(Clone, Debug)]
pub struct Networks {
    engine: Engine,
    instance: InstanceId,
    spare: Arc<Mutex<Option<String>>>,
    retired: Arc<std::sync::Mutex<Vec<String>>>,
    work: Arc<Notify>,
}

impl Networks {
    /// No spare one yet; [`Networks::keep`] makes it.
    #[must_use]
    pub fn new(engine: Engine, instance: InstanceId) -> Self {
        Self { engine, instance, spare: Arc::default(), retired: Arc::default(), work: Arc::default() }
    }

    /// A network for one job: the spare one, or a new one.
    ///
    /// # Errors
    /// When Docker cannot make one, for instance because its address pools are used up.
    pub async fn take(&self) -> Result<String, EngineError> {
        match self.spare.lock().await.take() {
            Some(name) => Ok(name),
            None => self.create().await,
        }
    }

    /// Asks for a spare one, now that nobody waits for Docker.
    pub fn want_spare(&self) {
        self.work.notify_one();
    }

    /// Hands over the network of a job that is over. Nobody waits for its removal: it takes longer than all else that
    /// follows a job, and holds no GPU.
    pub fn retire(&self, name: String) {
        self.retired.lock().unwrap_or_else(PoisonError::into_inner).push(name);
        self.work.notify_one();
    }

    /// Removes retired networks and keeps a spare one. Never returns; what it does not get to is the reaper's.
    pub async fn keep(&self) {
        loop {
            let retired = std::mem::take(&mut *self.retired.lock().unwrap_or_else(PoisonError::into_inner));
            for name in retired {
                self.remove(&name).await;
            }
            let mut spare = self.spare.lock().await;
            if spare.is_none() {
                match self.create().await {
                    Ok(name) => *spare = Some(name),
                    // Left to the job that needs one.
                    Err(error) => tracing::warn!(error = %Report(&error), "no network made ahead of need"),
                }
            }
            drop(spare);
            self.work.notified().await;
        }
    }

    async fn remove(&self, name: &str) {
        match self.engine.docker.remove_network(name).await {
            Ok(()) => {
                failpoint!("agent.network.removed");
            }
            Err(error) if status(&error) == Some(404) => {}
            Err(source) => {
                let error = EngineError { doing: format!("remove network {name}"), source };
                tracing::warn!(error = %Report(&error), "left to the reaper");
            }
        }
    }

    async fn create(&self) -> Result<String, EngineError> {
        // It is made before its job is known, so it carries the instance's label only.
        let name = format!("pilotlight-{}", Uuid::new_v4().simple());
        let request = NetworkCreateRequest {
            name: name.clone(),
            labels: Some(HashMap::from([(INSTANCE_LABEL.to_owned(), self.instance.to_string())])),
            ..NetworkCreateRequest::default()
        };
        let docker = self.engine.docker.clone();
        match self.engine.make(async move { docker.create_network(request).await }).await {
            Ok(_) => {
                failpoint!("agent.network.made");
                Ok(name)
            }
            Err(source) => Err(EngineError { doing: format!("make network {name}"), source }),
        }
    }
}
