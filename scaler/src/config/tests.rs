use std::{fmt::Write as _, fs, path::Path};

use super::*;
use crate::fleet::ProviderConfig;

/// A box with so many GPUs, named `GPU-0` and on.
fn a_box(gpus: usize) -> (tempfile::TempDir, Surroundings) {
    let root = tempfile::tempdir().unwrap();
    for n in 0..gpus {
        let dir = root.path().join(format!("0000:{n:02x}:00.0"));
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("information"), format!("Model: \t NVIDIA H200\nGPU UUID: \t GPU-{n}\n")).unwrap();
    }
    let around = Surroundings { gpu_root: root.path().to_owned(), credentials: None, state_dir: None };
    (root, around)
}

/// All that is said of a file on a box with four GPUs.
fn said(text: &str) -> String {
    let (_root, around) = a_box(4);
    let (errors, warnings) = match check(Path::new("f.toml"), text, &around) {
        Ok(valid) => (Vec::new(), valid.warnings),
        Err(invalid) => (invalid.errors, invalid.warnings),
    };
    let errors = errors.iter().map(|error| format!("error: {error}\n"));
    errors.chain(warnings.iter().map(|warning| format!("warning: {warning}\n"))).collect()
}

/// A file without fault, which each case below breaks in one place.
const GOOD: &str = r#"[label.gpu]
pool = "here"
gpus = 1
[pool.here]
placements = ["here"]
[placement.here.local]
gpus = "all"
"#;

#[test]
fn a_small_file_gets_the_defaults() {
    let (_root, around) = a_box(4);
    let valid = check(Path::new("f.toml"), GOOD, &around).unwrap();
    assert_eq!(valid.warnings, []);
    insta::assert_debug_snapshot!(valid.config);
}

#[test]
fn every_value_is_taken_from_the_file() {
    let (_root, around) = a_box(4);
    let root = tempfile::tempdir().unwrap();
    let private = |name: &str, bytes: &[u8]| {
        pilotlight_runtime::durable::write(&root.path().join(name), bytes).unwrap();
        root.path().join(name).display().to_string()
    };
    let (key, token) = (private("key", &[1; 32]), private("token", b"secret\n"));
    let text = format!(
        r#"
listen = "[::1]:0"
state_dir = "/srv/pilotlight"
lease = "1m30s"
max_log = "1MiB"
keep_logs = "1d"
key_file = "{key}"
admin_token_file = "{token}"
[label.x]
pool = "p"
gpus = 2
timeout = "5m"
priority = -3
[pool.p]
placements = ["b", "a"]
max_instances = 3
min_idle = 2
idle_timeout = "0s"
boot_timeout = "1m"
max_lifetime = "2h"
lost_after = "3m"
reuse = false
cpu_jobs = 1
volumes = {{ data = {{ host = "/mnt/data", mount = "/data", read_only = false }}, ro = {{ host = "/mnt/ro", mount = "/ro" }} }}
[placement.a.local]
gpus = 1
max_instances = 2
price_per_hour = 3
host_image = false
[placement.b.local]
gpus = ["GPU-3", "GPU-0"]
price_per_hour = 1.5
"#
    );
    let valid = check(Path::new("f.toml"), &text, &around).unwrap();
    assert_eq!(valid.warnings, []);
    let mut config = valid.config;
    assert_eq!(config.key_file.take().unwrap().display().to_string(), key);
    assert_eq!(config.admin_token_file.take().unwrap().display().to_string(), token);
    insta::assert_debug_snapshot!(config);
}

