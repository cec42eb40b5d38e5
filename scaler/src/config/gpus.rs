//! The GPUs of this box, and which local placement may hand out which of them (link 10).

use std::{collections::BTreeMap, fs, io, path::Path};

use pilotlight_wire::GpuId;

/// Where the NVIDIA driver lists its GPUs, one directory each, named by PCI address.
pub(crate) const DRIVER_GPUS: &str = "/proc/driver/nvidia/gpus";

/// Why the GPUs of this box are not known.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    /// The driver's files could not be read.
    #[error("cannot read {path}")]
    Read {
        /// The file or directory.
        path: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The driver tells no UUID until something has opened the GPU.
    #[error("{path} has no GPU UUID yet: run `nvidia-smi -L` once, or turn persistence mode on")]
    NoUuid {
        /// The file.
        path: String,
    },
}

/// Reads the UUIDs of this box's GPUs in PCI order. No driver is no GPUs; a driver that cannot be read is an error,
/// since absence is not emptiness.
///
/// # Errors
/// When a file of the driver cannot be read or names no UUID.
pub fn of_box(root: &Path) -> Result<Vec<GpuId>, GpuError> {
    let read = |path: &Path, source| GpuError::Read { path: path.display().to_string(), source };
    let entries = match fs::read_dir(root) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(read(root, error)),
    };
    // Directory names are `domain:bus:device.function` in hex of fixed width, so a sorted map is in PCI order.
    let mut by_address = BTreeMap::new();
    for entry in entries {
        let entry = entry.map_err(|error| read(root, error))?;
        let path = entry.path().join("information");
        let text = fs::read_to_string(&path).map_err(|error| read(&path, error))?;
        let uuid = text.lines().find_map(|line| line.strip_prefix("GPU UUID:")).map(str::trim).unwrap_or_default();
        if !uuid.starts_with("GPU-") || uuid.contains('?') {
            return Err(GpuError::NoUuid { path: path.display().to_string() });
        }
        by_address.insert(entry.file_name(), GpuId(uuid.to_owned()));
    }
    Ok(by_address.into_values().collect())
}

/// What a local placement's `gpus` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    /// `"all"`: split evenly over the placement's instances.
    All,
    /// So many per instance.
    Each(u32),
    /// These, split evenly over the placement's instances.
    These(Vec<GpuId>),
}

/// What a placement got: GPUs of one instance, and the GPUs to take them from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) per_instance: u32,
    pub(crate) ids: Vec<GpuId>,
    /// Listed by the config but not seen on this box.
    pub(crate) unseen: Vec<GpuId>,
}

/// Gives placements their GPUs, none to two of them. Lists must be taken first, then numbers, then `"all"`, so that a
/// number never takes what a list names: see [`Wish::order`].
pub(crate) struct Takings<'b> {
    here: &'b [GpuId],
    taken: BTreeMap<GpuId, String>,
}

impl Wish {
    /// Wishes with a lower order are granted first.
    pub(crate) fn order(&self) -> u8 {
        match self {
            Self::These(_) => 0,
            Self::Each(_) => 1,
            Self::All => 2,
        }
    }
}

impl<'b> Takings<'b> {
    pub(crate) fn new(here: &'b [GpuId]) -> Self {
        Self { here, taken: BTreeMap::new() }
    }

