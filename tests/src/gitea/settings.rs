//! What a test changes of the server's settings.

use std::{
    fmt::Write,
    net::{IpAddr, Ipv4Addr},
};

use anyhow::{Context, Result};

use crate::site::docker;

/// Settings of a server. By default it is on loopback, and everything is as Gitea ships it.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    for_containers: bool,
    entries: Vec<Entry>,
}

#[derive(Clone, Debug)]
struct Entry {
    section: String,
    key: String,
    value: String,
}

impl Settings {
    /// Lets containers of this box's Docker reach the server: by the address that the box has on Docker's own bridge,
    /// which no other machine sees.
    #[must_use]
    pub fn for_containers(mut self) -> Self {
        self.for_containers = true;
        self
    }

    /// Any setting of `app.ini`.
    #[must_use]
    pub fn set(mut self, section: &str, key: &str, value: &str) -> Self {
        self.entries.push(Entry { section: section.to_owned(), key: key.to_owned(), value: value.to_owned() });
        self
    }

    /// A setting of Actions, as `ZOMBIE_TASK_TIMEOUT` to `10s`.
    #[must_use]
    pub fn actions(self, key: &str, value: &str) -> Self {
        self.set("actions", key, value)
    }

    /// When a scheduled task runs, as `stop_zombie_tasks` to `@every 1s`.
    #[must_use]
    pub fn cron(self, task: &str, schedule: &str) -> Self {
        self.set(&format!("cron.{task}"), "SCHEDULE", schedule)
    }

    /// The address to listen on.
    pub(super) fn host(&self) -> Result<IpAddr> {
        if !self.for_containers {
            return Ok(IpAddr::V4(Ipv4Addr::LOCALHOST));
        }
        let gateway = docker(&["network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Gateway}}"])?;
        gateway.trim().parse().with_context(|| format!("the gateway of Docker's network bridge, not {gateway:?}"))
    }

    /// The part of `app.ini` that sets them: a later entry wins.
    pub(super) fn ini(&self) -> String {
        self.entries.iter().fold(String::new(), |mut ini, Entry { section, key, value }| {
            let _written = write!(ini, "\n[{section}]\n{key} = {value}\n");
            ini
        })
    }
}
