//! Which way GPUs get into a container: by UUID, CDI first. Never by count: two jobs with one GPU each would share one.

use std::{fs, path::PathBuf};

use bollard::models::DeviceRequest;
use pilotlight_wire::GpuId;

use super::Facts;

/// What goes into the create request for a job's GPUs.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct GpuRequest {
    pub(super) devices: Option<Vec<DeviceRequest>>,
    pub(super) runtime: Option<String>,
    /// `NVIDIA_VISIBLE_DEVICES`; always ours: images carry `all`, and a runtime that is the default would obey.
    pub(super) visible: String,
}

/// The way for these GPUs: CDI where a spec names them all, else the `nvidia` runtime, else the `nvidia` driver.
pub(super) fn request(facts: &Facts, gpus: &[GpuId]) -> GpuRequest {
    let ids: Vec<String> = gpus.iter().map(|gpu| gpu.0.clone()).collect();
    let all = ids.join(",");
    if gpus.is_empty() {
        return GpuRequest { visible: "void".to_owned(), ..GpuRequest::default() };
    }
    if named_by_cdi(&facts.cdi_dirs, gpus) {
        let device = DeviceRequest {
            driver: Some("cdi".to_owned()),
            device_ids: Some(ids.iter().map(|id| format!("nvidia.com/gpu={id}")).collect()),
            ..DeviceRequest::default()
        };
        return GpuRequest { devices: Some(vec![device]), runtime: None, visible: "void".to_owned() };
    }
    if facts.nvidia_runtime {
        return GpuRequest { devices: None, runtime: Some("nvidia".to_owned()), visible: all };
    }
    let device = DeviceRequest {
        driver: Some("nvidia".to_owned()),
        device_ids: Some(ids),
        capabilities: Some(vec![["gpu", "compute", "utility"].map(str::to_owned).to_vec()]),
        ..DeviceRequest::default()
    };
    GpuRequest { devices: Some(vec![device]), runtime: None, visible: all }
}

/// Whether the specs name every GPU. A UUID stands in a spec as a device's name and nowhere else.
fn named_by_cdi(dirs: &[PathBuf], gpus: &[GpuId]) -> bool {
    let specs: Vec<String> = dirs
        .iter()
        .filter_map(|dir| fs::read_dir(dir).ok())
        .flat_map(|entries| entries.flatten())
        .filter_map(|entry| fs::read_to_string(entry.path()).ok())
        .collect();
    gpus.iter().all(|gpu| specs.iter().any(|spec| spec.contains(&gpu.0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(cdi_dirs: Vec<PathBuf>, nvidia_runtime: bool) -> Facts {
        Facts {
            version: String::new(),
            cgroup_v2: false,
            systemd_cgroups: false,
            cdi_dirs,
            nvidia_runtime,
            live_restore: false,
            root: PathBuf::new(),
        }
    }

    #[test]
    fn cdi_then_runtime_then_driver_and_never_a_count() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("x.json"), r#"{"devices":[{"name":"GPU-a"},{"name":"GPU-b"}]}"#).unwrap();
        let dirs = vec![dir.path().to_owned()];
        let (a, c) = (GpuId("GPU-a".to_owned()), GpuId("GPU-c".to_owned()));

        let cdi = request(&facts(dirs.clone(), true), std::slice::from_ref(&a));
        assert_eq!(cdi.devices.unwrap()[0].device_ids, Some(vec!["nvidia.com/gpu=GPU-a".to_owned()]));
        assert_eq!((cdi.runtime, cdi.visible.as_str()), (None, "void"));

        let runtime = request(&facts(dirs.clone(), true), &[a.clone(), c.clone()]);
        assert_eq!((runtime.devices, runtime.runtime.as_deref()), (None, Some("nvidia")));
        assert_eq!(runtime.visible, "GPU-a,GPU-c");

        let driver = request(&facts(dirs.clone(), false), &[c]).devices.unwrap();
        assert_eq!((driver[0].driver.as_deref(), driver[0].count), (Some("nvidia"), None));

        let none = request(&facts(dirs, true), &[]);
        assert_eq!(none, GpuRequest { visible: "void".to_owned(), ..GpuRequest::default() });
    }
}
