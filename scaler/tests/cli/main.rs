//! The real program against a scaler that is played, with its connections broken where it hurts.

#![expect(clippy::unwrap_used, reason = "this is a test, its helpers included")]

mod commands;
mod fake;

use std::{
    io::{BufRead, BufReader, Read},
    path::Path,
    process::{Child, Command, Output, Stdio},
};

use fake::{Fake, Order};
use pilotlight_wire::{
    Usage, Verdict,
    api::{JobState, SubmitJob},
};
use serde_json::{Value, json};

/// A command line with nothing of our own surroundings in it.
fn pilotlight(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pilotlight"));
    command.args(args).env_clear().stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn client(fake: &Fake, args: &[&str]) -> Command {
    let mut command = pilotlight(args);
    command.env("PILOTLIGHT_URL", fake.url()).env("PILOTLIGHT_TOKEN", fake::TOKEN);
    command
}

fn submit(fake: &Fake, more: &[&str]) -> Command {
    let mut args = vec!["submit", "--label", "cpu-small", "--image", "i"];
    args.extend(more);
    client(fake, &args)
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or_else(|| panic!("{output:?}"))
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Bytes that would show any loss, repetition or change of encoding.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    };
    (0..len).map(|_| next()).collect()
}

/// Reads stderr to the first line that holds `text`; the rest is read on in a thread of its own, so that the program
/// never waits for us.
fn stderr_until(child: &mut Child, text: &str) -> std::thread::JoinHandle<String> {
    let mut lines = BufReader::new(child.stderr.take().unwrap());
    let mut all = String::new();
    while !all.contains(text) {
        assert_ne!(lines.read_line(&mut all).unwrap(), 0, "no {text:?} in {all}");
    }
    std::thread::spawn(move || {
        lines.read_to_string(&mut all).unwrap();
        all
    })
}

fn signal(child: &Child, name: &str) {
    let status = Command::new("kill").args([&format!("-{name}"), &child.id().to_string()]).status().unwrap();
    assert!(status.success());
}

