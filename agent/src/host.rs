//! What the machine is and how it is: inventory at enrolment, samples for the sync.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use jiff::Timestamp;
use pilotlight_wire::{
    GpuId,
    agent::{Gpu, Health, HostSample, Inventory},
};
use sysinfo::{CpuRefreshKind, MemoryRefreshKind, RefreshKind, System};

/// Why the machine could not be looked at.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The kernel's counters.
    #[error("cannot read the kernel's counters")]
    Counters(#[from] sysinfo::Error),
    /// The file system of the agent's directory.
    #[error("cannot read how full the disk is")]
    Disk(#[source] io::Error),
}

/// Where the facts lie; another root in tests.
#[derive(Clone, Debug)]
pub struct Roots {
    /// The NVIDIA driver's directory in `/proc`.
    pub nvidia: PathBuf,
    /// Directories of CDI specs.
    pub cdi: Vec<PathBuf>,
}

impl Default for Roots {
    fn default() -> Self {
        Self { nvidia: "/proc/driver/nvidia".into(), cdi: vec!["/etc/cdi".into(), "/var/run/cdi".into()] }
    }
}

/// Looks at the machine. `wanted` are the bootstrap's GPUs (all when absent), `docker` is Docker's version if it
/// answered.
///
/// # Errors
/// When the kernel does not say what the machine has.
pub fn inventory(
    dir: &Path,
    roots: &Roots,
    wanted: Option<&[GpuId]>,
    docker: Option<String>,
) -> Result<(Inventory, Health), HostError> {
    let system = System::new_with_specifics(
        RefreshKind::nothing().with_cpu(CpuRefreshKind::nothing()).with_memory(MemoryRefreshKind::nothing().with_ram()),
    )?;
    let gpus = gpus(roots, wanted);
    let mut problems = Vec::new();
    if docker.is_none() {
        problems.push("Docker does not answer".to_owned());
    }
    for gpu in wanted.unwrap_or_default().iter().filter(|wanted| gpus.iter().all(|gpu| gpu.uuid != **wanted)) {
        problems.push(format!("{gpu} is not on this machine, or its driver does not list it"));
    }
    let inventory = Inventory {
        gpus,
        driver: driver(&roots.nvidia),
        cpus: u32::try_from(system.cpus().len()).unwrap_or(u32::MAX),
        memory_bytes: system.total_memory(),
        disk_free_bytes: disk_free(dir)?,
        docker,
        kernel: System::kernel_version()?,
    };
    Ok((inventory, Health { problems }))
}

/// The GPUs that are there and may be used: those that the driver lists, and those of the bootstrap that a CDI spec
/// names, because a runtime can hand those out too.
fn gpus(roots: &Roots, wanted: Option<&[GpuId]>) -> Vec<Gpu> {
    let mut gpus: Vec<Gpu> = texts(&roots.nvidia.join("gpus"), Some("information"))
        .iter()
        .filter_map(|text| driver_gpu(text))
        .filter(|gpu| wanted.is_none_or(|wanted| wanted.contains(&gpu.uuid)))
        .collect();
    let specs: Vec<String> = roots.cdi.iter().flat_map(|dir| texts(dir, None)).collect();
    for uuid in wanted.unwrap_or_default() {
        let listed = gpus.iter().any(|gpu| gpu.uuid == *uuid);
        if !listed && specs.iter().any(|spec| names(spec, &uuid.0)) {
            gpus.push(Gpu { uuid: uuid.clone(), model: "known to CDI only".to_owned(), pci: String::new() });
        }
    }
    gpus.sort_by(|a, b| (&a.pci, &a.uuid).cmp(&(&b.pci, &b.uuid)));
    gpus
}

/// Whether a CDI spec, JSON or YAML, has the word.
fn names(spec: &str, uuid: &str) -> bool {
    spec.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-')).any(|word| word == uuid)
}

fn driver_gpu(information: &str) -> Option<Gpu> {
    let field = |name: &str| {
        information
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            .map(|value| value.trim().to_owned())
    };
    Some(Gpu {
        uuid: GpuId(field("GPU UUID").filter(|uuid| uuid.starts_with("GPU-") && !uuid.contains('?'))?),
        model: field("Model").unwrap_or_default(),
        pci: field("Bus Location").unwrap_or_default(),
    })
}

/// `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build …`: the first word of digits
/// and dots.
fn driver(nvidia: &Path) -> Option<String> {
    let text = fs::read_to_string(nvidia.join("version")).ok()?;
    text.lines()
        .next()?
        .split_whitespace()
        .find(|word| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.'))
        .map(ToOwned::to_owned)
}

/// The files of a directory, or those called `inner` in its directories, as far as they can be read.
fn texts(dir: &Path, inner: Option<&str>) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().filter_map(Result::ok).map(|entry| entry.path());
    entries
        .map(|path| inner.map_or_else(|| path.clone(), |inner| path.join(inner)))
        .filter_map(|path| fs::read_to_string(path).ok())
        .collect()
}

/// Free bytes for jobs on the file system of a path.
///
/// # Errors
/// When it cannot be asked; the path may be on another machine.
pub fn disk_free(dir: &Path) -> Result<u64, HostError> {
    let stat = rustix::fs::statvfs(dir).map_err(|error| HostError::Disk(error.into()))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Takes samples of the host.
#[derive(Debug)]
pub struct Sampler {
    system: System,
    dir: PathBuf,
}

impl Sampler {
    /// A sampler; `dir` is the agent's directory, whose file system is the one that may fill up.
    ///
    /// # Errors
    /// When the kernel's counters cannot be read.
    pub fn new(dir: &Path) -> Result<Self, HostError> {
        Ok(Self { system: System::new()?, dir: dir.to_owned() })
    }

    /// How the host is now. Processor use counts from the sample before.
    ///
    /// # Errors
    /// When a counter cannot be read: no sample is better than a wrong one.
    pub fn sample(&mut self, at: Timestamp) -> Result<HostSample, HostError> {
        self.system.refresh_cpu_usage();
        self.system.refresh_memory_specifics(MemoryRefreshKind::nothing().with_ram());
        Ok(HostSample {
            at,
            cpu_percent: self.system.global_cpu_usage(),
            memory_used_bytes: self.system.used_memory(),
            disk_free_bytes: disk_free(&self.dir)?,
            load1: System::load_average()?.one,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn roots(root: &Path) -> Roots {
        Roots { nvidia: root.join("nvidia"), cdi: vec![root.join("none"), root.join("cdi")] }
    }

    fn write(path: PathBuf, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn gpus_come_from_the_driver_and_from_cdi_and_only_those_of_the_bootstrap() {
        let dir = tempfile::tempdir().unwrap();
        let information = |uuid: &str, pci: &str| {
            format!(
                "Model: \t\t NVIDIA H200\nIRQ:   \t\t 91\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\nBus Location: \t {pci}\n"
            )
        };
        write(dir.path().join("nvidia/gpus/0000:8b:00.0/information"), &information("GPU-b", "0000:8b:00.0"));
        write(dir.path().join("nvidia/gpus/0000:0a:00.0/information"), &information("GPU-a", "0000:0a:00.0"));
        write(dir.path().join("nvidia/gpus/0000:0c:00.0/information"), &information("GPU-????????", "0000:0c:00.0"));
        write(
            dir.path().join("nvidia/version"),
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 12.2.0\n",
        );
        write(dir.path().join("cdi/nvidia.yaml"), "devices:\n- name: GPU-f0\n- name: \"GPU-f01\"\n");

        let (all, health) = inventory(dir.path(), &roots(dir.path()), None, Some("26.1.5".to_owned())).unwrap();
        assert_eq!(all.gpus.iter().map(|gpu| gpu.uuid.0.as_str()).collect::<Vec<_>>(), ["GPU-a", "GPU-b"], "PCI order");
        assert_eq!(all.driver.as_deref(), Some("580.95.05"));
        assert_eq!(health.problems, [""; 0]);
        assert!(all.cpus > 0 && all.memory_bytes > 0 && all.disk_free_bytes > 0 && !all.kernel.is_empty());

        let wanted = ["GPU-b", "GPU-f0", "GPU-f"].map(|uuid| GpuId(uuid.to_owned()));
        let (some, health) = inventory(dir.path(), &roots(dir.path()), Some(&wanted), None).unwrap();
        assert_eq!(some.gpus.iter().map(|gpu| gpu.uuid.0.as_str()).collect::<Vec<_>>(), ["GPU-f0", "GPU-b"]);
        assert_eq!(health.problems.len(), 2, "no Docker, and GPU-f is nowhere: {:?}", health.problems);
    }

    #[test]
    fn a_sample_is_plausible() {
        let dir = tempfile::tempdir().unwrap();
        let sample = Sampler::new(dir.path()).unwrap().sample(Timestamp::UNIX_EPOCH).unwrap();
        assert!(sample.memory_used_bytes > 0 && sample.disk_free_bytes > 0, "{sample:?}");
    }
}
