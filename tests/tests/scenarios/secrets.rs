//! Where secrets are after and during a whole run: only where they belong (C40).

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use pilotlight_scaler::keys::Keys;
use pilotlight_tests::site::{Site, docker, wait};
use serde_json::Value;

use super::{code, err, marked};

/// Secrets by name.
type Secrets = BTreeMap<&'static str, String>;

/// What a job is given, by its author.
fn planted() -> Secrets {
    let plant = |what: &str| format!("planted-{what}-{}", "5ec2e7".repeat(4));
    BTreeMap::from([("value", plant("value")), ("word", plant("word")), ("of the scaler's", plant("scaler"))])
}

/// Ours: all that somebody could do something with.
fn ours(site: &Site) -> Secrets {
    let state = site.state();
    let read = |path: PathBuf| fs::read_to_string(path).unwrap().trim().to_owned();
    let machine = site.instance_dirs().remove(0);
    let bootstrap: Value = serde_json::from_str(&read(machine.join("bootstrap.json"))).unwrap();
    let keys = Keys::load_or_create(&state.join("key"), true).unwrap();
    let instance = bootstrap["instance"].as_str().unwrap().parse().unwrap();
    let bearer = keys.bearer(instance, &read(machine.join("nonce"))).expose().to_owned();
    let key: String = fs::read(state.join("key")).unwrap().iter().map(|byte| format!("{byte:02x}")).collect();
    BTreeMap::from([
        ("admin token", read(state.join("admin.token"))),
        ("enrolment secret", bootstrap["secret"].as_str().unwrap().to_owned()),
        ("bearer's proof", bearer.rsplit('.').next().unwrap().to_owned()),
        ("key", key),
    ])
}

/// The files beneath a directory that hold a secret.
fn holders(dir: &Path, secret: &str) -> Vec<PathBuf> {
    let mut grep = Command::new("grep");
    let output = grep.args(["-raliF", "-e", secret]).arg(dir).output().unwrap();
    String::from_utf8(output.stdout).unwrap().lines().map(PathBuf::from).collect()
}

/// Checks that a secret is in the places that may hold it, so that the search is known to find it, and in no others, and
/// that these are closed to all but their owner.
fn check_files(site: &Site, secrets: &Secrets, may: &[(&str, &str)]) {
    for (name, secret) in secrets {
        let found = holders(&site.path(""), secret);
        for (_, file) in may.iter().filter(|(of, _)| of == name) {
            assert!(found.iter().any(|path| path.ends_with(file)), "the {name} was not found in {file}: {found:?}");
        }
        for path in found {
            let file = path.file_name().unwrap().to_str().unwrap();
            assert!(may.contains(&(name, file)), "{}: the {name} is in it", path.display());
            let mode = fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(mode & 0o077, 0, "{} with the {name} has mode {mode:o}", path.display());
        }
    }
}

fn check_text(what: &str, text: &str, secrets: &[&Secrets]) {
    for (name, secret) in secrets.iter().flat_map(|secrets| secrets.iter()) {
        assert!(!text.contains(secret.as_str()), "{what} tells the {name}: {text}");
    }
}

/// What every process of this box was started with.
fn check_processes(secrets: &Secrets) {
    for dir in fs::read_dir("/proc").unwrap().flatten() {
        for file in ["cmdline", "environ"] {
            let text = String::from_utf8_lossy(&fs::read(dir.path().join(file)).unwrap_or_default()).into_owned();
            check_text(&format!("{}/{file}", dir.path().display()), &text, &[secrets]);
        }
    }
}

/// What everybody with the admin token, and everybody without, can ask for.
fn check_answers(site: &Site, job: &str, secrets: &[&Secrets]) {
    let token = fs::read_to_string(site.state().join("admin.token")).unwrap();
    let paths = ["jobs", "jobs?all=1", "instances?all=1", "pools", "status", "plan", "orphans"];
    let mut paths: Vec<String> = paths.iter().map(|path| format!("/api/v1/{path}")).collect();
    paths.extend([format!("/api/v1/jobs/{job}"), format!("/api/v1/jobs/{job}/log")]);
    paths.extend(["/metrics", "/healthz", "/readyz", "/", "/agent/v1/sync"].map(str::to_owned));
    for path in &paths {
        for token in [Some(token.trim()), None, Some("wrong")] {
            check_text(path, &site.get(path, token).unwrap().1, secrets);
        }
    }
    let config = site.path("config.toml");
    let config = config.to_str().unwrap();
    for args in [
        &["check", "--config", config][..],
        &["check", "--config", config, "--json"],
        &["plan"],
        &["status"],
        &["status", "--json"],
        &["pools"],
        &["instances", "--all"],
        &["instances", "--all", "--json"],
        &["jobs", "--all"],
        &["jobs", "--all", "--json"],
        &["logs", job],
    ] {
        let output = site.call(args).unwrap();
        assert_eq!(code(&output), 0, "{args:?}: {}", err(&output));
        let text = [output.stdout, output.stderr].concat();
        check_text(&format!("{args:?}"), &String::from_utf8_lossy(&text), secrets);
    }
}