fn result(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn a_jobs_bytes_code_and_numbers_come_to_the_caller() {
    let fake = Fake::start();
    let log = noise(100_000);
    fake.order(|order| {
        order.log.clone_from(&log);
        order.log_gap = true;
        order.usage = Some(Usage {
            wall_seconds: 12.5,
            cpu_seconds: Some(30.25),
            memory_peak_bytes: Some(3 << 30),
            out_of_memory: false,
        });
        order.finish(Verdict::Failure, Some(75));
    });
    let dir = tempfile::tempdir().unwrap();
    let (results, env) = (dir.path().join("r.json"), dir.path().join("e.env"));
    std::fs::write(&env, "A=\"1\"\nB=file\n").unwrap();
    let mut command = submit(
        &fake,
        &["--entrypoint", "/bin/sh", "--env", "B=x=y\n", "--env", "HERE", "--user", "1:2", "--workdir", "/w"],
    );
    command.args(["--timeout", "90s", "--priority", "-2", "--name", "evil\u{1b}[2J\nname"]);
    command.arg("--env-file").arg(&env).arg("--result-file").arg(&results).args(["--", "-c", "exit 75"]);
    let output = command.env("HERE", "ours").output().unwrap();

    assert_eq!(code(&output), 75, "{}", stderr(&output));
    assert!(output.stdout == log, "every byte and nothing else");
    let text = stderr(&output);
    for part in ["pilotlight: job ", "image_ready", "12.5 s", "30.2 s", "3.0 GiB", "failure, exit code 75"] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    assert!(!text.contains('\u{1b}'));

    let (id, body) = fake.look(|order| (order.id.clone(), order.body.clone()));
    let body: SubmitJob = serde_json::from_value(body).unwrap();
    assert_eq!(body.spec.entrypoint.as_deref(), Some(["/bin/sh".to_owned()].as_slice()));
    assert_eq!(body.spec.command, ["-c", "exit 75"]);
    let env = [("A", "\"1\""), ("B", "x=y\n"), ("HERE", "ours")];
    assert_eq!(body.spec.env, env.map(|(key, value)| (key.to_owned(), value.to_owned())).into());
    assert_eq!((body.spec.user.as_deref(), body.spec.workdir.as_deref()), (Some("1:2"), Some("/w")));
    assert_eq!((body.timeout_seconds, body.priority), (Some(90), Some(-2)));
    let expected = json!({
        "verdict": "failure", "exit_code": 75, "reason": null, "job": id, "log_gap": true,
        "usage": {"wall_seconds": 12.5, "cpu_seconds": 30.25, "memory_peak_bytes": 3_221_225_472_u64,
                  "out_of_memory": false},
    });
    assert_eq!(result(&results), expected);
}

#[test]
fn a_log_whose_connection_breaks_again_and_again_comes_whole() {
    let fake = Fake::start();
    let log = noise(300_000);
    fake.order(|order| {
        order.log.clone_from(&log);
        order.breaks = vec![1, 0, 65_537, 4096, 100_000];
        order.finish(Verdict::Success, Some(0));
    });
    let output = submit(&fake, &[]).output().unwrap();
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert!(output.stdout == log, "{} of {} bytes", output.stdout.len(), log.len());
    assert!(fake.look(|order| order.breaks.is_empty()), "all breaks were met");
}

#[test]
fn a_scaler_that_goes_away_and_comes_back_is_ridden_out() {
    let mut fake = Fake::start();
    let (first, second) = (noise(50_000), b"the rest\n".to_vec());
    fake.order(|order| order.log.clone_from(&first));
    let mut child = submit(&fake, &["--name", "n"]).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let mut got = vec![0; first.len()];
    stdout.read_exact(&mut got).unwrap();

    fake.stop();
    let told = stderr_until(&mut child, "trying again");
    fake.restart();
    fake.order(|order| {
        order.log.extend_from_slice(&second);
        order.finish(Verdict::Success, Some(0));
    });
    stdout.read_to_end(&mut got).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(got == [first, second].concat());
    assert!(told.join().unwrap().contains("the scaler answers again"));
    assert_eq!(fake.look(|order| order.puts), 1, "not submitted twice");
}

#[test]
fn what_another_program_on_the_port_says_is_no_answer() {
    let fake = Fake::start();
    fake.order(|order| {
        order.strangers = 3;
        order.log = b"mine\n".to_vec();
        order.finish(Verdict::Success, Some(0));
    });
    let output = submit(&fake, &[]).output().unwrap();
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert_eq!(output.stdout, b"mine\n");
    assert!(stderr(&output).contains("is not a Pilotlight scaler"));
    assert!(!fake.look(|order| order.strangers > 0));
}

#[test]
fn the_first_signal_cancels_and_the_log_is_shown_to_its_end() {
    for name in ["INT", "TERM", "HUP"] {
        let fake = Fake::start();
        fake.order(|order| {
            order.log = b"working\n".to_vec();
            order.refuse_cancels = 2;
        });
        let dir = tempfile::tempdir().unwrap();
        let results = dir.path().join("result");
        let mut child = submit(&fake, &["--result-file", results.to_str().unwrap()]).spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut got = String::new();
        stdout.read_line(&mut got).unwrap();
        signal(&child, name);
        fake.wait(|order| order.cancelled);
        fake.order(|order| {
            order.log.extend_from_slice(b"cleaned up\n");
            order.finish(Verdict::Cancelled, Some(143));
        });
        stdout.read_to_string(&mut got).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(130), "SIG{name}");
        assert_eq!(got, "working\ncleaned up\n");
        assert_eq!(result(&results)["verdict"], "cancelled");
    }
}

#[test]
fn the_second_signal_leaves_at_once() {
    let fake = Fake::start();
    fake.order(|order| {
        order.refuse_cancels = u32::MAX;
        // More than a pipe holds, and nobody reads it.
        order.log = noise(3_000_000);
    });
    let dir = tempfile::tempdir().unwrap();
    let results = dir.path().join("result");
    let mut child = submit(&fake, &["--result-file", results.to_str().unwrap()]).spawn().unwrap();
    fake.wait(|order| !order.offsets.is_empty());
    signal(&child, "TERM");
    let told = stderr_until(&mut child, "cancelling");
    signal(&child, "TERM");
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(told.join().unwrap().contains("pilotlight cancel"));
    assert_eq!(result(&results)["verdict"], Value::Null);
}

