//! One network per job. The next one is made ahead of need: making it takes longer than starting a container.

use std::{collections::HashMap, sync::Arc};

use bollard::models::NetworkCreateRequest;
use pilotlight_runtime::Report;
use pilotlight_wire::InstanceId;
use tokio::sync::Mutex;
use uuid::Uuid;

use super::{Engine, EngineError, INSTANCE_LABEL, status};

/// The networks of one instance. Clones share the spare one.
#[derive(Clone, Debug)]
pub struct Networks {
    engine: Engine,
    instance: InstanceId,
    spare: Arc<Mutex<Option<String>>>,
}

impl Networks {
    /// No spare one yet; [`Networks::refill`] makes it.
    #[must_use]
    pub fn new(engine: Engine, instance: InstanceId) -> Self {
        Self { engine, instance, spare: Arc::default() }
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

    /// Makes the spare one unless it is there. A failure is left to the job that needs one.
    pub async fn refill(&self) {
        let mut spare = self.spare.lock().await;
        if spare.is_none() {
            match self.create().await {
                Ok(name) => *spare = Some(name),
                Err(error) => tracing::warn!(error = %Report(&error), "no network made ahead of need"),
            }
        }
    }

    /// Removes a job's network; one that is absent is fine.
    ///
    /// # Errors
    /// When Docker cannot.
    pub async fn remove(&self, name: &str) -> Result<(), EngineError> {
        match self.engine.docker.remove_network(name).await {
            Ok(()) => Ok(()),
            Err(error) if status(&error) == Some(404) => Ok(()),
            Err(source) => Err(EngineError { doing: format!("remove network {name}"), source }),
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
        match self.engine.docker.create_network(request).await {
            Ok(_) => Ok(name),
            Err(source) => Err(EngineError { doing: format!("make network {name}"), source }),
        }
    }
}
