//! Removing what is left over: at agent start all that belongs to no assignment, at the end of an instance everything.

use std::{
    collections::{BTreeSet, HashMap},
    fs::{File, TryLockError},
    io,
    path::Path,
    time::Duration,
};

use bollard::query_parameters::{ListContainersOptions, ListNetworksOptions, ListVolumesOptions, RemoveVolumeOptions};
use pilotlight_runtime::{Report, failpoint};
use pilotlight_wire::{AssignmentId, InstanceId};
use rustix::process::{Pid, Signal, kill_process};

use super::{ASSIGNMENT_LABEL, Engine, EngineError, INSTANCE_LABEL, cgroup, status};
use crate::job::AssignmentDir;

/// How long a killed attach process may take to go.
const ATTACH_END: Duration = Duration::from_secs(5);

/// After a killed agent: how long until the next look, and how many there are while something appears.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
const LOOKS: u32 = 10;

/// Why an instance's things could not all be removed. It can be called again.
#[derive(Debug, thiserror::Error)]
pub enum TeardownError {
    /// Docker.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The instance's directory.
    #[error("cannot read {path}")]
    Dir {
        /// Which.
        path: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Something is still there after it was removed.
    #[error("{what} cannot be removed: {why}")]
    Left {
        /// What.
        what: String,
        /// Docker's word.
        why: String,
    },
}

/// Removes the containers, networks, volumes and cgroups of this instance that belong to no kept assignment, and says
/// how many there were. Other instances' things are not its business.
///
/// # Errors
/// When Docker does not answer, or something cannot be removed; the rest is removed all the same.
pub async fn reap(
    engine: &Engine,
    instance: InstanceId,
    keep: &BTreeSet<AssignmentId>,
) -> Result<usize, TeardownError> {
    let (mut found, mut left) = (0, Vec::new());
    let kept = |labels: Option<&HashMap<String, String>>| {
        let id = labels.and_then(|labels| labels.get(ASSIGNMENT_LABEL)?.parse().ok());
        id.is_some_and(|id: AssignmentId| keep.contains(&id))
    };
    let filters = || Some(HashMap::from([("label".to_owned(), vec![format!("{INSTANCE_LABEL}={instance}")])]));
    let doing = |what: &str| {
        let doing = format!("list {what} of instance {instance}");
        move |source| EngineError { doing, source }
    };

    let options = ListContainersOptions { all: true, filters: filters(), ..ListContainersOptions::default() };
    for container in engine.docker.list_containers(Some(options)).await.map_err(doing("containers"))? {
        let Some(id) = container.id.filter(|_| !kept(container.labels.as_ref())) else { continue };
        found += 1;
        if let Err(error) = engine.remove(&id).await {
            left.push((format!("container {id}"), error.message()));
        }
    }
    let options = ListNetworksOptions { filters: filters() };
    for network in engine.docker.list_networks(Some(options)).await.map_err(doing("networks"))? {
        let Some(name) = network.name else { continue };
        found += 1;
        if let Err(error) = engine.docker.remove_network(&name).await {
            // 403: a kept job's container is in it.
            let in_use = status(&error) == Some(403) && !keep.is_empty();
            if status(&error) != Some(404) && !in_use {
                left.push((format!("network {name}"), error.to_string()));
            }
        }
    }
    let options = ListVolumesOptions { filters: filters() };
    let volumes = engine.docker.list_volumes(Some(options)).await.map_err(doing("volumes"))?;
    for volume in volumes.volumes.unwrap_or_default() {
        if kept(Some(&volume.labels)) {
            continue;
        }
        found += 1;
        let force = RemoveVolumeOptions { force: true };
        if let Err(error) = engine.docker.remove_volume(&volume.name, Some(force)).await
            && status(&error) != Some(404)
        {
            left.push((format!("volume {}", volume.name), error.to_string()));
        }
    }
    cgroup::remove_all_but(engine.facts(), instance, &|id| keep.contains(&id));
    match left.into_iter().next() {
        None => Ok(found),
        Some((what, why)) => Err(TeardownError::Left { what, why }),
    }
}

/// Ends everything that an instance has on this box; its agent must be dead. The local provider runs this as
/// `pilotlight-agent clean`. `left` says that the agent left by itself and had nothing under way with Docker; one that
/// was killed may have asked for something that appears only after it was looked for.
///
/// # Errors
/// When something may be left: call it again.
pub async fn teardown(
    engine: &Engine,
    agent_dir: &Path,
    instance: InstanceId,
    left: bool,
) -> Result<(), TeardownError> {
    let assignments = assignments(agent_dir)?;
    for id in &assignments {
        engine.cgroup(instance, *id).kill().await;
    }
    reap(engine, instance, &BTreeSet::new()).await?;
    failpoint!("clean.once.reaped");
    if !left {
        for _ in 0..LOOKS {
            tokio::time::sleep(LOOK_AGAIN).await;
            if reap(engine, instance, &BTreeSet::new()).await? == 0 {
                break;
            }
        }
    }
    for id in &assignments {
        // With its container gone an attach process ends by itself; one that hangs is helped.
        end_attach(&AssignmentDir::new(agent_dir, *id)).await;
        engine.cgroup(instance, *id).remove();
    }
    Ok(())
}

fn assignments(agent_dir: &Path) -> Result<Vec<AssignmentId>, TeardownError> {
    let path = agent_dir.join("assignments");
    let failed = |source| TeardownError::Dir { path: path.display().to_string(), source };
    match std::fs::read_dir(&path) {
        Ok(entries) => entries
            .map(|entry| Ok(entry.map_err(failed)?.file_name().to_str().and_then(|name| name.parse().ok())))
            .filter_map(Result::transpose)
            .collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(failed(error)),
    }
}

/// Ends the attach process of an assignment and waits until it has let go of its lock.
pub(crate) async fn end_attach(dir: &AssignmentDir) {
    let deadline = tokio::time::Instant::now() + ATTACH_END;
    while let Some(pid) = attach_pid(dir) {
        if let Err(error) = kill_process(pid, Signal::KILL) {
            tracing::debug!(error = %Report(&error), "attach process not killed");
        }
        if tokio::time::Instant::now() >= deadline {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The pid of the living attach process of an assignment. The lock tells the living from the dead: a pid is used again.
/// One that has just taken the lock may not have written its pid yet, so the process must look like ours, too.
pub(crate) fn attach_pid(dir: &AssignmentDir) -> Option<Pid> {
    let path = dir.attach_lock();
    let file = File::open(&path).ok()?;
    match file.try_lock_shared() {
        Err(TryLockError::WouldBlock) => {}
        Ok(()) | Err(TryLockError::Error(_)) => return None,
    }
    let pid = Pid::from_raw(std::fs::read_to_string(&path).ok()?.lines().next()?.parse().ok()?)?;
    let command = std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).ok()?;
    let assignment = dir.path().file_name()?.as_encoded_bytes();
    command.split(|byte| *byte == 0).any(|word| word == assignment).then_some(pid)
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Write};

    use super::*;

    #[test]
    fn only_a_process_that_holds_the_lock_and_looks_like_ours_is_taken_for_the_attach_process() {
        let agent_dir = tempfile::tempdir().unwrap();
        let dir = AssignmentDir::new(agent_dir.path(), "018f0000-0000-7000-8000-000000000001".parse().unwrap());
        assert_eq!(attach_pid(&dir), None);
        fs::create_dir_all(dir.path()).unwrap();
        // Our own pid, as an earlier process would have left it for a later one to be killed by.
        let mut file = File::create(dir.attach_lock()).unwrap();
        writeln!(file, "{}", std::process::id()).unwrap();
        assert_eq!(attach_pid(&dir), None);
        file.lock().unwrap();
        assert_eq!(attach_pid(&dir), None);
    }
}