#[test]
fn a_reader_that_leaves_early_does_not_end_the_job() {
    let fake = Fake::start();
    fake.order(|order| order.log = b"first\n".to_vec());
    let mut child = submit(&fake, &[]).spawn().unwrap();
    let mut first = [0; 6];
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut first).unwrap();
    drop(stdout);
    fake.order(|order| order.log.extend_from_slice(b"second\n"));
    let told = stderr_until(&mut child, "the job goes on");
    assert!(fake.look(|order| !order.cancelled));
    fake.order(|order| order.finish(Verdict::Failure, Some(3)));
    assert_eq!(child.wait().unwrap().code(), Some(3), "{}", told.join().unwrap());
}

#[test]
fn a_slow_reader_gets_every_byte() {
    let fake = Fake::start();
    let log = noise(3_000_000);
    fake.order(|order| {
        order.log.clone_from(&log);
        order.finish(Verdict::Success, Some(0));
    });
    let mut child = submit(&fake, &[]).spawn().unwrap();
    // Nothing is read until the pipe is full and the program has been seen waiting for us.
    fake.wait(|order| !order.offsets.is_empty());
    let mut got = vec![0; 1];
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut got).unwrap();
    let told = stderr_until(&mut child, "job ");
    stdout.read_to_end(&mut got).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0), "{}", told.join().unwrap());
    assert!(got == log);
}

#[test]
fn refusals_have_their_own_codes() {
    let refused = |status: u16, code: &str, message: &str| {
        let fake = Fake::start();
        fake.order(|order| order.refusal = Some((status, code.to_owned(), message.to_owned())));
        submit(&fake, &[]).output().unwrap()
    };
    let unknown = refused(422, "unknown_label", "no label \"cpu-small\"\n\u{1b}[2J");
    assert_eq!(code(&unknown), 65);
    assert!(stderr(&unknown).contains(r#"no label "cpu-small"\n\u{1b}[2J"#), "{}", stderr(&unknown));
    assert_eq!(code(&refused(400, "bad_request", "no image")), 65);
    assert_eq!(code(&refused(409, "other_body", "known with another body")), 65);
    assert_eq!(code(&refused(403, "forbidden", "not yours")), 77);

    let fake = Fake::start();
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("my-token");
    std::fs::write(&token, "wrong\n").unwrap();
    let denied = submit(&fake, &["--token-file", token.to_str().unwrap()]).output().unwrap();
    assert_eq!(code(&denied), 77);
    assert!(stderr(&denied).contains("my-token"), "{}", stderr(&denied));
    let bad_label = client(&fake, &["submit", "--label", "a b", "--image", "i"]).output().unwrap();
    assert_eq!(code(&bad_label), 65);
    assert_eq!(code(&submit(&fake, &["--env-file", "/nonexistent"]).output().unwrap()), 65);
}

#[test]
fn a_detached_job_is_only_named() {
    let fake = Fake::start();
    let output = submit(&fake, &["--detach"]).output().unwrap();
    assert_eq!(code(&output), 0);
    let id = fake.look(|order| order.id.clone());
    assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{id}\n"));
    let output = submit(&fake, &["--detach", "--json"]).output().unwrap();
    let job: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(job["state"], "queued");
}

#[test]
fn progress_is_told_until_the_job_runs() {
    let fake = Fake::start();
    fake.order(|order| order.reason = Some("no machine yet".to_owned()));
    let mut child = submit(&fake, &[]).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap());
    let mut expect = |text: &str, next: &dyn Fn(&mut Order)| {
        let mut line = String::new();
        while !line.contains(text) {
            line.clear();
            assert_ne!(lines.read_line(&mut line).unwrap(), 0, "{text}");
        }
        fake.order(next);
    };
    expect("queued: no machine yet", &|order| {
        order.state = JobState::Assigned;
        order.detail = Some("pulling 40%".to_owned());
    });
    expect("pulling 40%", &|order| order.state = JobState::Running);
    expect("started on instance", &|order| order.finish(Verdict::Timeout, Some(137)));
    expect("timeout", &|_| {});
    assert_eq!(child.wait().unwrap().code(), Some(124));
}