    /// Takes GPUs for `placement`, or says why not.
    pub(crate) fn take(&mut self, placement: &str, wish: &Wish, instances: u32) -> Result<Share, String> {
        let ids = match wish {
            Wish::All => self.here.to_vec(),
            Wish::These(ids) => ids.clone(),
            Wish::Each(each) => {
                let wanted = usize::try_from(u64::from(*each) * u64::from(instances)).unwrap_or(usize::MAX);
                let free: Vec<_> = self.here.iter().filter(|id| !self.taken.contains_key(id)).cloned().collect();
                if free.len() < wanted {
                    let others = self.here.len() - free.len();
                    let taken = if others == 0 { String::new() } else { format!(", {others} of them given to others") };
                    return Err(format!(
                        "{each} GPUs × max_instances {instances} = {wanted}, but this box has {}{taken}",
                        self.here.len()
                    ));
                }
                free.into_iter().take(wanted).collect()
            }
        };
        let count = u32::try_from(ids.len()).unwrap_or(u32::MAX);
        if !count.is_multiple_of(instances) {
            return Err(format!(
                "{count} GPUs do not split evenly over max_instances {instances}: {} would be left over",
                count % instances
            ));
        }
        for (n, id) in ids.iter().enumerate() {
            if ids.iter().take(n).any(|earlier| earlier == id) {
                return Err(format!("{id} is listed twice"));
            }
            if let Some(owner) = self.taken.get(id) {
                return Err(format!("{id} is already given to placement {owner}; a GPU has one placement"));
            }
        }
        self.taken.extend(ids.iter().map(|id| (id.clone(), placement.to_owned())));
        let unseen = ids.iter().filter(|id| !self.here.contains(id)).cloned().collect();
        Ok(Share { per_instance: count / instances, ids, unseen })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(names: &[&str]) -> Vec<GpuId> {
        names.iter().map(|name| GpuId(format!("GPU-{name}"))).collect()
    }

    fn driver(gpus: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (address, uuid) in gpus {
            fs::create_dir(root.path().join(address)).unwrap();
            let text = format!("Model: \t\t NVIDIA H200\nIRQ:   \t\t 35\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\n");
            fs::write(root.path().join(address).join("information"), text).unwrap();
        }
        root
    }

    #[test]
    fn uuids_come_in_pci_order() {
        let root = driver(&[("0000:9a:00.0", "GPU-c"), ("0000:1b:00.0", "GPU-a"), ("0000:43:00.0", "GPU-b")]);
        assert_eq!(of_box(root.path()).unwrap(), ids(&["a", "b", "c"]));
    }

    #[test]
    fn no_driver_is_no_gpus_but_an_unreadable_one_is_an_error() {
        let root = driver(&[("0000:1b:00.0", "GPU-????????-????-????-????-????????????")]);
        assert!(matches!(of_box(root.path()), Err(GpuError::NoUuid { .. })));
        assert_eq!(of_box(&root.path().join("none")).unwrap(), []);
        fs::remove_file(root.path().join("0000:1b:00.0/information")).unwrap();
        assert!(matches!(of_box(root.path()), Err(GpuError::Read { .. })));
    }

    #[test]
    fn shares_are_even_and_disjoint() {
        let here = ids(&["a", "b", "c", "d"]);
        let all = Takings::new(&here).take("p", &Wish::All, 2).unwrap();
        assert_eq!((all.per_instance, all.ids.len()), (2, 4));
        let left = Takings::new(&here).take("p", &Wish::All, 3).unwrap_err();
        assert_eq!(left, "4 GPUs do not split evenly over max_instances 3: 1 would be left over");

        let mut takings = Takings::new(&here);
        takings.take("one", &Wish::These(ids(&["b"])), 1).unwrap();
        assert_eq!(takings.take("two", &Wish::Each(1), 2).unwrap().ids, ids(&["a", "c"]));
        assert_eq!(
            takings.take("three", &Wish::Each(2), 1).unwrap_err(),
            "2 GPUs × max_instances 1 = 2, but this box has 4, 3 of them given to others"
        );
        assert!(takings.take("four", &Wish::All, 1).unwrap_err().contains("already given to placement"));
        assert!(takings.take("five", &Wish::These(ids(&["x", "x"])), 1).unwrap_err().contains("listed twice"));
        assert_eq!(takings.take("six", &Wish::These(ids(&["x"])), 1).unwrap().unseen, ids(&["x"]));
    }

    #[test]
    fn all_of_a_box_without_gpus_is_none() {
        assert_eq!(Takings::new(&[]).take("p", &Wish::All, 3).unwrap().per_instance, 0);
    }
}
