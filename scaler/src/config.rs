//! The scaler's config: a TOML file, checked whole, resolved into a valid form (design 2, docs/config.md).
//!
//! [`load`] reports everything that is wrong with a file in one go, each with its line. What comes out is valid:
//! nothing after it has to ask again whether a pool or a placement exists.

mod document;
mod files;
mod forge;
mod gpus;
mod local;
mod tables;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    fmt, fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use jiff::SignedDuration;
use pilotlight_wire::{ForgeName, GpuId, LabelName, PlacementName, PoolName};
use toml::{Spanned, de::DeTable};

pub use self::{
    document::Finding,
    forge::{GiteaForge, Scope, allows},
    gpus::{GpuError, of_box},
};
use self::{
    document::{Document, Section},
    files::Content,
};
use crate::fleet::{Label, Placement, Pool, Settings};

/// Where the scaler listens when the file does not say.
pub const DEFAULT_LISTEN: &str = "127.0.0.1:8470";
/// Where the scaler keeps its state when neither the file nor a flag says.
pub const DEFAULT_STATE_DIR: &str = "/var/lib/pilotlight";

/// A config in its valid form.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Where the scaler listens; always a loopback address.
    pub listen: SocketAddr,
    /// Where it keeps its state, absolute.
    pub state_dir: PathBuf,
    /// How long an agent lives without an answer.
    pub lease: SignedDuration,
    /// Bytes of log kept of one job.
    pub max_log: u64,
    /// How long the logs of finished jobs are kept.
    pub keep_logs: SignedDuration,
    /// What jobs may ask for.
    pub labels: BTreeMap<LabelName, Label>,
    /// Pools; the placements of each exist.
    pub pools: BTreeMap<PoolName, Pool>,
    /// Placements; no two have a GPU in common.
    pub placements: BTreeMap<PlacementName, Placement>,
    /// Forges, besides the built-in queue.
    pub forges: BTreeMap<ForgeName, GiteaForge>,
    /// A file of 32 bytes that only we may read (link 1); absent: made in the state directory.
    pub key_file: Option<PathBuf>,
    /// A file with the admin's token; absent: made in the state directory.
    pub admin_token_file: Option<PathBuf>,
}

/// What a running scaler takes from a new config besides the fleet's own settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// How long an agent lives without an answer.
    pub lease: Duration,
    /// Bytes of log kept of one job.
    pub max_log: u64,
    /// How long the logs of finished jobs are kept.
    pub keep_logs: Duration,
}

impl Config {
    /// What may change while the scaler runs.
    #[must_use]
    pub fn rules(&self) -> Rules {
        Rules {
            lease: Duration::try_from(self.lease).unwrap_or_default(),
            max_log: self.max_log,
            keep_logs: Duration::try_from(self.keep_logs).unwrap_or_default(),
        }
    }

    /// What the fleet core goes by.
    #[must_use]
    pub fn settings(&self) -> Settings {
        Settings {
            lease: self.lease,
            labels: self.labels.clone(),
            pools: self.pools.clone(),
            placements: self.placements.clone(),
            forges: self.forges.values().map(|forge| (forge.name.clone(), forge.rules())).collect(),
        }
    }

    /// The keys that another config changes and that a running scaler cannot follow.
    #[must_use]
    pub fn needs_restart(&self, other: &Self) -> Vec<&'static str> {
        let keys = [
            ("listen", self.listen != other.listen),
            ("state_dir", self.state_dir != other.state_dir),
            ("key_file", self.key_file != other.key_file),
            ("admin_token_file", self.admin_token_file != other.admin_token_file),
            ("forge", self.forges != other.forges),
        ];
        keys.into_iter().filter(|(_, changed)| *changed).map(|(key, _)| key).collect()
    }
}

/// What of its surroundings a config is checked against.
#[derive(Clone, Debug)]
pub struct Surroundings {
    /// Where the NVIDIA driver lists its GPUs.
    pub gpu_root: PathBuf,
    /// systemd's `$CREDENTIALS_DIRECTORY`.
    pub credentials: Option<PathBuf>,
    /// The state directory of the command line, absolute; it wins over the file's.
    pub state_dir: Option<PathBuf>,
}

