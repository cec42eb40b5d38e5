//! A browser's session, for what has no API: cancelling a run.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use ureq::{Agent, http::HeaderValue};

use super::{Answer, PASSWORD, Repo, api};

/// A user who is logged in, until the server is started again.
#[derive(Debug)]
pub struct Web {
    agent: Agent,
    url: String,
    cookies: String,
}

impl Web {
    pub(super) fn login(url: &str, user: &str) -> Result<Self> {
        let agent = api::agent();
        let answer = agent
            .post(format!("{url}/user/login"))
            .header("origin", url)
            .send_form([("user_name", user), ("password", PASSWORD)])?;
        // A page that says what is wrong is 200.
        ensure!(answer.status() == 303, "{user} cannot log in: {}", answer.status());
        // The session changes its name in the course of the login: the last one of a name counts.
        let cookies: BTreeMap<_, _> = answer.headers().get_all("set-cookie").iter().filter_map(pair).collect();
        let cookies = cookies.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join("; ");
        Ok(Self { agent, url: url.to_owned(), cookies })
    }

    /// Cancels a run.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn cancel(&self, repo: &Repo, run: u64) -> Result<()> {
        let path = format!("/{}/actions/runs/{run}/cancel", repo.full_name());
        let answer = self.post(&path)?;
        let body: Value = answer.json().with_context(|| path.clone())?;
        ensure!(body["ok"] == true, "{path}: {} {body}", answer.status);
        Ok(())
    }

    fn post(&self, path: &str) -> Result<Answer> {
        let request = self.agent.post(format!("{}{path}", self.url));
        Answer::read(request.header("cookie", &self.cookies).header("origin", &self.url).send_empty()?)
    }
}

/// The name and value of a cookie that is set.
fn pair(cookie: &HeaderValue) -> Option<(&str, &str)> {
    cookie.to_str().ok()?.split(';').next()?.split_once('=')
}
