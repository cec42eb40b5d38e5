//! Labels and pools, and whether they name each other rightly.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use pilotlight_wire::{ForgeName, PlacementName, PoolName, Volume};
use toml::Spanned;

use super::{
    document::{Document, Section, did_you_mean, integer},
    duration,
    forge::Served,
};
use crate::fleet::{Label, Placement, Pool};

/// All tables of one kind: those that could be resolved, and the names of all, so that a reference to a table with
/// errors is not a second error.
pub(super) struct Tables<T> {
    pub(super) valid: Vec<Form<T>>,
    pub(super) names: Vec<String>,
}

/// One resolved table and where it and its references stand.
pub(super) struct Form<T> {
    pub(super) value: T,
    pub(super) path: String,
    pub(super) start: usize,
    /// Names of other tables, with where they stand.
    refers: Vec<Spanned<String>>,
}

impl<T> Form<T> {
    pub(super) fn new(value: T, section: &Section<'_, '_>, refers: Vec<Spanned<String>>) -> Self {
        Self { value, path: section.own_path().to_owned(), start: section.start(), refers }
    }
}

/// A table's name, or an error and a stand-in that lets the rest of the table be read.
pub(super) fn name<K>(
    document: &Document<'_>,
    name: &Spanned<String>,
    section: &Section<'_, '_>,
) -> Option<pilotlight_wire::Name<K>> {
    match pilotlight_wire::Name::from_str(name.get_ref()) {
        Ok(parsed) => Some(parsed),
        Err(error) => {
            document.error(name.span().start, section.own_path(), error.to_string());
            None
        }
    }
}

const NAME: &str = "a name: use 1 to 63 of A-Z a-z 0-9 . _ - in quotes, beginning with a letter or digit";
const HOUR: Duration = Duration::from_secs(3600);
const MINUTE: Duration = Duration::from_secs(60);
const SECOND: Duration = Duration::from_secs(1);

pub(super) fn labels(document: &Document<'_>, root: &mut Section<'_, '_>) -> Tables<Label> {
    let mut tables = Tables { valid: Vec::new(), names: Vec::new() };
    for (given, mut section) in root.tables("label", "[label.NAME]") {
        let name = name(document, &given, &section);
        let pool = section.leaf("pool", NAME, |value| value.as_str()?.parse::<PoolName>().ok());
        section.missing("pool", "the pool that serves it, such as pool = \"here\"");
        let gpus = section.count("gpus", 0, 8).map_or(0, Spanned::into_inner);
        let timeout = duration(&mut section, "timeout", 6 * HOUR, SECOND);
        let priority =
            section.leaf("priority", "a whole number; higher goes first", |value| i32::try_from(integer(value)?).ok());
        if let (Some(name), Some(pool)) = (name, pool) {
            let refers = vec![Spanned::new(pool.span(), pool.get_ref().to_string())];
            let priority = priority.map_or(0, Spanned::into_inner);
            let label = Label { name, pool: pool.into_inner(), gpus, timeout, priority };
            tables.valid.push(Form::new(label, &section, refers));
        }
        tables.names.push(given.into_inner());
        section.finish();
    }
    tables
}

pub(super) fn pools(document: &Document<'_>, root: &mut Section<'_, '_>, state_dir: &Path) -> Tables<Pool> {
    let mut tables = Tables { valid: Vec::new(), names: Vec::new() };
    for (given, mut section) in root.tables("pool", "[pool.NAME]") {
        let name = name(document, &given, &section);
        let ladder = section.list("placements", "a list of placement names, such as [\"here\"]", NAME, |text| {
            text.parse::<PlacementName>().ok()
        });
        section.missing("placements", "the placements to try, in order, such as placements = [\"here\"]");
        let ladder = check_ladder(&section, ladder);
        let max_instances = section.count("max_instances", 1, u32::MAX).map_or(1, Spanned::into_inner);
        let min_idle = min_idle(&mut section, max_instances);
        let idle_timeout = duration(&mut section, "idle_timeout", 10 * MINUTE, Duration::ZERO);
        let boot_timeout = duration(&mut section, "boot_timeout", 20 * MINUTE, SECOND);
        let max_lifetime = duration(&mut section, "max_lifetime", 24 * HOUR, SECOND);
        let lost_after = duration(&mut section, "lost_after", HOUR, SECOND);
        let reuse = section.bool("reuse").is_none_or(Spanned::into_inner);
        let cpu_jobs = section.count("cpu_jobs", 0, 1024);
        if let Some(jobs) = cpu_jobs.as_ref().filter(|jobs| !reuse && *jobs.get_ref() > 1) {
            let message = format!(
                "{} contradicts reuse = false, which is one job per machine, ever: write 0 or 1, or leave it out",
                jobs.get_ref()
            );
            section.error("cpu_jobs", jobs, message);
        }
        let cpu_jobs = cpu_jobs.map(Spanned::into_inner);
        let volumes = volumes(&mut section, state_dir);
        let runner_image =
            section.leaf("runner_image", "an image's name, such as \"pilotlight/gitea-runner\"", |value| {
                value.as_str().filter(|image| !image.trim().is_empty()).map(ToOwned::to_owned)
            });
        if let Some(name) = name {
            let refers = ladder.iter().map(|rung| Spanned::new(rung.span(), rung.get_ref().to_string())).collect();
            let placements = ladder.into_iter().map(Spanned::into_inner).collect();
            let pool = Pool {
                name,
                placements,
                max_instances,
                min_idle,
                idle_timeout,
                boot_timeout,
                max_lifetime,
                lost_after,
                reuse,
                cpu_jobs,
                volumes,
                runner_image: runner_image.map(Spanned::into_inner),
            };
            tables.valid.push(Form::new(pool, &section, refers));
        }
        tables.names.push(given.into_inner());
        section.finish();
    }
    tables
}

