//! What of the machine is a site's own, to be broken: Docker and disks.

use std::{fs, path::Path, path::PathBuf, process::Command};

use anyhow::{Context, Result};

use super::{Site, docker, entries};
use crate::{disk::Disk, dockerd::Dockerd};

impl Site {
    /// As [`Site::new`], with a Docker of its own.
    ///
    /// # Errors
    /// When the programs cannot be built or started.
    pub fn with_docker(config: &str, docker: Dockerd) -> Result<Self> {
        let mut site = Self::prepare(config)?;
        site.docker = Some(docker);
        site.start()?;
        Ok(site)
    }

    /// Mounts a disk at a path in the site's directory, to be told before the scaler starts; it goes with the site.
    ///
    /// # Errors
    /// When it cannot be mounted.
    pub fn mount(&mut self, name: &str, size: &str) -> Result<PathBuf> {
        let path = self.path(name);
        self.disks.push(Disk::mount(&path, size)?);
        Ok(path)
    }

    /// Makes a disk larger or smaller.
    ///
    /// # Errors
    /// When there is none at that path, or it is too full for that.
    pub fn resize(&self, name: &str, size: &str) -> Result<()> {
        let path = self.path(name);
        self.disks.iter().find(|disk| disk.path() == path).context("a disk")?.resize(size)
    }

    /// Gives it a Docker of its own, before its scaler starts.
    pub fn set_docker(&mut self, docker: Dockerd) {
        self.docker = Some(docker);
    }

    /// Its own Docker, to be broken.
    ///
    /// # Errors
    /// When it has none.
    pub fn dockerd(&mut self) -> Result<&mut Dockerd> {
        self.docker.as_mut().context("a Docker of its own")
    }

    /// A program with the site's Docker in its environment.
    pub(super) fn with_host(&self, mut command: Command) -> Command {
        if let Some(docker) = &self.docker {
            command.env("DOCKER_HOST", docker.host()).env_remove("PILOTLIGHT_DOCKER_SOCKET");
        }
        command
    }

    /// Runs Docker's client against the site's Docker.
    ///
    /// # Errors
    /// When it fails.
    pub fn docker(&self, args: &[&str]) -> Result<String> {
        match &self.docker {
            Some(docker) => docker.call(args),
            None => docker(args),
        }
    }

    /// Whether a process of a container lives, whatever Docker knows of it.
    #[must_use]
    pub fn runs_container(&self, id: &str) -> bool {
        let groups = entries(Path::new("/sys/fs/cgroup")).into_iter().chain(["/sys/fs/cgroup".into()]);
        let instances: Vec<_> = groups.flat_map(|root| entries(&root.join("pilotlight"))).collect();
        let assignments = instances.iter().flat_map(|instance| entries(instance));
        assignments.flat_map(|assignment| entries(&assignment)).any(|group| {
            group.file_name().is_some_and(|name| name.to_string_lossy().starts_with(id))
                && fs::read_to_string(group.join("cgroup.procs")).is_ok_and(|pids| !pids.is_empty())
        })
    }
}
