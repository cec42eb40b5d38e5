//! What jobs print, at its extremes: every byte, in order, from the job to the reader, and little memory for it.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Read,
    process::{Child, ChildStdout, Command, Stdio},
    time::Duration,
};

use pilotlight_runtime::clock::boottime;
use pilotlight_tests::site::{ONE_POOL, Peaks, Site, alive, docker, peak_rss, wait};
use serde_json::Value;

use super::{code, err, marked};

const MIB: u64 = 1 << 20;

/// What each of our programs may have resident at most while output passes, whatever its volume; a debug build alone
/// takes half of it.
const MEMORY: u64 = 80 * MIB;

/// What was measured, for whoever asks for the output of tests that pass.
#[expect(clippy::print_stdout, reason = "a measurement")]
fn say(text: &str) {
    println!("{text}");
}

/// A `submit` whose stdout the test reads itself.
struct Reader {
    child: Child,
    /// Dropped, it is closed.
    stdout: Option<ChildStdout>,
}

impl Reader {
    fn new(site: &Site, args: &[&str]) -> Self {
        let mut command = site.client(&["submit", "--label", "cpu", "--image", "pilotlight/host"]);
        let stderr = File::create(site.path("reader.err")).unwrap();
        let mut child = command.args(args).stdout(Stdio::piped()).stderr(stderr).spawn().unwrap();
        let stdout = child.stdout.take();
        Self { child, stdout }
    }

    fn stdout(&mut self) -> &mut ChildStdout {
        self.stdout.as_mut().unwrap()
    }

    /// The exit code, once there is one.
    fn code(mut self, site: &Site) -> i32 {
        let mut code = None;
        wait("submit has ended", || {
            code = self.child.try_wait()?.map(|status| status.code().unwrap());
            Ok(code.is_some())
        })
        .unwrap_or_else(|error| panic!("{error}: {}", told(site)));
        code.unwrap()
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

fn told(site: &Site) -> String {
    fs::read_to_string(site.path("reader.err")).unwrap_or_default()
}

fn last_job(site: &Site) -> Value {
    site.json(&["jobs", "--all"]).unwrap().as_array().unwrap().last().unwrap().clone()
}

fn log_of(site: &Site, job: &Value) -> Vec<u8> {
    let mut log = Vec::new();
    site.copy_log(job["id"].as_str().unwrap(), &mut log).unwrap();
    log
}

/// SHA-256 of what a stream holds, and how many bytes that is. By the system's own program: a test that computes the
/// sum itself in a debug build would be what is measured.
fn sum_of(mut stream: impl Read) -> (String, u64) {
    let mut program = Command::new("sha256sum").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let bytes = std::io::copy(&mut stream, &mut program.stdin.take().unwrap()).unwrap();
    let output = program.wait_with_output().unwrap();
    (String::from_utf8(output.stdout).unwrap().split_whitespace().next().unwrap().to_owned(), bytes)
}

/// All kinds of bytes that a program may print.
fn all_kinds() -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend((0..=u8::MAX).chain((0..=u8::MAX).rev()));
    for high in 0..=u8::MAX {
        bytes.extend((0..=u8::MAX).flat_map(|low| [high, low]));
    }
    // Cut in the middle, overlong, alone, beyond the last: none of these is UTF-8.
    for invalid in [&b"\xf0\x9f\x94"[..], b"\xc0\xaf", b"\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xff\xfe"] {
        bytes.extend_from_slice(invalid);
        bytes.push(b'\n');
    }
    for percent in 0..=100 {
        bytes.extend_from_slice(format!("\r\x1b[2K{percent:3} % {}", "#".repeat(percent)).as_bytes());
    }
    bytes.extend_from_slice(b"\r\n\n\r\r\n\0\0\0\n[pilotlight] not one of ours\n");
    for n in 0..100_u8 {
        bytes.extend(std::iter::repeat_n(b'a' + n % 26, 40 * 1024));
        bytes.push(b'\n');
    }
    bytes.extend_from_slice(b"no newline at the end");
    bytes
}

#[test]
fn every_byte_comes_as_it_was_by_submit_and_by_the_log_route() {
    let data = tempfile::tempdir().unwrap();
    let bytes = all_kinds();
    fs::write(data.path().join("bytes"), &bytes).unwrap();
    let site = Site::new(&marked(data.path())).unwrap();
    // In one piece, in small ones, and through the other stream.
    for script in [
        "cat /marks/bytes",
        "head -c 9999 /marks/bytes | dd bs=7 status=none; tail -c +10000 /marks/bytes",
        "cat /marks/bytes >&2",
    ] {
        let output = site.submit(&["--", "bash", "-c", script]).unwrap();
        assert_eq!(code(&output), 0, "{}", err(&output));
        assert!(output.stdout == bytes, "{script}: {} bytes of {}", output.stdout.len(), bytes.len());
        assert!(log_of(&site, &last_job(&site)) == bytes, "{script}: the log route");
        let logs = site.call(&["logs", last_job(&site)["id"].as_str().unwrap()]).unwrap();
        assert!(logs.stdout == bytes, "{script}: the logs command");
    }
    site.finish().unwrap();
}

#[test]
fn no_output_is_an_empty_log_and_none_of_ours_is_in_it() {
    let site = Site::new(ONE_POOL).unwrap();
    for script in ["exit 3", "exec >&- 2>&-; sleep 1; exit 3"] {
        let output = site.submit(&["--", "bash", "-c", script]).unwrap();
        assert_eq!((code(&output), output.stdout.as_slice()), (3, &b""[..]), "{}", err(&output));
        let job = last_job(&site);
        assert_eq!((log_of(&site, &job), &job["log_gap"]), (Vec::new(), &Value::Bool(false)));
    }
    site.finish().unwrap();
}

#[test]
fn each_stream_keeps_its_order_when_both_are_written_at_once() {
    let site = Site::new(ONE_POOL).unwrap();
    // Each of its own bytes, so that they can be told apart wherever the one is cut by the other.
    let script = "(for i in {1..20000}; do echo -n $i,; done) & \
                  (for i in {1..20000}; do echo -n $i; done | tr 0-9 a-j >&2) & wait; wait";
    let output = site.submit(&["--", "bash", "-c", script]).unwrap();
    assert_eq!(code(&output), 0, "{}", err(&output));
    let (digits, letters): (Vec<u8>, Vec<u8>) = output.stdout.iter().partition(|byte| !byte.is_ascii_lowercase());
    let numbers = |between: &str| (1..=20000).map(|n| format!("{n}{between}")).collect::<String>().into_bytes();
    let as_letters = |bytes: Vec<u8>| bytes.into_iter().map(|byte| byte - b'0' + b'a').collect::<Vec<_>>();
    assert!(digits == numbers(","));
    assert!(letters == as_letters(numbers("")));
    site.finish().unwrap();
}

#[test]
fn a_line_of_100_mib_has_no_newline_and_costs_no_memory() {
    let site = Site::new(ONE_POOL).unwrap();
    let mut reader = Reader::new(&site, &["--", "bash", "-c", "head -c 104857600 /dev/zero | tr '\\0' x"]);
    let peaks = Peaks::of(pids(&site, &reader));
    let got = sum_of(reader.stdout());
    assert_eq!(reader.code(&site), 0, "{}", told(&site));
    held(peaks);
    assert_eq!(got, sum_of(std::io::repeat(b'x').take(100 * MIB)));
    let mut log = File::create(site.path("log")).unwrap();
    site.copy_log(last_job(&site)["id"].as_str().unwrap(), &mut log).unwrap();
    assert_eq!(sum_of(File::open(site.path("log")).unwrap()), got);
    site.finish().unwrap();
}

fn pids(site: &Site, reader: &Reader) -> BTreeMap<&'static str, u32> {
    let (agent, attach) = (site.agent_pid().unwrap(), site.attach_pid().unwrap());
    BTreeMap::from([
        ("scaler", site.scaler_pid().unwrap()),
        ("agent", agent),
        ("attach", attach),
        ("client", reader.child.id()),
    ])
}

