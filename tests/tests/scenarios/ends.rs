//! How jobs end, as `submit` tells it.

use std::fs;

use pilotlight_tests::site::{ONE_POOL, Site, signal, wait};
use serde_json::Value;

use super::{code, err};

/// Runs a script, and gives `submit`'s code and what the result file tells.
fn ended(site: &Site, options: &[&str], script: &str) -> (i32, Value) {
    let result = site.path("result.json");
    let args = [options, &["--result-file", result.to_str().unwrap(), "--", "bash", "-c", script]].concat();
    let output = site.submit(&args).unwrap();
    (code(&output), serde_json::from_slice(&fs::read(&result).unwrap()).unwrap())
}

#[test]
fn c32_exit_codes_are_the_jobs_own_and_told_apart_from_our_own() {
    let site = Site::new(ONE_POOL).unwrap();
    // Among them all that are our own words in other cases: 64 to 78, 124, 130.
    let plain = [0, 1, 2, 7, 22, 64, 65, 69, 74, 75, 77, 78, 124, 126, 127, 128, 130, 137, 143, 255];
    let mut cases: Vec<(String, i32)> = plain.into_iter().map(|code| (format!("exit {code}"), code)).collect();
    for (script, code) in [
        ("exit 256", 0),
        ("exit -1", 255),
        ("set -o pipefail; false | true", 1),
        ("set -o pipefail; (exit 22) | cat; exit $?", 22),
        ("false | true", 0),
        ("/no/such/program", 127),
        ("/etc/passwd", 126),
        ("kill -TERM $$", 143),
        ("kill -KILL $$", 137),
        ("kill -SEGV $$", 139),
        ("exec bash -c 'exit 9'", 9),
    ] {
        cases.push((script.to_owned(), code));
    }
    for (script, want) in cases {
        let (code, told) = ended(&site, &[], &script);
        let verdict = if want == 0 { "success" } else { "failure" };
        assert_eq!(
            (code, &told["exit_code"], &told["verdict"]),
            (want, &want.into(), &verdict.into()),
            "{script}: {told}"
        );
        assert_eq!(
            (&told["log_gap"], &told["usage"]["out_of_memory"]),
            (&false.into(), &false.into()),
            "{script}: {told}"
        );
    }
    // The same numbers when they are ours.
    let (code, told) = ended(&site, &["--timeout", "2s"], "sleep 500");
    assert_eq!((code, &told["verdict"]), (124, &"timeout".into()), "{told}");
    let (code, told) = ended(&site, &["--user", "nosuchuser"], "true");
    assert_eq!((code, &told["verdict"], &told["exit_code"]), (65, &"failure".into(), &Value::Null), "{told}");
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

    let script = "head -c 5242880 /dev/urandom >/tmp/x; cat /tmp/x; sha256sum </tmp/x";
    let output = site.submit(&["--", "bash", "-c", script]).unwrap();
    let (body, sum) = output.stdout.split_at(5_242_880);
    let file = site.path("body");
    fs::write(&file, body).unwrap();
    let ours = std::process::Command::new("sha256sum").stdin(fs::File::open(file).unwrap()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(sum), String::from_utf8_lossy(&ours.stdout));
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

/// Values that a command line, a form of lines, a shell or an expander would change.
fn values() -> Vec<String> {
    let long: String = ('!'..='~').cycle().take(100 * 1024).collect();
    let mut values: Vec<String> = [
        "",
        " ",
        r#"{"a": "b c"}"#,
        "l1\nl2\n",
        "\n",
        "l1\r\nl2\r\n",
        "|x|y",
        "-n",
        "--",
        "--env",
        "a=b=c",
        "=",
        "$(id)",
        "`id`",
        "$HOME ${HOME} $(HOME) $$HOME $$(HOME) %HOME% {{HOME}}",
        r#"'"\"#,
        "\\",
        r"\n\t\0\\",
        r#"echo "\"""#,
        "\"quoted\"",
        "'quoted'",
        "*",
        "~",
        "# no comment",
        "!!",
        "%s%n",
        "a;b&c|d>e<f",
        "\ttabs\t",
        " space around ",
        "\u{1b}[31m\u{7}\u{7f}",
        "\u{feff}bom",
        "\u{1f525} \u{10ffff} e\u{301}",
    ]
    .map(str::to_owned)
    .to_vec();
    values.push(long);
    values
}

/// What comes out of `printf '%s\0'` for these.
fn with_zeros(values: &[String]) -> Vec<u8> {
    values.iter().flat_map(|value| value.bytes().chain([0])).collect()
}

#[test]
fn c31_values_that_break_naive_env_passing_arrive_byte_for_byte() {
    let site = Site::new(ONE_POOL).unwrap();
    let values = values();
    let pairs: Vec<String> = values.iter().enumerate().map(|(n, value)| format!("V{n}={value}")).collect();
    let mut args: Vec<&str> = pairs.iter().flat_map(|pair| ["--env", pair]).collect();
    let script = format!("for n in {{0..{}}}; do v=V$n; printf '%s\\0' \"${{!v}}\"; done", values.len() - 1);
    args.extend(["--", "bash", "-c", &script]);
    let output = site.submit(&args).unwrap();
    assert_eq!(code(&output), 0, "{}", err(&output));
    assert!(output.stdout == with_zeros(&values), "{:?}", String::from_utf8_lossy(&output.stdout));

    // As words of the command, and of an entrypoint's.
    let mut args = vec!["--", "bash", "-c", "printf '%s\\0' \"$@\"", "bash"];
    args.extend(values.iter().map(String::as_str));
    let output = site.submit(&args).unwrap();
    assert!(output.stdout == with_zeros(&values), "{:?}", String::from_utf8_lossy(&output.stdout));

    // From a file of lines, which has no quotes: what stands behind the first `=` is the value.
    let lines: Vec<String> = values.iter().filter(|value| !value.contains(['\n', '\r'])).cloned().collect();
    let file = site.path("env");
    let text: String = lines.iter().enumerate().map(|(n, value)| format!("V{n}={value}\n")).collect();
    fs::write(&file, format!("# a comment\n\n{text}")).unwrap();
    let script = format!("for n in {{0..{}}}; do v=V$n; printf '%s\\0' \"${{!v}}\"; done", lines.len() - 1);
    let output = site.submit(&["--env-file", file.to_str().unwrap(), "--", "bash", "-c", &script]).unwrap();
    assert_eq!(code(&output), 0, "{}", err(&output));
    assert!(output.stdout == with_zeros(&lines), "{:?}", String::from_utf8_lossy(&output.stdout));
    site.finish().unwrap();
}

#[test]
fn c31_a_command_is_printed_as_it_is_and_never_run_a_second_time() {
    let site = Site::new(ONE_POOL).unwrap();
    let script = r#"echo "\""; echo '$(touch /tmp/x)'; ls /tmp/x 2>/dev/null; echo `echo once`"#;
    let output = site.submit(&["--", "bash", "-c", script]).unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "\"\n$(touch /tmp/x)\nonce\n", "{}", err(&output));
    site.finish().unwrap();
}

