//! The commands other than `submit`.

use std::{io::Read, os::unix::process::CommandExt};

use pilotlight_wire::{Verdict, api::DrainTarget};
use serde_json::Value;

use crate::{client, code, fake::Fake, noise, pilotlight, stderr, stderr_until};

const ID: &str = "0193d5a0-0000-7000-8000-000000000002";

#[test]
fn wrong_usage_is_64_and_help_is_0() {
    for args in [
        &[][..],
        &["frobnicate"],
        &["submit"],
        &["submit", "--label", "l"],
        &["submit", "--label", "l", "--image", "i", "--timeout", "10"],
        &["submit", "--label", "l", "--image", "i", "--timeout", "0s"],
        &["submit", "--label", "l", "--image", "i", "--detach", "--result-file", "/tmp/x"],
        &["logs", "not-an-id"],
        &["cancel"],
        &["drain"],
        &["drain", "--all", "--pool", "p"],
        &["hold"],
        &["hold", ID, "--for", "25h"],
        &["hold", ID, "--for", "0s"],
        &["release", "x"],
        &["status", "--url", "ftp://x"],
    ] {
        let output = pilotlight(args).output().unwrap();
        assert_eq!(code(&output), 64, "{args:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{args:?}");
    }
    for args in [&["--help"][..], &["submit", "--help"], &["--version"], &["version"]] {
        let output = pilotlight(args).output().unwrap();
        assert_eq!(code(&output), 0, "{args:?}");
        assert!(!output.stdout.is_empty());
    }
}

#[test]
fn nobody_there_is_69_and_says_what_to_do() {
    let mut fake = Fake::start();
    fake.stop();
    let output = client(&fake, &["status"]).output().unwrap();
    assert_eq!(code(&output), 69);
    assert!(stderr(&output).contains("is it running? start it with"), "{}", stderr(&output));
}

#[test]
fn logs_show_what_is_there_or_follow_to_the_end() {
    let fake = Fake::start();
    let id = fake.order(|order| {
        order.log = noise(70_000);
        order.id.clone()
    });
    let log = fake.look(|order| order.log.clone());
    let output = client(&fake, &["logs", &id]).output().unwrap();
    assert_eq!((code(&output), output.stdout == log), (0, true), "an open log does not hold us");

    let mut child = client(&fake, &["logs", "--follow", &id]).spawn().unwrap();
    let mut got = vec![0; log.len()];
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut got).unwrap();
    fake.order(|order| {
        order.log.extend_from_slice(b"end\n");
        order.finish(Verdict::Failure, Some(9));
    });
    stdout.read_to_end(&mut got).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0), "the log was shown, whatever the job did");
    assert!(got.ends_with(b"end\n"));

    let unknown = client(&fake, &["logs", "--follow", "00000000-0000-7000-8000-000000000000"]).output().unwrap();
    assert_eq!(code(&unknown), 65, "{}", stderr(&unknown));
}

#[test]
fn tables_are_for_people_and_json_for_programs() {
    let fake = Fake::start();
    let id = fake.order(|order| {
        order.name = "evil\u{1b}[31m\nname".to_owned();
        order.id.clone()
    });
    let text = |args: &[&str]| {
        let output = client(&fake, args).output().unwrap();
        assert_eq!(code(&output), 0, "{args:?}: {}", stderr(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    let jobs = text(&["jobs"]);
    assert_eq!(jobs.lines().count(), 2, "{jobs}");
    assert!(jobs.contains(&id) && jobs.contains(r"evil\u{1b}[31m\nname") && !jobs.contains('\u{1b}'), "{jobs}");
    let jobs: Value = serde_json::from_str(&text(&["jobs", "--json"])).unwrap();
    assert_eq!(jobs[0]["name"], "evil\u{1b}[31m\nname", "JSON has its own escapes");
    for args in [["status"], ["pools"], ["instances"], ["plan"], ["reap"]] {
        assert!(!text(&args).is_empty());
        let json: Value = serde_json::from_str(&text(&[args[0], "--json"])).unwrap();
        assert!(json.is_object() || json.is_array());
    }
    assert!(text(&["reap", "--yes"]).contains("local"));
    assert!(fake.look(|order| order.reaped));
    assert!(text(&["instances", "--all"]).contains("gone"));
    assert!(!text(&["instances"]).contains("gone"));
}

#[test]
fn cancel_does_all_it_can() {
    let fake = Fake::start();
    let id = fake.look(|order| order.id.clone());
    let output = client(&fake, &["cancel", "00000000-0000-7000-8000-000000000000", &id]).output().unwrap();
    assert_eq!(code(&output), 65);
    assert!(fake.look(|order| order.cancelled), "the second was cancelled although the first is unknown");
}

#[test]
fn drain_all_now_waits_until_every_machine_is_gone() {
    let fake = Fake::start();
    let mut child = client(&fake, &["drain", "--all", "--now"]).spawn().unwrap();
    let told = stderr_until(&mut child, "waiting for 1 instance");
    let request = fake.look(|order| order.drain.clone().unwrap());
    assert!(request.now && request.target == DrainTarget::All);
    assert!(child.try_wait().unwrap().is_none());
    fake.order(|order| order.machine_gone = true);
    assert_eq!(child.wait().unwrap().code(), Some(0), "{}", told.join().unwrap());

    let resumed = client(&fake, &["drain", "--resume"]).output().unwrap();
    assert_eq!(code(&resumed), 0);
    assert!(fake.look(|order| order.resumed));
}

#[test]
fn a_hold_is_for_four_hours_unless_told_and_ends_with_release() {
    let fake = Fake::start();
    for (args, seconds) in [(&["hold", ID][..], 4 * 3600), (&["hold", ID, "--for", "24h"], 24 * 3600)] {
        let output = client(&fake, args).output().unwrap();
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        assert!(stderr(&output).contains("is held until"), "{}", stderr(&output));
        assert_eq!(fake.look(|order| order.held), Some(seconds));
    }
    let output = client(&fake, &["release", ID, "--json"]).output().unwrap();
    let view: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((code(&output), &view["held_until"]), (0, &Value::Null));
    assert_eq!(fake.look(|order| order.held), None);
}

#[test]
fn check_says_everything_and_exits_78() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bad.toml");
    std::fs::write(&path, "lease = 1\n[label.a]\npool = \"b\"\n").unwrap();
    let output = pilotlight(&["check", "--config", path.to_str().unwrap()]).output().unwrap();
    assert_eq!(code(&output), 78);
    assert_eq!(stderr(&output).lines().filter(|line| line.contains("bad.toml:")).count(), 2, "{}", stderr(&output));
    let output = pilotlight(&["check", "--json", "--config", path.to_str().unwrap()]).output().unwrap();
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((code(&output), found["errors"][1]["line"].as_u64()), (78, Some(3)));
    assert_eq!(code(&pilotlight(&["run", "--config", path.to_str().unwrap()]).output().unwrap()), 78);

    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/examples/local.toml");
    let output = pilotlight(&["check"]).env("PILOTLIGHT_CONFIG", example).output().unwrap();
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert!(String::from_utf8(output.stdout).unwrap().contains("good: 2 labels, 1 pool, 1 placement"));
}

#[test]
fn no_proxy_of_the_environment_comes_between_us_and_this_box() {
    let fake = Fake::start();
    let mut command = client(&fake, &["status"]);
    command.env("http_proxy", "http://127.0.0.1:1").env("ALL_PROXY", "http://127.0.0.1:1").arg0("pilotlight");
    assert_eq!(code(&command.output().unwrap()), 0);
}
