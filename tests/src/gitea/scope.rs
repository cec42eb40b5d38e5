//! What can be asked of the site, an organisation, a repository or a user alike: jobs, runners, webhooks.

use std::fmt;

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Api, Job, Repo, RunnerView};

/// A part of the site that has runners of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// All of it.
    Site,
    /// An organisation.
    Org(String),
    /// A repository, by owner and name.
    Repo(String, String),
    /// Whose token it is.
    User,
}

/// The path of its API, beneath `/api/v1`.
impl fmt::Display for Scope {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Site => write!(to, "/admin"),
            Self::Org(name) => write!(to, "/orgs/{name}"),
            Self::Repo(owner, name) => write!(to, "/repos/{owner}/{name}"),
            Self::User => write!(to, "/user"),
        }
    }
}

/// A webhook.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Hook {
    /// Its id.
    pub id: u64,
    /// Whether events are delivered.
    pub active: bool,
    /// Which events.
    pub events: Vec<String>,
}

impl Api {
    /// Makes an organisation of one's own.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn create_org(&self, name: &str) -> Result<Scope> {
        self.post::<Value>("/orgs", &json!({"username": name}))?;
        Ok(Scope::Org(name.to_owned()))
    }

    /// Makes a repository with a branch `main` in an organisation.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn create_repo(&self, org: &str, name: &str) -> Result<Repo> {
        let repo = json!({"name": name, "auto_init": true, "default_branch": "main"});
        self.post::<Value>(&format!("/orgs/{org}/repos"), &repo)?;
        Ok(Repo::new(self, org, name))
    }

    /// The jobs of a scope, oldest first, in any of these states (the API's words); in all of them for none.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn jobs(&self, scope: &Scope, states: &[&str]) -> Result<Vec<Job>> {
        let filter: String = states.iter().map(|state| format!("&status={state}")).collect();
        self.pages(&format!("{scope}/actions/jobs?sort=id&order=asc{filter}"), "jobs")
    }

    /// The runners of a scope; the site's are all there are.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn runners(&self, scope: &Scope) -> Result<Vec<RunnerView>> {
        self.pages(&format!("{scope}/actions/runners"), "runners")
    }

    /// Removes a runner, whatever it does.
    ///
    /// # Errors
    /// When there is none of that id.
    pub fn delete_runner(&self, scope: &Scope, id: u64) -> Result<()> {
        self.send("DELETE", &format!("{scope}/actions/runners/{id}"), None).map(drop)
    }

    /// Lets a runner get jobs or not.
    ///
    /// # Errors
    /// When there is none of that id.
    pub fn disable_runner(&self, scope: &Scope, id: u64, disabled: bool) -> Result<()> {
        let path = format!("{scope}/actions/runners/{id}");
        self.send("PATCH", &path, Some(&json!({"disabled": disabled}))).map(drop)
    }

    /// The token with which runners of this scope register.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn registration_token(&self, scope: &Scope) -> Result<String> {
        let answer = self.send("POST", &format!("{scope}/actions/runners/registration-token"), None)?;
        let token: Value = answer.json()?;
        Ok(token["token"].as_str().with_context(|| format!("a token: {token}"))?.to_owned())
    }

    /// Lets the server tell a URL of jobs and runs.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn create_hook(&self, scope: &Scope, url: &str, secret: &str) -> Result<Hook> {
        let mut config = json!({"url": url, "content_type": "json", "secret": secret});
        if *scope == Scope::Site {
            config["is_system_webhook"] = "true".into();
        }
        let hook = json!({
            "type": "gitea", "active": true, "events": ["workflow_job", "workflow_run"], "config": config,
        });
        self.post(&format!("{scope}/hooks"), &hook)
    }
}