#[test]
fn every_kind_of_error_says_where_what_and_what_is_allowed() {
    let cases: &[(&str, &str, &str)] = &[
        // What is wrong, the text of GOOD that is replaced (empty: appended at the front), and by what.
        ("no TOML", "gpus = 1", "gpus = "),
        ("a key twice", "gpus = 1", "gpus = 1\ngpus = 2"),
        ("an unknown key", "gpus = 1", "gpu = 1"),
        ("an unknown table", "[pool.here]", "[pools.x]\n[pool.here]"),
        ("more kept idle than there may be", "placements =", "min_idle = 2\nplacements ="),
        ("a forge of a later version", "[label.gpu]", "[forge.acme.github]\nurl = \"x\"\n[label.gpu]"),
        ("a forge without a kind", "[label.gpu]", "[forge.acme]\n[label.gpu]"),
        ("a forge that says nothing", "[label.gpu]", "[forge.acme.gitea]\n[label.gpu]"),
        ("a forge by the name of the queue", "[label.gpu]", "[forge.direct.gitea]\n[label.gpu]"),
        (
            "a forge of nonsense",
            "[label.gpu]",
            "[forge.acme.gitea]\nurl = \"git.example.com\"\nscope = \"a/b/c\"\ntoken_file = \"/nonexistent\"\n\
             labels = [\"gpx\"]\nrepositories = [\"acme\", \"*/x\"]\npoll = \"1ms\"\nrerun_lost = 1\n[label.gpu]",
        ),
        ("a provider of a later version", "[placement.here.local]\ngpus = \"all\"", "[placement.here.ec2]\ngpus = 8"),
        ("a misspelt provider", "here.local]", "here.locl]"),
        ("two providers", "gpus = \"all\"", "gpus = \"all\"\n[placement.here.ec2]"),
        ("no provider", "[placement.here.local]\ngpus = \"all\"", "[placement.here]"),
        ("a provider that is no table", "[placement.here.local]\ngpus = \"all\"", "[placement.here]\nlocal = 1"),
        ("a label that is no table", "[label.gpu]\npool = \"here\"\ngpus = 1", "[label]\ngpu = \"here\""),
        ("a bad name", "[label.gpu]", "[label.\"a b\"]"),
        ("a label without a pool", "pool = \"here\"\n", ""),
        ("a pool that is no name", "pool = \"here\"", "pool = \"a/b\""),
        ("a misspelt pool", "pool = \"here\"", "pool = \"hera\""),
        ("a misspelt placement", "placements = [\"here\"]", "placements = [\"heer\"]"),
        ("no placements", "placements = [\"here\"]\n", ""),
        ("an empty ladder", "placements = [\"here\"]", "placements = []"),
        ("a placement twice", "placements = [\"here\"]", "placements = [\"here\", \"here\"]"),
        ("a ladder that is no list", "placements = [\"here\"]", "placements = \"here\""),
        ("a ladder of numbers", "placements = [\"here\"]", "placements = [\n  \"here\",\n  1,\n]"),
        ("a negative timeout", "gpus = 1", "timeout = \"-5m\""),
        ("a timeout without a unit", "gpus = 1", "timeout = \"10\""),
        ("a number as timeout", "gpus = 1", "timeout = 10"),
        ("a timeout of nothing", "gpus = 1", "timeout = \"0s\""),
        ("too many GPUs in a label", "gpus = 1", "gpus = 9"),
        ("negative GPUs", "gpus = 1", "gpus = -1"),
        ("a text as a number", "gpus = 1", "gpus = \"1\""),
        ("a fractional priority", "gpus = 1", "priority = 1.5"),
        ("zero instances of a pool", "placements =", "max_instances = 0\nplacements ="),
        ("zero instances of a placement", "gpus = \"all\"", "max_instances = 0"),
        ("a text as a switch", "placements =", "reuse = \"no\"\nplacements ="),
        ("many CPU jobs without reuse", "placements =", "reuse = false\ncpu_jobs = 2\nplacements ="),
        ("a relative volume", "placements =", "volumes.d = { host = \"data\", mount = \"../d\" }\nplacements ="),
        ("a volume without a mount", "placements =", "volumes.d = { host = \"/data\" }\nplacements ="),
        ("a mount over the system", "placements =", "volumes.d = { host = \"/d\", mount = \"/usr/x\" }\nplacements ="),
        ("a volume of the keys", "placements =", "volumes.d = { host = \"/var/lib\", mount = \"/d\" }\nplacements ="),
        ("a volume of Docker", "placements =", "volumes.d = { host = \"/run\", mount = \"/d\" }\nplacements ="),
        (
            "two volumes in one place",
            "placements =",
            "volumes.d = { host = \"/d\", mount = \"/d\" }\nvolumes.e = { host = \"/e\", mount = \"/d\" }\nplacements =",
        ),
        ("a listen address for all", "", "listen = \"0.0.0.0:8470\"\n"),
        ("a listen name", "", "listen = \"localhost\"\n"),
        ("a relative state directory", "", "state_dir = \"state\"\n"),
        ("a size without a unit", "", "max_log = \"100\"\n"),
        ("no log", "", "max_log = \"0B\"\n"),
        ("a lease of nothing", "", "lease = \"0s\"\n"),
        ("a key that is not there", "", "key_file = \"/nonexistent/key\"\n"),
        ("a token that is not there", "", "admin_token_file = \"/nonexistent/token\"\n"),
        ("a remainder", "gpus = \"all\"", "gpus = \"all\"\nmax_instances = 3"),
        ("more GPUs than there are", "gpus = \"all\"", "gpus = 3\nmax_instances = 2"),
        ("GPUs that are no UUIDs", "gpus = \"all\"", "gpus = [0, 1]"),
        ("a word for GPUs", "gpus = \"all\"", "gpus = \"some\""),
        ("a GPU twice", "gpus = \"all\"", "gpus = [\"GPU-1\", \"GPU-1\"]"),
        ("a GPU of two placements", "gpus = \"all\"", "gpus = \"all\"\n[placement.there.local]\ngpus = [\"GPU-2\"]"),
        ("a negative price", "gpus = \"all\"", "price_per_hour = -1"),
        // Warnings.
        ("a GPU that is not there", "gpus = \"all\"", "gpus = [\"GPU-x\"]"),
        ("a label that fits nowhere", "gpus = \"all\"", "gpus = 0"),
        ("a CPU label where none run", "gpus = 1", "gpus = 0"),
        ("an agent that is not there", "gpus = \"all\"", "agent = \"/nonexistent/agent\""),
        ("an unused pool", "[placement", "[pool.idle]\nplacements = [\"here\"]\n[placement"),
        ("an unused placement", "gpus = \"all\"", "gpus = \"all\"\n[placement.idle.local]\ngpus = 0"),
        ("no label", "[label.gpu]\npool = \"here\"\ngpus = 1\n", ""),
    ];
    let mut all = String::new();
    for (what, old, new) in cases {
        assert!(GOOD.contains(old), "{what}");
        let text = GOOD.replacen(old, new, 1);
        let said = said(&text);
        assert!(!said.is_empty(), "{what}: nothing was said of\n{text}");
        write!(all, "# {what}\n{said}\n").unwrap();
    }
    insta::assert_snapshot!(all);
}

