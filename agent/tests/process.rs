//! The agent as a process: its exit codes, its lock, its signals.

#![expect(clippy::unwrap_used, reason = "helpers of tests, too, may unwrap")]

use std::{
    fs,
    io::{BufRead, BufReader},
    net::TcpListener,
    path::Path,
    process::{Child, Command, Output, Stdio},
};

use rustix::process::{Pid, Signal, kill_process};

fn agent(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pilotlight-agent"));
    command.args(args).env_remove("PILOTLIGHT_AGENT_DIR").stderr(Stdio::piped()).stdout(Stdio::piped());
    command
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

/// One instance a test: each runs in a process or a thread of its own.
fn instance() -> String {
    let thread = format!("{:?}", std::thread::current().id());
    let number: String = thread.chars().filter(char::is_ascii_digit).collect();
    format!("018f0000-0000-7000-8000-{:012}", u64::from(std::process::id()) * 1000 + number.parse::<u64>().unwrap())
}

fn bootstrap(dir: &Path, url: &str) {
    let instance = instance();
    let text = format!(r#"{{"scaler_url":"{url}","instance":"{instance}","secret":"s","power":"exit"}}"#);
    fs::write(dir.join("bootstrap.json"), text).unwrap();
}

/// A scaler that never answers, and an agent whose call it has accepted.
fn calling(dir: &Path) -> (TcpListener, std::net::TcpStream, Child) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    bootstrap(dir, &format!("http://{}", listener.local_addr().unwrap()));
    let child = agent(&["run", "--json-logs"]).env("PILOTLIGHT_AGENT_DIR", dir).spawn().unwrap();
    let (call, _) = listener.accept().unwrap();
    let mut line = String::new();
    BufReader::new(&call).read_line(&mut line).unwrap();
    assert_eq!(line, "POST /agent/v1/enrol HTTP/1.1\r\n");
    (listener, call, child)
}

/// Ends what a dead agent has in Docker, as the local provider does, and checks that it is gone.
fn clean(dir: &Path) {
    let output = agent(&["clean", "--dir", dir.to_str().unwrap()]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    let filter = format!("label=pilotlight.instance={}", instance());
    let list = Command::new("docker").args(["network", "ls", "-q", "--filter", &filter]).output().unwrap();
    assert_eq!((list.status.code(), list.stdout), (Some(0), Vec::new()));
}

#[test]
fn bad_arguments_and_bad_directories_have_codes_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    for (args, code, word) in [
        (&["version"][..], 0, env!("CARGO_PKG_VERSION")),
        (&["--help"], 0, "run"),
        (&["walk"], 64, "walk"),
        (&["run"], 64, "--dir"),
        (&["run", "--dir", path], 78, "bootstrap.json"),
        (&["run", "--dir", "/nowhere"], 74, "/nowhere/agent.lock"),
    ] {
        let output = agent(args).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", text(&output));
        assert!(text(&output).contains(word), "{args:?}: {}", text(&output));
    }
}

#[test]
fn a_second_agent_says_who_has_the_directory() {
    let dir = tempfile::tempdir().unwrap();
    let (_listener, _call, mut first) = calling(dir.path());
    let output = agent(&["run", "--dir", dir.path().to_str().unwrap()]).output().unwrap();
    assert_eq!(output.status.code(), Some(75), "{}", text(&output));
    assert!(text(&output).contains(&format!("(pid {})", first.id())), "{}", text(&output));
    // A killed agent's lock is free at once.
    first.kill().unwrap();
    first.wait().unwrap();
    let (_listener, _call, mut next) = calling(dir.path());
    next.kill().unwrap();
    next.wait().unwrap();
    assert_eq!(fs::read_to_string(dir.path().join("run")).unwrap(), "2");
    clean(dir.path());
}

#[test]
fn sigterm_stops_the_agent_and_leaves_no_mark() {
    let dir = tempfile::tempdir().unwrap();
    let (_listener, _call, child) = calling(dir.path());
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    assert!(!dir.path().join("done").exists());
    clean(dir.path());
}
