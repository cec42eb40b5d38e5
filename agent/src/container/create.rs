//! The create request of a job's container.

use std::collections::HashMap;

use bollard::{
    models::{
        ContainerCreateBody, EndpointSettings, HostConfig, HostConfigLogConfig, Mount, MountType, NetworkingConfig,
    },
    query_parameters::CreateContainerOptions,
};
use pilotlight_wire::{DirectJob, InstanceId, Volume, agent::Start};

use super::{ASSIGNMENT_LABEL, Cgroup, Engine, EngineError, INSTANCE_LABEL, Image, gpu, host_image};

/// Processes that one job may have: far above any training run, below what takes the machine down.
const MAX_PROCESSES: i64 = 65_536;

/// Memory that is kept for the system, the agent and Docker: 5 %, at least 256 MiB.
const RESERVED_MIN: u64 = 256 * 1024 * 1024;

/// The variable with which images and runtimes hand out GPUs.
pub(crate) const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";

/// What a machine has to share out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Memory of the machine, bytes.
    pub memory_bytes: u64,
    /// GPUs of the instance.
    pub gpus: u32,
    /// Jobs without GPUs at once.
    pub cpu_jobs: u32,
}

impl Share {
    /// The memory share of a job with so many GPUs, bytes. A job without GPUs counts as one with one.
    #[must_use]
    pub fn memory(&self, gpus: usize) -> u64 {
        let reserved = (self.memory_bytes / 20).max(RESERVED_MIN);
        let units = u64::from(self.gpus) + u64::from(self.cpu_jobs);
        let mine = u64::try_from(gpus).unwrap_or(u64::MAX).max(1);
        self.memory_bytes.saturating_sub(reserved) / units.max(mine) * mine
    }
}

/// All that a container is made of.
#[derive(Clone, Copy, Debug)]
pub struct Order<'a> {
    /// Its name, derived from the assignment: a second create meets the first.
    pub name: &'a str,
    /// The instance.
    pub instance: InstanceId,
    /// What asked for it.
    pub start: &'a Start,
    /// What runs in it.
    pub spec: &'a DirectJob,
    /// Its image.
    pub image: &'a Image,
    /// Its network.
    pub network: &'a str,
    /// Its cgroup.
    pub cgroup: &'a Cgroup,
    /// Its memory share, bytes.
    pub memory: u64,
}

impl Engine {
    /// Makes a job's container.
    ///
    /// # Errors
    /// Docker's refusal; 409 when there is one of that name.
    pub async fn create(&self, order: &Order<'_>) -> Result<(), EngineError> {
        let options = CreateContainerOptions { name: Some(order.name.to_owned()), ..CreateContainerOptions::default() };
        let (docker, body) = (self.docker.clone(), body(order, self.facts()));
        match self.make(async move { docker.create_container(Some(options), body).await }).await {
            Ok(_) => Ok(()),
            Err(source) => Err(EngineError { doing: format!("make container {}", order.name), source }),
        }
    }
}

fn body(order: &Order<'_>, facts: &super::Facts) -> ContainerCreateBody {
    let (start, spec) = (order.start, order.spec);
    let gpus = gpu::request(facts, &start.gpus);
    // As an array, never through a shell or a file: values arrive byte for byte.
    let own = [(VISIBLE_DEVICES, gpus.visible.as_str())];
    let theirs = spec.env.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    let env = theirs.filter(|(name, _)| *name != VISIBLE_DEVICES).chain(own);
    let mut mounts: Vec<Mount> = if order.image.is_host { host_image::mounts() } else { Vec::new() };
    mounts.extend(start.volumes.iter().map(mount));
    let memory = i64::try_from(order.memory).unwrap_or(i64::MAX);
    let config = HostConfig {
        init: Some(true),
        log_config: Some(HostConfigLogConfig { typ: Some("none".to_owned()), config: None }),
        cgroup_parent: Some(order.cgroup.parent().to_owned()),
        memory: Some(memory),
        // No swap: a job that swaps is slower than one that fails.
        memory_swap: Some(memory),
        shm_size: Some(memory / 2),
        pids_limit: Some(MAX_PROCESSES),
        mounts: Some(mounts),
        network_mode: Some(order.network.to_owned()),
        security_opt: order.image.is_host.then(|| vec!["no-new-privileges".to_owned()]),
        device_requests: gpus.devices,
        runtime: gpus.runtime,
        ..HostConfig::default()
    };
    let command = (!spec.command.is_empty()).then(|| spec.command.clone());
    ContainerCreateBody {
        image: Some(order.image.reference.clone()),
        entrypoint: spec.entrypoint.clone(),
        // An image of nothing needs a command; a shell that reads an empty input does no harm.
        cmd: if order.image.is_host { Some(command.unwrap_or_else(|| vec!["/bin/sh".to_owned()])) } else { command },
        env: Some(env.map(|(name, value)| format!("{name}={value}")).collect()),
        user: spec.user.clone(),
        working_dir: spec.workdir.clone(),
        attach_stdout: Some(true),
        attach_stderr: Some(true),
        tty: Some(false),
        open_stdin: Some(false),
        labels: Some(HashMap::from([
            (INSTANCE_LABEL.to_owned(), order.instance.to_string()),
            (ASSIGNMENT_LABEL.to_owned(), start.assignment.to_string()),
        ])),
        host_config: Some(config),
        networking_config: Some(NetworkingConfig {
            endpoints_config: Some(HashMap::from([(order.network.to_owned(), EndpointSettings::default())])),
        }),
        ..ContainerCreateBody::default()
    }
}

fn mount(volume: &Volume) -> Mount {
    Mount {
        typ: Some(MountType::BIND),
        source: Some(volume.host.clone()),
        target: Some(volume.mount.clone()),
        read_only: Some(volume.read_only),
        ..Mount::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_shared_out_by_gpus() {
        const GIB: u64 = 1 << 30;
        let eight = Share { memory_bytes: 2000 * GIB, gpus: 8, cpu_jobs: 0 };
        assert_eq!(eight.memory(1), 1900 * GIB / 8);
        assert_eq!(eight.memory(8), 1900 * GIB / 8 * 8);
        let cpu = Share { memory_bytes: 100 * GIB, gpus: 0, cpu_jobs: 2 };
        assert_eq!(cpu.memory(0), 95 * GIB / 2);
        let small = Share { memory_bytes: GIB, gpus: 0, cpu_jobs: 0 };
        assert_eq!(small.memory(0), GIB - RESERVED_MIN, "nothing is divided by zero");
    }
}