#[test]
fn environment_file_user_directory_and_entrypoint_arrive_as_given() {
    let site = Site::new(ONE_POOL).unwrap();
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

#[test]
fn c32_out_of_memory_is_told_apart() {
    // Two hundred jobs at once: each has a two hundredth of the memory.
    let site = Site::new(&ONE_POOL.replace("cpu_jobs = 2", "cpu_jobs = 200")).unwrap();
    let script = "head -c 600M /dev/zero | tail -c 600M | wc -c; exit ${PIPESTATUS[1]}";
    let output = site.submit(&["--", "bash", "-c", script]).unwrap();
    assert_eq!(code(&output), 137, "{}", err(&output));
    assert!(err(&output).contains("out of memory: the job's limit is"), "{}", err(&output));
    let jobs = site.json(&["jobs", "--all"]).unwrap();
    assert_eq!((&jobs[0]["verdict"], &jobs[0]["usage"]["out_of_memory"]), (&"failure".into(), &true.into()));
    site.finish().unwrap();
}

/// A registry that answers every request for an image with one status, or never.
fn registry(status: Option<u16>) -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let mut kept = Vec::new();
        for mut stream in listener.incoming().flatten() {
            let mut request = [0; 4096];
            let read = std::io::Read::read(&mut stream, &mut request).unwrap_or(0);
            let is_ping = String::from_utf8_lossy(&request[..read]).starts_with("GET /v2/ ");
            if let Some(status) = status {
                let (status, word) = match status {
                    _ if is_ping => (200, ""),
                    401 => (401, "UNAUTHORIZED"),
                    404 => (404, "MANIFEST_UNKNOWN"),
                    other => (other, "UNAVAILABLE"),
                };
                let body = format!(r#"{{"errors":[{{"code":"{word}","message":"no"}}]}}"#);
                let head = "Content-Type: application/json\r\nConnection: close";
                let answer = format!("HTTP/1.1 {status} X\r\n{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
                let _client_left = std::io::Write::write_all(&mut stream, answer.as_bytes());
            } else {
                kept.push(stream);
            }
        }
    });
    port
}

#[test]
fn an_image_that_cannot_be_had_says_whose_fault_it_is() {
    let site = Site::new(ONE_POOL).unwrap();
    let submit = |port: u16| {
        let image = format!("localhost:{port}/no/such:1");
        site.call(&["submit", "--label", "cpu", "--image", &image, "--", "true"]).unwrap()
    };
    for (status, want) in [(404, 65), (401, 65), (503, 75)] {
        let output = submit(registry(Some(status)));
        assert_eq!(code(&output), want, "{status}: {}", err(&output));
        assert!(err(&output).contains("cannot pull image localhost:"), "{}", err(&output));
    }
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    assert_eq!(code(&submit(closed)), 75);

    let image = format!("localhost:{}/no/such:1", registry(None));
    let mut job = site.client(&["submit", "--label", "cpu", "--image", &image, "--", "true"]).spawn().unwrap();
    wait("it is being pulled", || {
        Ok(site.json(&["jobs"])?[0]["detail"].as_str().is_some_and(|detail| detail.contains("pulling")))
    })
    .unwrap();
    let id = site.json(&["jobs"]).unwrap()[0]["id"].as_str().unwrap().to_owned();
    site.call(&["cancel", &id]).unwrap();
    assert_eq!(job.wait().unwrap().code(), Some(130), "a pull that hangs does not hold a cancel");
    site.finish().unwrap();
}