#[test]
fn c40_no_token_is_where_a_job_or_a_reader_could_find_it() {
    let marks = tempfile::tempdir().unwrap();
    let mut site = Site::prepare(&marked(marks.path())).unwrap();
    let planted = planted();
    site.scaler_env("PILOTLIGHT_LOG", "trace");
    site.scaler_env("PLANTED", &planted["of the scaler's"]);
    site.start().unwrap();
    let env = tempfile::NamedTempFile::new().unwrap();
    fs::write(env.path(), format!("TOKEN={}\n", planted["value"])).unwrap();
    let script = "echo on; until [ -e /marks/end ]; do sleep 0.1; done; [ $TOKEN ] && exit 7";
    let env = env.path().to_str().unwrap();
    let job = site.begin(&["--env-file", env, "--", "bash", "-c", script, "bash", &planted["word"]]).unwrap();
    job.until("on\n").unwrap();
    let ours = ours(&site);
    let id = site.json(&["jobs"]).unwrap()[0]["id"].as_str().unwrap().to_owned();

    // From inside another job, which is root there: none of ours, none of the other job's, by any name.
    let all: Vec<&str> = ours.values().chain(planted.values()).map(String::as_str).collect();
    fs::write(marks.path().join("needles"), all.join("\n")).unwrap();
    let script = "grep -raliF -f /marks/needles /proc/[0-9]*/cmdline /proc/[0-9]*/environ /proc/[0-9]*/mountinfo \
                  /etc /root /home /tmp /var /run /opt /srv /mnt /dev/shm 2>/dev/null; \
                  env | grep -i pilotlight; find / -xdev -name '*.sock' 2>/dev/null; ls /var/run/docker.sock 2>/dev/null";
    let output = site.submit(&["--", "bash", "-c", script]).unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "", "{}", err(&output));

    // From outside, while it runs.
    check_processes(&ours);
    for container in site.containers().unwrap() {
        check_text("docker inspect", &docker(&["inspect", &container]).unwrap(), &[&ours]);
        check_text("docker top", &docker(&["top", &container, "-eo", "args"]).unwrap_or_default(), &[&ours]);
    }
    for what in ["network", "volume"] {
        let all = docker(&[what, "ls", "-q", "--filter", "label=pilotlight.instance"]).unwrap();
        for one in all.lines() {
            // Others' may go away meanwhile.
            check_text(what, &docker(&[what, "inspect", one]).unwrap_or_default(), &[&ours, &planted]);
        }
    }
    let (agent, scaler) = (site.agent_pid().unwrap(), site.scaler_pid().unwrap());
    let environment = fs::read_to_string(format!("/proc/{agent}/environ")).unwrap();
    check_text("the agent's environment", &environment, &[&ours, &planted]);
    assert!(fs::read_to_string(format!("/proc/{scaler}/environ")).unwrap().contains(&planted["of the scaler's"]));
    check_answers(&site, &id, &[&ours, &planted]);
    let own = [("admin token", "admin.token"), ("enrolment secret", "bootstrap.json"), ("bearer's proof", "bearer")];
    check_files(&site, &ours, &own);
    check_files(&site, &planted, &[("value", "assignment.json"), ("word", "assignment.json")]);

    // When the job is over; the logs of all programs have all that they will have of it.
    fs::write(marks.path().join("end"), "").unwrap();
    let output = job.end().unwrap();
    assert_eq!(code(&output), 7, "{}", err(&output));
    check_text("submit", &err(&output), &[&ours, &planted]);
    wait("the agent has forgotten the job", || Ok(holders(&site.path("state/local"), &planted["value"]).is_empty()))
        .unwrap();
    assert!(site.logs().contains("TRACE"), "the programs were talkative");
    check_answers(&site, &id, &[&ours, &planted]);
    check_files(&site, &ours, &own);
    check_files(&site, &planted, &[]);

    // When the machine is gone, its secret is.
    assert_eq!(code(&site.call(&["drain", "--all", "--now"]).unwrap()), 0);
    check_files(&site, &ours, &own[..1]);
    check_files(&site, &planted, &[]);
    site.finish().unwrap();
}
