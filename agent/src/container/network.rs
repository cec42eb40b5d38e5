//! One network per job. The next one is made ahead of need: making it takes longer than starting a container.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, MutexGuard, PoisonError},
};

use bollard::{models::NetworkCreateRequest, query_parameters::ListNetworksOptions};
use pilotlight_runtime::{Report, failpoint};
use pilotlight_wire::InstanceId;
use tokio::sync::{Mutex, Notify};
use uuid::Uuid;

use super::{ASSIGNMENT_LABEL, Engine, EngineError, INSTANCE_LABEL, status};

/// The networks of one instance. Clones share the spare one.
#[derive(Clone, Debug)]
pub struct Networks {
    engine: Engine,
    instance: InstanceId,
    spare: Arc<Mutex<Option<String>>>,
    retired: Arc<std::sync::Mutex<Vec<String>>>,
    /// Those that this agent has made, or is making, and not removed.
    own: Arc<std::sync::Mutex<BTreeSet<String>>>,
    work: Arc<Notify>,
}

impl Networks {
    /// No spare one yet; [`Networks::keep`] makes it.
    #[must_use]
    pub fn new(engine: Engine, instance: InstanceId) -> Self {
        let (spare, retired, own, work) = Default::default();
        Self { engine, instance, spare, retired, own, work }
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
        lock(&self.retired).push(name);
        self.work.notify_one();
    }

    /// Removes retired networks, and strays, and keeps a spare one. Never returns; what it does not get to is the
    /// reaper's.
    pub async fn keep(&self) {
        loop {
            let retired = std::mem::take(&mut *lock(&self.retired));
            for name in retired {
                self.remove(&name).await;
            }
            self.remove_strays().await;
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

    /// Removes what an agent before this one was having made when it was killed: Docker went on with it, and it may not
    /// have been there yet when this one looked. Docker has few networks to give.
    async fn remove_strays(&self) {
        let filters = HashMap::from([("label".to_owned(), vec![format!("{INSTANCE_LABEL}={}", self.instance)])]);
        let options = ListNetworksOptions { filters: Some(filters) };
        // The next job's end is soon enough for another look.
        let listed = self.engine.docker.list_networks(Some(options)).await.unwrap_or_default();
        for network in listed {
            let Some(name) = network.name else { continue };
            // Ours never carry it: they are made before their job is known.
            if network.labels.is_some_and(|labels| labels.contains_key(ASSIGNMENT_LABEL)) {
                continue;
            }
            let known = lock(&self.own).contains(&name);
            if !known {
                // One with a job in it, which this agent has taken up, is refused.
                let _in_use = self.engine.docker.remove_network(&name).await;
            }
        }
    }

    async fn remove(&self, name: &str) {
        // Where it cannot be removed it is a stray from now on.
        lock(&self.own).remove(name);
        match self.engine.docker.remove_network(name).await {
            Ok(()) => {
                failpoint!("agent.network.removed");
            }
            Err(error) if status(&error) == Some(404) => {}
            Err(source) => {
                let error = EngineError { doing: format!("remove network {name}"), source };
                tracing::warn!(error = %Report(&error), "not removed yet");
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
        lock(&self.own).insert(name.clone());
        let docker = self.engine.docker.clone();
        match self.engine.make(async move { docker.create_network(request).await }).await {
            Ok(_) => {
                failpoint!("agent.network.made");
                Ok(name)
            }
            Err(source) => {
                lock(&self.own).remove(&name);
                Err(EngineError { doing: format!("make network {name}"), source })
            }
        }
    }
}

fn lock<T>(mutex: &std::sync::Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is one call: a panic leaves nothing half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
