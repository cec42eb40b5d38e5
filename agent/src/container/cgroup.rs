//! One cgroup per assignment: everything its containers start is in it, so it can be measured and killed as one.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use pilotlight_wire::{AssignmentId, InstanceId, Usage};
use rustix::process::{Pid, Signal, kill_process};

use super::Facts;

const ROOT: &str = "/sys/fs/cgroup";

/// How long killed processes may take to go.
const KILL_TIME: Duration = Duration::from_secs(10);

/// The cgroup of one assignment, cgroups of version 1 or 2.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup {
    /// What Docker is told.
    parent: String,
    /// Its path beneath a hierarchy's root.
    path: PathBuf,
    v2: bool,
}

impl Cgroup {
    pub(super) fn new(facts: &Facts, instance: InstanceId, assignment: AssignmentId) -> Self {
        if facts.systemd_cgroups {
            // A dash in a slice's name is a level of its own, so the id goes without.
            let slice = format!("pilotlight-{}.slice", assignment.uuid().simple());
            let path = Path::new("pilotlight.slice").join(&slice);
            return Self { parent: slice, path, v2: facts.cgroup_v2 };
        }
        let path = Path::new("pilotlight").join(instance.to_string()).join(assignment.to_string());
        Self { parent: format!("/{}", path.display()), path, v2: facts.cgroup_v2 }
    }

    /// What Docker is told as the container's cgroup parent.
    #[must_use]
    pub fn parent(&self) -> &str {
        &self.parent
    }

    /// Its directory in every hierarchy that has it.
    fn dirs(&self) -> Vec<PathBuf> {
        let roots = if self.v2 { vec![PathBuf::from(ROOT)] } else { subdirectories(Path::new(ROOT)) };
        roots.into_iter().map(|root| root.join(&self.path)).filter(|dir| dir.is_dir()).collect()
    }

    fn read(&self, controller: &str, file: &str) -> Option<String> {
        let root = if self.v2 { PathBuf::from(ROOT) } else { Path::new(ROOT).join(controller) };
        fs::read_to_string(root.join(&self.path).join(file)).ok()
    }

    /// Adds what it used to a usage.
    pub fn measure(&self, usage: &mut Usage) {
        #[expect(clippy::cast_precision_loss, reason = "a century in microseconds is exact enough")]
        let seconds = |count: u64, per_second: f64| count as f64 / per_second;
        if self.v2 {
            let stat = self.read("", "cpu.stat").unwrap_or_default();
            let micros = stat.lines().find_map(|line| line.strip_prefix("usage_usec ")?.parse().ok());
            usage.cpu_seconds = micros.map(|micros| seconds(micros, 1e6));
            usage.memory_peak_bytes = number(self.read("", "memory.peak"));
        } else {
            usage.cpu_seconds = number(self.read("cpuacct", "cpuacct.usage")).map(|nanos| seconds(nanos, 1e9));
            usage.memory_peak_bytes = number(self.read("memory", "memory.max_usage_in_bytes"));
        }
    }

    /// Kills everything in it, double-forked or not, and waits until it is empty. Says whether it was there and is.
    pub async fn kill(&self) -> bool {
        let deadline = tokio::time::Instant::now() + KILL_TIME;
        loop {
            if self.v2 {
                for dir in self.dirs() {
                    // Linux before 5.14 has no such file; the signals below serve.
                    let _old = fs::write(dir.join("cgroup.kill"), "1");
                }
            }
            let pids = self.pids();
            for pid in &pids {
                // It may have gone by itself.
                let _gone = kill_process(*pid, Signal::KILL);
            }
            if pids.is_empty() || tokio::time::Instant::now() >= deadline {
                return pids.is_empty() && !self.dirs().is_empty();
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn pids(&self) -> Vec<Pid> {
        let mut pids = Vec::new();
        let mut dirs = self.dirs();
        while let Some(dir) = dirs.pop() {
            let procs = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
            pids.extend(procs.lines().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)));
            dirs.extend(subdirectories(&dir));
        }
        pids.sort_unstable_by_key(|pid| pid.as_raw_nonzero());
        pids.dedup();
        pids
    }

    /// Removes its directories; one with processes in it stays, and so does a parent that others use.
    pub fn remove(&self) {
        for dir in self.dirs() {
            remove_tree(&dir);
            // The instance's own directory goes with its last assignment.
            if let Some(parent) = dir.parent() {
                let _others_use_it = fs::remove_dir(parent);
            }
        }
    }
}

/// Removes the cgroups of every assignment of an instance that is not kept.
pub(super) fn remove_all_but(facts: &Facts, instance: InstanceId, keep: &dyn Fn(AssignmentId) -> bool) {
    if facts.systemd_cgroups {
        // Slices are named by assignment only; each is removed with its assignment.
        return;
    }
    let roots = if facts.cgroup_v2 { vec![PathBuf::from(ROOT)] } else { subdirectories(Path::new(ROOT)) };
    for root in roots {
        let dir = root.join("pilotlight").join(instance.to_string());
        for child in subdirectories(&dir) {
            let id = child.file_name().and_then(|name| name.to_str()?.parse().ok());
            if id.is_some_and(|id| !keep(id)) {
                remove_tree(&child);
            }
        }
        let _kept_ones_are_in_it = fs::remove_dir(&dir);
        let _other_instances_use_it = fs::remove_dir(root.join("pilotlight"));
    }
}

fn remove_tree(dir: &Path) {
    for child in subdirectories(dir) {
        remove_tree(&child);
    }
    match fs::remove_dir(dir) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => tracing::debug!(dir = %dir.display(), %error, "cgroup not removed"),
    }
}

fn subdirectories(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    // Links, such as cpu -> cpu,cpuacct, name a hierarchy twice.
    entries
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect()
}

fn number(text: Option<String>) -> Option<u64> {
    text?.trim().parse().ok()
}