impl Surroundings {
    /// Those of this process.
    #[must_use]
    pub fn of_this_box() -> Self {
        Self {
            gpu_root: PathBuf::from(gpus::DRIVER_GPUS),
            credentials: std::env::var_os("CREDENTIALS_DIRECTORY").map(PathBuf::from),
            state_dir: None,
        }
    }
}

/// A config without errors.
#[derive(Clone, Debug)]
pub struct Valid {
    /// The config.
    pub config: Config,
    /// The GPUs of this box, in PCI order.
    pub box_gpus: Vec<GpuId>,
    /// What is odd about it.
    pub warnings: Vec<Finding>,
}

/// A config with errors: exit code 78.
#[derive(Clone, Debug)]
pub struct Invalid {
    /// What is wrong with it; never empty.
    pub errors: Vec<Finding>,
    /// What is odd about it.
    pub warnings: Vec<Finding>,
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, error) in self.errors.iter().enumerate() {
            write!(f, "{}{error}", if n == 0 { "" } else { "\n" })?;
        }
        Ok(())
    }
}

impl std::error::Error for Invalid {}

/// Reads and checks a config file.
///
/// # Errors
/// All that is wrong with it, in the order of its lines.
pub fn load(path: &Path, around: &Surroundings) -> Result<Valid, Invalid> {
    match fs::read_to_string(path) {
        Ok(text) => check(path, &text, around),
        Err(error) => {
            let message = format!("cannot be read: {error}");
            let finding = Finding { file: path.to_owned(), line: None, key: String::new(), message };
            Err(Invalid { errors: vec![finding], warnings: Vec::new() })
        }
    }
}

/// Checks the text of a config file.
///
/// # Errors
/// All that is wrong with it, in the order of its lines.
pub fn check(path: &Path, text: &str, around: &Surroundings) -> Result<Valid, Invalid> {
    let document = Document::new(path.to_owned(), text);
    let (root, syntax) = DeTable::parse_recoverable(text);
    if !syntax.is_empty() {
        for error in syntax {
            document.error(error.span().map_or(0, |span| span.start), "", error.message());
        }
        // What a recovering parser makes of the rest would only mislead.
        let (errors, warnings) = document.into_findings();
        return Err(Invalid { errors, warnings });
    }
    let (config, box_gpus) = resolve(&document, root.get_ref(), around);
    let (errors, warnings) = document.into_findings();
    if errors.is_empty() { Ok(Valid { config, box_gpus, warnings }) } else { Err(Invalid { errors, warnings }) }
}

/// What a client on the same box wants to know of a config that it may otherwise not be able to judge.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Hints {
    pub(crate) listen: Option<SocketAddr>,
    pub(crate) state_dir: Option<PathBuf>,
    pub(crate) admin_token_file: Option<PathBuf>,
}

/// Reads where the scaler of a config is to be found, without judging the rest of the file.
///
/// # Errors
/// When the file cannot be read or is no TOML.
pub(crate) fn hints(path: &Path) -> Result<Hints, Invalid> {
    let text = fs::read_to_string(path);
    let parsed = text
        .as_deref()
        .map_err(ToString::to_string)
        .and_then(|text| DeTable::parse(text).map_err(|error| error.message().to_owned()));
    let root = parsed.map_err(|message| {
        let finding = Finding { file: path.to_owned(), line: None, key: String::new(), message };
        Invalid { errors: vec![finding], warnings: Vec::new() }
    })?;
    let text_of = |key: &str| root.get_ref().get(key).and_then(|value| value.get_ref().as_str().map(ToOwned::to_owned));
    Ok(Hints {
        listen: text_of("listen").and_then(|text| text.parse().ok()),
        state_dir: text_of("state_dir").map(PathBuf::from),
        admin_token_file: text_of("admin_token_file").map(PathBuf::from),
    })
}

