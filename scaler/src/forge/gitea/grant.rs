//! Registering a runner for one job (spec gitea 5.1).

use pilotlight_wire::{ForgeKind, JobId, LabelName, RunnerGrant};
use serde::Deserialize;
use serde_json::json;

use super::{
    ForgeError, Gitea,
    api::{Registered, Repository},
};

/// A runner to register.
#[derive(Clone, Debug)]
pub struct Order {
    /// Its row.
    pub job: JobId,
    /// The one label that it serves.
    pub label: LabelName,
    /// The one repository that it serves; `None`: all of the scope.
    pub repository: Option<String>,
    /// The image that it and its job's steps run in.
    pub image: String,
    /// What an hour of its machine's share costs.
    pub price_per_hour: Option<f64>,
    /// What its job's log begins with.
    pub preface: Vec<String>,
    /// Whether it was tried before: a registration may be there whose token nobody has.
    pub again: bool,
}

impl Gitea {
    /// What the API has for a runner of this repository, or of the whole scope.
    pub(super) fn actions_of(&self, repository: Option<&str>) -> String {
        repository
            .and_then(Repository::parse)
            .map_or_else(|| self.config.scope.actions(), |repository| repository.actions())
    }

    /// Registers a runner. Its token is shown once; when that answer is lost, the registration is found by its name at
    /// the next try, and removed.
    ///
    /// # Errors
    /// When it is not registered, or nobody knows.
    pub async fn grant(&self, order: Order) -> Result<RunnerGrant, ForgeError> {
        #[derive(Deserialize)]
        struct Answer {
            runner: Registered,
        }
        let (actions, name) = (self.actions_of(order.repository.as_deref()), self.runner_name(order.job));
        if order.again {
            for runner in self.api.runners(&actions).await?.into_iter().filter(|runner| runner.name == name) {
                self.api.delete_runner(&actions, runner.id).await?;
            }
        }
        let token = self.api.registration_token(&actions).await?;
        let labels = vec![order.label.to_string()];
        let body = json!({
            "name": name,
            // The one use of the registration token: it never leaves this process for a machine.
            "token": token.expose(),
            "version": concat!("pilotlight ", env!("CARGO_PKG_VERSION")),
            "labels": labels,
            "ephemeral": true,
            "capabilities": ["cancelling"],
        });
        let Answer { runner } = self.api.runner_call("Register", &body, None).await?;
        Ok(RunnerGrant {
            forge: ForgeKind::Gitea,
            url: self.config.url.clone(),
            id: runner.id,
            uuid: runner.uuid,
            token: runner.token,
            name,
            labels,
            image: order.image,
            price_per_hour: order.price_per_hour,
            preface: order.preface,
        })
    }
}