#[test]
fn all_errors_of_a_file_come_out_in_one_run() {
    let text = r#"listen = "10.0.0.1:8470"
lease = 10
colour = "red"

[label.gpu-h200]
pool = "her"
gpus = 12
timeout = "-5m"

[label."no name"]
pool = "here"

[pool.here]
placements = ["here", "there", "here"]
max_instances = 0
reuse = "yes"

[placement.here.local]
gpus = "half"
"#;
    let said = said(text);
    assert_eq!(said.lines().filter(|line| line.starts_with("error")).count(), 12, "{said}");
    insta::assert_snapshot!(said);
}

#[test]
fn a_state_directory_of_the_command_line_wins() {
    let (_root, mut around) = a_box(4);
    around.state_dir = Some(PathBuf::from("/srv/state"));
    let text = "state_dir = \"/var/lib/pilotlight\"\n".to_owned() + GOOD;
    assert_eq!(check(Path::new("f.toml"), &text, &around).unwrap().config.state_dir, Path::new("/srv/state"));
    let text = text.replace("placements =", "volumes.d = { host = \"/srv\", mount = \"/d\" }\nplacements =");
    let said = check(Path::new("f.toml"), &text, &around).unwrap_err().to_string();
    assert!(said.contains("would show jobs the state directory \"/srv/state\""), "{said}");
}

#[test]
fn a_file_that_cannot_be_read_is_one_error() {
    let (_root, around) = a_box(0);
    let invalid = load(Path::new("/nonexistent/f.toml"), &around).unwrap_err();
    assert_eq!(invalid.to_string(), "/nonexistent/f.toml: cannot be read: No such file or directory (os error 2)");
}

#[test]
fn gpus_are_shared_out_without_overlap_and_lists_come_first() {
    let (_root, around) = a_box(4);
    let text = "[placement.a.local]\ngpus = 1\nmax_instances = 2\n[placement.b.local]\ngpus = [\"GPU-0\", \"GPU-2\"]\n";
    let valid = check(Path::new("f.toml"), text, &around).unwrap();
    let ids: Vec<Vec<_>> = valid
        .config
        .placements
        .values()
        .map(|placement| {
            let ProviderConfig::Local(local) = &placement.provider;
            local.gpu_ids.iter().map(ToString::to_string).collect()
        })
        .collect();
    assert_eq!(ids, [["GPU-1", "GPU-3"], ["GPU-0", "GPU-2"]]);
}

#[test]
fn a_driver_that_tells_no_uuid_is_an_error_and_not_an_empty_box() {
    let (root, around) = a_box(1);
    fs::write(root.path().join("0000:00:00.0/information"), "GPU UUID: \t GPU-????????-????\n").unwrap();
    let invalid = check(Path::new("f.toml"), GOOD, &around).unwrap_err();
    let said = invalid.to_string();
    assert!(said.starts_with("f.toml:7: placement.here.local.gpus: the GPUs of this box are not known"), "{said}");
    assert!(check(Path::new("f.toml"), &GOOD.replace("\"all\"", "0"), &around).is_ok(), "no GPU asked for");
}

#[test]
fn the_example_for_one_box_is_good_on_every_box() {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/examples/local.toml"));
    for gpus in [0, 1, 8] {
        let (_root, around) = a_box(gpus);
        let valid = load(path, &around).unwrap();
        let warned: Vec<_> = valid.warnings.iter().map(|warning| warning.key.as_str()).collect();
        let expected: &[&str] = if gpus == 0 { &["label.gpu-h200"] } else { &[] };
        assert_eq!(warned, expected, "{gpus} GPUs");
    }
}

#[test]
fn hints_need_no_valid_config() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f.toml");
    fs::write(&path, "listen = \"127.0.0.1:9\"\nstate_dir = \"/x\"\nnonsense = 1\n").unwrap();
    let hints = hints(&path).unwrap();
    assert_eq!(hints.listen, Some("127.0.0.1:9".parse().unwrap()));
    assert_eq!(hints.state_dir, Some(PathBuf::from("/x")));
    assert!(super::hints(&dir.path().join("none")).is_err());
}