/// Machines kept without work; each costs its price around the clock.
fn min_idle(section: &mut Section<'_, '_>, max_instances: u32) -> u32 {
    let Some(min_idle) = section.count("min_idle", 0, u32::MAX) else { return 0 };
    if *min_idle.get_ref() > max_instances {
        let message = format!("{} is more than the pool's max_instances = {max_instances}", min_idle.get_ref());
        section.error("min_idle", &min_idle, message);
    }
    min_idle.into_inner()
}

type Ladder = Vec<Spanned<PlacementName>>;

fn check_ladder(section: &Section<'_, '_>, ladder: Option<Spanned<Ladder>>) -> Ladder {
    let Some(ladder) = ladder else { return Vec::new() };
    let span = ladder.span();
    let rungs = ladder.into_inner();
    if span.len() <= "[]".len() {
        let empty = Spanned::new(span, ());
        section.error("placements", &empty, "[] is empty: name at least one placement");
    }
    for (n, rung) in rungs.iter().enumerate() {
        if rungs.iter().take(n).any(|earlier| earlier.get_ref() == rung.get_ref()) {
            section.error("placements", rung, format!("{:?} is listed twice", rung.get_ref().as_str()));
        }
    }
    rungs
}

/// Where a mount would hide what the image needs to run, or what Docker puts there.
const NOT_OVER: [&str; 9] = ["/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/proc", "/sys", "/dev"];
/// What no job may see of the machine: these hand over the machine itself.
const NOT_SHOWN: [&str; 6] = ["/proc", "/sys", "/dev", "/run/docker.sock", "/var/run/docker.sock", "/var/lib/docker"];

fn volumes(pool: &mut Section<'_, '_>, state_dir: &Path) -> Vec<Volume> {
    let example = "volumes = { data = { host = \"/mnt/data\", mount = \"/data\" } }";
    let mut volumes: Vec<Volume> = Vec::new();
    for (name, mut section) in pool.tables("volumes", example) {
        let host = section.absolute_path("host");
        section.missing("host", "the directory of the machine, such as host = \"/mnt/data\"");
        let mount = section.absolute_path("mount");
        section.missing("mount", "where jobs see it, such as mount = \"/data\"");
        let read_only = section.bool("read_only").is_none_or(Spanned::into_inner);
        if let Some(host) = &host {
            let path = host.get_ref();
            let hidden = |hidden: &Path| path.starts_with(hidden) || hidden.starts_with(path);
            if hidden(state_dir) {
                let message = format!("{path:?} would show jobs the state directory {state_dir:?} and the keys in it");
                section.error("host", host, message);
            } else if let Some(hidden) = NOT_SHOWN.iter().find(|shown| hidden(Path::new(shown))) {
                section.error("host", host, format!("{path:?} would hand jobs {hidden} and with it the machine"));
            }
        }
        if let Some(mount) = &mount {
            let path = mount.get_ref();
            if path == Path::new("/") || NOT_OVER.iter().any(|system| path.starts_with(system)) {
                let message = format!("{path:?} would hide part of the image's own system: mount it elsewhere");
                section.error("mount", mount, message);
            } else if let Some(other) = volumes.iter().find(|other| Path::new(&other.mount) == path) {
                section.error("mount", mount, format!("{path:?} is already taken by volume {:?}", other.name));
            }
        }
        section.finish();
        if let (Some(host), Some(mount)) = (host, mount) {
            let text = |path: Spanned<PathBuf>| path.into_inner().to_string_lossy().into_owned();
            volumes.push(Volume { name: name.into_inner(), host: text(host), mount: text(mount), read_only });
        }
    }
    volumes
}