fn held(peaks: Peaks) {
    let peaks = peaks.end().unwrap();
    let all: Vec<_> = peaks.iter().map(|(name, peak)| format!("{name} {}", peak / MIB)).collect();
    say(&format!("MiB resident at most: {}", all.join(", ")));
    for (name, peak) in &peaks {
        assert!((1..MEMORY).contains(peak), "{name} had {peak} bytes");
    }
}

/// One GiB; by `PILOTLIGHT_TEST_OUTPUT_GIB`, more.
fn much() -> u64 {
    std::env::var("PILOTLIGHT_TEST_OUTPUT_GIB").map_or(1, |gib| gib.parse().unwrap()) << 30
}

#[test]
fn much_output_below_max_log_comes_whole_and_is_not_held_in_memory() {
    let size = much();
    let site = Site::new(&format!("max_log = \"100GiB\"\n{ONE_POOL}")).unwrap();
    let began = boottime();
    let script = format!("yes {} | head -c {size}; exit 5", "x".repeat(99));
    let mut reader = Reader::new(&site, &["--", "bash", "-c", &script]);
    let peaks = Peaks::of(pids(&site, &reader));
    let got = sum_of(reader.stdout());
    assert_eq!(reader.code(&site), 5, "{}", told(&site));
    say(&format!("{} MiB in {:?}", size / MIB, boottime() - began));
    held(peaks);
    let yes = Command::new("yes").arg("x".repeat(99)).stdout(Stdio::piped()).spawn();
    let mut yes = yes.unwrap();
    let wanted = sum_of(yes.stdout.take().unwrap().take(size));
    let _ended_by_its_pipe = yes.wait();
    assert_eq!(got, wanted);
    let job = last_job(&site);
    assert_eq!(job["log_gap"], false);
    let memory = job["usage"]["memory_peak_bytes"].as_u64().unwrap();
    assert!(memory < 200 * MIB, "the job's own cgroup had {memory} bytes");
    site.finish().unwrap();
}