/// Walks the whole file. With errors the result holds defaults in their place and must not be used.
fn resolve(document: &Document<'_>, table: &DeTable<'_>, around: &Surroundings) -> (Config, Vec<GpuId>) {
    let mut root = Section::root(document, table);
    let listen = listen(&mut root);
    let in_file = root.absolute_path("state_dir").map(Spanned::into_inner);
    let state_dir = around.state_dir.clone().or(in_file).unwrap_or_else(|| PathBuf::from(DEFAULT_STATE_DIR));
    let lease = duration(&mut root, "lease", Duration::from_secs(600), Duration::from_secs(1));
    let max_log = match root.size("max_log") {
        Some(size) if size.get_ref().0 == 0 => {
            root.error("max_log", &size, "no log at all would be kept: write at least \"1MiB\"");
            0
        }
        Some(size) => size.into_inner().0,
        None => 1 << 30,
    };
    let keep_logs = duration(&mut root, "keep_logs", Duration::from_secs(14 * 86_400), Duration::ZERO);
    let key_file = secret(&mut root, "key_file", Content::Key, around);
    let admin_token_file = secret(&mut root, "admin_token_file", Content::Token, around);
    let (forges, served) = forge::forges(document, &mut root, around);
    let labels = tables::labels(document, &mut root);
    let pools = tables::pools(document, &mut root, &state_dir);
    let (placements, box_gpus) = local::placements(document, &mut root, &around.gpu_root);
    root.finish();

    tables::check_references(document, &labels, &pools, &placements);
    tables::check_forges(document, &served, &labels, &pools);
    let config = Config {
        listen,
        state_dir,
        lease,
        max_log,
        keep_logs,
        labels: labels.valid.into_iter().map(|form| (form.value.name.clone(), form.value)).collect(),
        pools: pools.valid.into_iter().map(|form| (form.value.name.clone(), form.value)).collect(),
        placements: placements.valid.into_iter().map(|form| (form.value.name.clone(), form.value)).collect(),
        forges,
        key_file,
        admin_token_file,
    };
    (config, box_gpus)
}

fn listen(root: &mut Section<'_, '_>) -> SocketAddr {
    let default = SocketAddr::from(([127, 0, 0, 1], 8470));
    let not = "an address and a port, such as \"127.0.0.1:8470\" or \"[::1]:8470\"";
    let Some(listen) = root.leaf("listen", not, |value| value.as_str()?.parse::<SocketAddr>().ok()) else {
        return default;
    };
    if !listen.get_ref().ip().is_loopback() {
        let message = format!(
            "{:?} is not a loopback address: there is no TLS yet, so tokens and job secrets would cross the network in \
             the clear; listen on 127.0.0.1 or [::1] and reach it through an SSH tunnel or a TLS proxy on this box",
            listen.get_ref().to_string()
        );
        root.error("listen", &listen, message);
    }
    listen.into_inner()
}

fn secret(root: &mut Section<'_, '_>, key: &'static str, content: Content, around: &Surroundings) -> Option<PathBuf> {
    let path = root.absolute_path(key)?;
    if let Err(error) = files::check(path.get_ref(), content, around.credentials.as_deref()) {
        root.error(key, &path, error.to_string());
    }
    Some(path.into_inner())
}

/// Reads a duration of at least `least`.
fn duration(section: &mut Section<'_, '_>, key: &'static str, default: Duration, least: Duration) -> SignedDuration {
    let read = section.span(key);
    if let Some(span) = read.as_ref().filter(|span| span.get_ref().0 < least) {
        let least = pilotlight_runtime::units::Span(least);
        section.error(key, span, format!("{} is too short: write at least \"{least}\"", section.raw(span)));
    }
    let chosen = read.map_or(default, |span| span.into_inner().0);
    // A `Span` is at most a century, which always fits.
    SignedDuration::try_from(chosen).unwrap_or(SignedDuration::MAX)
}