/// Checks that forges serve labels that are there, on pools that can run their runners.
pub(super) fn check_forges(
    document: &Document<'_>,
    forges: &BTreeMap<ForgeName, Served>,
    labels: &Tables<Label>,
    pools: &Tables<Pool>,
) {
    for (forge, served) in forges {
        for name in served.labels.iter().flatten().filter(|name| !labels.names.contains(name.get_ref())) {
            let near = did_you_mean(name.get_ref(), &labels.names);
            let message = format!("{:?} is not a label{near}; there are: {}", name.get_ref(), labels.names.join(", "));
            document.error(name.span().start, format!("{}.labels", served.path), message);
        }
        let serves = |label: &&Form<Label>| {
            let name = label.value.name.as_str();
            served.labels.as_ref().is_none_or(|some| some.iter().any(|label| label.get_ref() == name))
        };
        let used: Vec<&PoolName> = labels.valid.iter().filter(serves).map(|label| &label.value.pool).collect();
        for pool in pools.valid.iter().filter(|pool| pool.value.runner_image.is_none()) {
            if used.contains(&&pool.value.name) {
                let message = format!(
                    "serves forge {forge}, and says not in which image its runners run: write runner_image = \"…\""
                );
                document.error(pool.start, &pool.path, message);
            }
        }
    }
}

/// Checks that labels name pools and pools placements, and warns of what can never work or is never used.
pub(super) fn check_references(
    document: &Document<'_>,
    labels: &Tables<Label>,
    pools: &Tables<Pool>,
    placements: &Tables<Placement>,
) {
    for label in &labels.valid {
        refer(document, label, "pool", "pool", &pools.names);
    }
    for pool in &pools.valid {
        refer(document, pool, "placements", "placement", &placements.names);
    }
    if document.has_errors() {
        // Of a file with errors, what seems unused or too small may be so only for what could not be read.
        return;
    }
    for pool in &pools.valid {
        if !labels.valid.iter().any(|label| label.value.pool == pool.value.name) {
            document.warn(pool.start, &pool.path, "no label names this pool: no job can reach it");
        }
    }
    for placement in &placements.valid {
        if !pools.valid.iter().any(|pool| pool.value.placements.contains(&placement.value.name)) {
            document.warn(placement.start, &placement.path, "no pool lists this placement: it is never used");
        }
    }
    if labels.names.is_empty() {
        document.warn(0, "label", "there is no label: no job can be submitted");
    }
    for label in &labels.valid {
        check_fit(document, label, pools, placements);
    }
}

fn refer<T>(document: &Document<'_>, form: &Form<T>, key: &str, kind: &str, known: &[String]) {
    for name in form.refers.iter().filter(|name| !known.contains(name.get_ref())) {
        let there =
            if known.is_empty() { "there is none".to_owned() } else { format!("there are: {}", known.join(", ")) };
        let near = did_you_mean(name.get_ref(), known);
        let message = format!("{:?} is not a {kind}{near}; {there}", name.get_ref());
        document.error(name.span().start, format!("{}.{key}", form.path), message);
    }
}

fn check_fit(document: &Document<'_>, label: &Form<Label>, pools: &Tables<Pool>, placements: &Tables<Placement>) {
    let Some(pool) = pools.valid.iter().map(|form| &form.value).find(|pool| pool.name == label.value.pool) else {
        return;
    };
    let sizes: Option<Vec<u32>> = pool
        .placements
        .iter()
        .map(|name| placements.valid.iter().find(|form| form.value.name == *name).map(|form| form.value.gpus))
        .collect();
    let Some(sizes) = sizes else { return };
    let most = sizes.iter().copied().max().unwrap_or(0);
    if label.value.gpus > most {
        let message = format!(
            "asks for gpus = {}, and no placement of pool {:?} has more than {most} GPUs: its jobs are refused at submit",
            label.value.gpus,
            pool.name.as_str()
        );
        document.warn(label.start, &label.path, message);
    }
    let cpu_jobs = |gpus: &u32| pool.cpu_jobs.unwrap_or(u32::from(*gpus == 0));
    if label.value.gpus == 0 && !sizes.is_empty() && sizes.iter().all(|gpus| cpu_jobs(gpus) == 0) {
        let message = format!(
            "has no GPUs, and pool {:?} takes no such jobs on its machines: set cpu_jobs there",
            pool.name.as_str()
        );
        document.warn(label.start, &label.path, message);
    }
}