#[test]
fn much_output_above_max_log_is_counted_and_dropped_and_the_code_is_kept() {
    const MAX: u64 = 64 * MIB;
    let size = much();
    let site = Site::new(&format!("max_log = \"64MiB\"\n{ONE_POOL}")).unwrap();
    let script = format!("yes {} | head -c {size}; exit 5", "x".repeat(99));
    let mut reader = Reader::new(&site, &["--", "bash", "-c", &script]);
    let peaks = Peaks::of(pids(&site, &reader));
    let mut bytes = Vec::new();
    reader.stdout().read_to_end(&mut bytes).unwrap();
    assert_eq!(reader.code(&site), 5, "{}", told(&site));
    held(peaks);
    let (kept, notices) = bytes.split_at(usize::try_from(MAX).unwrap());
    let line = format!("{}\n", "x".repeat(99)).into_bytes();
    assert!(kept.chunks(100).all(|part| *part == line[..part.len()]));
    let begin = if kept.ends_with(b"\n") { "" } else { "\n" };
    let want = format!(
        "{begin}[pilotlight] the log has reached max_log (64.0 MiB); what follows is dropped\n\
         [pilotlight] {} bytes were dropped past max_log\n",
        size - MAX
    );
    assert_eq!(String::from_utf8_lossy(notices), want);
    let job = last_job(&site);
    assert_eq!((&job["log_gap"], &job["exit_code"]), (&false.into(), &5.into()), "dropped by a rule is not a gap");
    assert!(log_of(&site, &job) == bytes);
    site.finish().unwrap();
}

#[test]
fn a_process_that_holds_a_stream_open_ends_with_the_job() {
    let site = Site::new(ONE_POOL).unwrap();
    // Told apart from all other sleepers of this box by how long they sleep.
    let time = format!("8{}", std::process::id());
    let sleepers = || {
        let output = Command::new("pgrep").args(["-fx", &format!("sleep {time}")]).output().unwrap();
        String::from_utf8(output.stdout).unwrap().lines().count()
    };
    let script = format!(
        "sleep {time} & (setsid sleep {time} &); (setsid bash -c 'sleep {time} & exit' &); trap '' TERM HUP; \
         echo on; until [ -e /tmp/end ]; do sleep 0.1; done; echo off; exit 3"
    );
    let job = site.begin(&["--", "bash", "-c", &script]).unwrap();
    job.until("on\n").unwrap();
    let container = site.containers().unwrap().remove(0);
    docker(&["exec", "-d", &container, "sleep", &time]).unwrap();
    wait("all sleep", || Ok(sleepers() == 4)).unwrap();
    docker(&["exec", &container, "touch", "/tmp/end"]).unwrap();
    let told = boottime();
    let output = job.end().unwrap();
    assert_eq!((code(&output), output.stdout.as_slice()), (3, &b"on\noff\n"[..]), "{}", err(&output));
    let took = boottime() - told;
    say(&format!("over {took:?} after its end"));
    assert!(took < Duration::from_secs(30), "{took:?}");
    wait("no sleeper is left", || Ok(sleepers() == 0)).unwrap();
    site.finish().unwrap();
}

#[test]
fn a_reader_that_is_slow_holds_up_nobody_and_one_that_leaves_is_told_where_to_go_on() {
    let site = Site::new(ONE_POOL).unwrap();
    let script = "yes | head -c 200000000; exit 4";
    let mut reader = Reader::new(&site, &["--", "bash", "-c", script]);
    let mut first = [0; 1000];
    reader.stdout().read_exact(&mut first).unwrap();
    wait("the job is over although nobody reads", || Ok(last_job(&site)["state"] == "finished")).unwrap();
    let client = reader.child.id();
    assert!(alive(client), "{}", told(&site));
    assert!(peak_rss(client) < MEMORY, "{} bytes", peak_rss(client));
    let (_, rest) = sum_of(reader.stdout());
    assert_eq!(rest, 199_999_000);
    assert_eq!(reader.code(&site), 4, "{}", told(&site));

    let script = "echo on; sleep 1; for i in {1..100}; do echo $i; sleep 0.01; done; exit 6";
    let mut reader = Reader::new(&site, &["--", "bash", "-c", script]);
    reader.stdout().read_exact(&mut first[..3]).unwrap();
    // As by `| head -1`.
    reader.stdout = None;
    assert_eq!(reader.code(&site), 6, "the job's own code all the same: {}", told(&site));
    let job = last_job(&site);
    let hint = format!("`pilotlight logs {}`", job["id"].as_str().unwrap());
    assert!(told(&site).contains("the job goes on") && told(&site).contains(&hint), "{}", told(&site));
    assert!(log_of(&site, &job).ends_with(b"\n99\n100\n"));
    site.finish().unwrap();
}
