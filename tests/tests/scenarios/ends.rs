//! How jobs end, as `submit` tells it.

use std::fs;

use pilotlight_tests::site::{ONE_POOL, Site, signal, wait};
use serde_json::Value;

use super::{code, err};

#[test]
fn exit_codes_are_the_jobs_own_and_the_result_file_tells_them_apart() {
    let site = Site::new(ONE_POOL).unwrap();
    let result = site.path("result.json");
    for want in [0, 1, 7, 22, 75, 126, 127, 137, 143, 255] {
        let script = format!("exit {want}");
        let args = ["--result-file", result.to_str().unwrap(), "--", "sh", "-c", &script];
        let output = site.submit(&args).unwrap();
        assert_eq!(code(&output), want, "{}", err(&output));
        let told: Value = serde_json::from_slice(&fs::read(&result).unwrap()).unwrap();
        assert_eq!(told["exit_code"], want);
        assert_eq!(told["verdict"], if want == 0 { "success" } else { "failure" });
        assert_eq!(told["log_gap"], false);
    }
    site.finish().unwrap();
}

#[test]
fn stdout_holds_the_jobs_bytes_and_nothing_else() {
    let site = Site::new(ONE_POOL).unwrap();
    let script = r"printf 'a\0b\377\n'; printf 'to stderr\n' >&2; printf 'no newline at the end'";
    let output = site.submit(&["--", "bash", "-c", script]).unwrap();
    let mut bytes = output.stdout.clone();
    let at = bytes.windows(10).position(|window| window == b"to stderr\n").expect("stderr is in the log");
    bytes.drain(at..at + 10);
    assert_eq!(bytes, b"a\0b\xff\nno newline at the end");
    for word in ["queued", "started", "finished", "WALL", "success"] {
        assert!(err(&output).contains(word), "{word}: {}", err(&output));
    }

    let output =
        site.submit(&["--", "bash", "-c", "head -c 5242880 /dev/urandom | tee >(sha256sum >&2 | cat)"]).unwrap();
    assert!(output.stdout.len() > 5_242_880, "{}", output.stdout.len());
    site.finish().unwrap();
}

#[test]
fn what_cannot_be_run_is_the_jobs_fault_and_said() {
    let site = Site::new(ONE_POOL).unwrap();
    let unknown = site.call(&["submit", "--label", "nosuch", "--image", "pilotlight/host", "--", "true"]).unwrap();
    assert_eq!(code(&unknown), 65);
    assert!(err(&unknown).contains("nosuch") && err(&unknown).contains("cpu"), "{}", err(&unknown));

    // The container's init starts, and says what it could not: the code is a shell's for "not found".
    let command = site.submit(&["--", "/nosuch/program"]).unwrap();
    assert_eq!(code(&command), 127, "{}", err(&command));
    assert!(String::from_utf8_lossy(&command.stdout).contains("/nosuch/program"));

    let user = site.submit(&["--user", "nosuchuser", "--", "true"]).unwrap();
    assert_eq!(code(&user), 65, "{}", err(&user));

    let image = site.call(&["submit", "--label", "cpu", "--image", "not an image", "--", "true"]).unwrap();
    assert_eq!(code(&image), 65, "{}", err(&image));
    site.finish().unwrap();
}

#[test]
fn a_deadline_ends_a_job_that_will_not_end() {
    let site = Site::new(ONE_POOL).unwrap();
    let output =
        site.submit(&["--timeout", "4s", "--", "bash", "-c", "trap '' TERM; echo on; while :; do sleep 1; done"]);
    let output = output.unwrap();
    assert_eq!(code(&output), 124, "{}", err(&output));
    assert_eq!(output.stdout, b"on\n");
    site.finish().unwrap();
}

#[test]
fn cancel_and_signals_to_submit_end_the_job() {
    let site = Site::new(ONE_POOL).unwrap();
    for how in ["cancel", "TERM", "INT", "HUP"] {
        let job = site.begin(&["--", "bash", "-c", "echo on; (setsid sleep 500 &); sleep 500"]).unwrap();
        job.until("on").unwrap();
        if how == "cancel" {
            let jobs = site.json(&["jobs"]).unwrap();
            let id = jobs[0]["id"].as_str().unwrap().to_owned();
            assert_eq!(jobs[0]["state"], "running");
            assert_eq!(code(&site.call(&["cancel", &id]).unwrap()), 0);
        } else {
            signal(job.pid(), how).unwrap();
        }
        let output = job.end().unwrap();
        assert_eq!(code(&output), 130, "{how}: {}", err(&output));
    }
    wait("no container is left", || Ok(site.containers()?.is_empty())).unwrap();
    site.finish().unwrap();
}

#[test]
fn environment_user_directory_and_entrypoint_arrive_as_given() {
    let site = Site::new(ONE_POOL).unwrap();
    let long = "x".repeat(100 * 1024);
    let values = ["b c", "l1\nl2\n", "|x|y", "-n", "a=b=c", "$(id)", "`id`", "'\"\\", "🔥", "", &long];
    for value in values {
        let pair = format!("VALUE={value}");
        let output = site.submit(&["--env", &pair, "--", "bash", "-c", "printf %s \"$VALUE\""]).unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), value, "{}", err(&output));
    }
    let file = site.path("env");
    fs::write(&file, "# a comment\nONE=\"quoted\"\nTWO=a b\n").unwrap();
    let output = site
        .submit(&[
            "--env-file",
            file.to_str().unwrap(),
            "--user",
            "1234:99",
            "--workdir",
            "/var/tmp",
            "--entrypoint",
            "bash",
            "--",
            "-c",
            "echo $ONE $TWO; id -u; id -g; pwd; echo $NVIDIA_VISIBLE_DEVICES",
        ])
        .unwrap();
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "\"quoted\" a b\n1234\n99\n/var/tmp\nvoid\n",
        "{}",
        err(&output)
    );
    site.finish().unwrap();
}
