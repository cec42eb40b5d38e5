//! The provider against agents that are shell scripts: they lock as an agent does, and leave traces beside the state.

use std::{io::Write, os::unix::fs::PermissionsExt, process::Stdio};

use pilotlight_wire::{Secret, agent::PowerMode};
use tokio::{io::AsyncWriteExt, task::JoinHandle};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::*;

mod destroy;

/// Lives until it is killed.
const LIVES: &str = "while :; do sleep 0.2 9>&-; done";

/// How long a test waits for something that has to come.
const BOUND: Duration = Duration::from_secs(20);

struct Host {
    dir: tempfile::TempDir,
}

struct Scaler {
    provider: LocalProvider,
    shutdown: CancellationToken,
    supervision: JoinHandle<()>,
}

impl Host {
    /// A host whose agents do `body` once they have the lock. `$dir` is their directory, `$out` the host's.
    fn new(body: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().display();
        let script = format!(
            r#"#!/bin/sh
out={out} dir=$3
case $1 in
clean)
    echo "$dir" >>"$out/cleaned"
    if [ -e "$out/docker-is-down" ]; then echo "cannot reach Docker" >&2; exit 1; fi
    ;;
run)
    exec 9>>"$dir/agent.lock"
    if ! flock -n 9; then echo "$$" >>"$out/second"; exit 75; fi
    read -r stat </proc/$$/stat
    set -- $stat
    echo "$$ ${{22}}" >"$dir/agent.lock"
    echo "$$" >>"$out/starts"
    {body}
    ;;
esac
"#
        );
        let host = Self { dir };
        host.write_agent(&script);
        host
    }

    /// Written by a process of its own: a descriptor of ours would be copied into whatever another test forks just
    /// then, and a program that somebody has open for writing cannot be run.
    fn write_agent(&self, script: &str) {
        let mut shell = std::process::Command::new("sh")
            .args(["-c", r#"cat >"$0" && chmod 755 "$0""#])
            .arg(self.path("agent"))
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        shell.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
        assert!(shell.wait().unwrap().success());
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn placement(&self) -> LocalPlacement {
        LocalPlacement { gpu_ids: Vec::new(), agent: Some(self.path("agent")), host_image: true }
    }

    fn provider(&self) -> LocalProvider {
        let limits = Limits {
            delay: Duration::from_millis(1),
            grace: Duration::from_millis(400),
            clean: Duration::from_secs(5),
            ..Limits::default()
        };
        LocalProvider::with_limits(self.dir.path(), limits)
    }

    fn scaler(&self) -> Scaler {
        let (provider, shutdown) = (self.provider(), CancellationToken::new());
        let (supervised, token) = (provider.clone(), shutdown.clone());
        let supervision = tokio::spawn(async move { supervised.supervise(token).await });
        Scaler { provider, shutdown, supervision }
    }

    fn folder(&self, instance: InstanceId) -> PathBuf {
        self.path("local").join(instance.to_string())
    }

    fn lines(&self, name: &str) -> Vec<String> {
        fs::read_to_string(self.path(name)).unwrap_or_default().lines().map(str::to_owned).collect()
    }

    async fn create(&self, provider: &LocalProvider) -> InstanceId {
        let bootstrap = bootstrap();
        provider.create(&bootstrap, &self.placement(), &tags()).await.unwrap();
        bootstrap.instance
    }

    /// Waits for the n-th start of an agent and answers with its pid.
    async fn start(&self, n: usize) -> u32 {
        eventually("an agent starts", || self.lines("starts").len() >= n).await;
        self.lines("starts")[n - 1].parse().unwrap()
    }

    /// Starts an agent by hand, as a scaler that is gone did; nobody reaps it.
    fn foreign_agent(&self, instance: InstanceId) -> std::process::Child {
        std::process::Command::new(self.path("agent"))
            .args(["run", "--dir"])
            .arg(self.folder(instance))
            .spawn()
            .unwrap()
    }
}

impl Scaler {
    async fn stop(self) {
        self.shutdown.cancel();
        self.supervision.await.unwrap();
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // A test that failed must not leave agents behind. Numbers are not reused within a test's time.
        for pid in self.lines("starts") {
            kill(pid.parse().unwrap());
        }
    }
}

fn tags() -> Tags {
    Tags {
        pool: "pool".parse().unwrap(),
        placement: "here".parse().unwrap(),
        created_at: jiff::Timestamp::UNIX_EPOCH,
        gpu_ids: Vec::new(),
    }
}

fn bootstrap() -> Bootstrap {
    Bootstrap {
        scaler_url: "http://127.0.0.1:1".to_owned(),
        instance: InstanceId::from_uuid(Uuid::now_v7()),
        secret: Secret::new("hush"),
        power: PowerMode::Exit,
        gpus: None,
        host_image: true,
    }
}

fn kill(pid: i32) {
    let _gone =
        rustix::process::kill_process(rustix::process::Pid::from_raw(pid).unwrap(), rustix::process::Signal::KILL);
}

/// Whether a process runs; a zombie does not.
fn runs(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + BOUND;
    while !condition() {
        assert!(Instant::now() < deadline, "waited too long until {what}");
        sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until an instance is listed as finished and answers with the note.
async fn finished(provider: &LocalProvider, instance: InstanceId) -> String {
    let deadline = Instant::now() + BOUND;
    loop {
        let listed = provider.list().await.unwrap();
        let found = listed.into_iter().find(|listed| listed.instance == instance).unwrap();
        if !found.alive {
            return found.note.unwrap();
        }
        assert!(Instant::now() < deadline, "the instance stays alive");
        sleep(Duration::from_millis(5)).await;
    }
}

fn alive(instance: InstanceId) -> Listed {
    Listed { instance, alive: true, note: None, tags: Some(tags()) }
}

#[tokio::test]
async fn an_instance_lives_until_it_is_destroyed() {
    let host = Host::new(&format!(r#"env >"$out/env"; touch "$out/env.done"; {LIVES}"#));
    let scaler = host.scaler();
    assert_eq!(scaler.provider.list().await.unwrap(), []);
    let bootstrap = bootstrap();
    let instance = bootstrap.instance;
    for _ in 0..3 {
        scaler.provider.create(&bootstrap, &host.placement(), &tags()).await.unwrap();
    }
    let pid = host.start(1).await;
    assert_eq!(scaler.provider.list().await.unwrap(), [alive(instance)]);

    let folder = host.folder(instance);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&folder), mode(&folder.join("bootstrap.json"))), (0o700, 0o600));
    let written: Bootstrap = serde_json::from_slice(&fs::read(folder.join("bootstrap.json")).unwrap()).unwrap();
    assert_eq!(written, bootstrap);
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    assert_eq!(stat.split(' ').nth(5).unwrap(), pid.to_string(), "not the leader of a session of its own");
    eventually("the environment is written", || host.path("env.done").exists()).await;
    let names: Vec<_> = host.lines("env").iter().filter_map(|line| Some(line.split_once('=')?.0.to_owned())).collect();
    assert!(names.contains(&"PATH".to_owned()) && !names.contains(&"CARGO_MANIFEST_DIR".to_owned()), "{names:?}");

    for _ in 0..2 {
        scaler.provider.destroy(instance).await.unwrap();
        assert!(!runs(pid));
        assert_eq!(scaler.provider.list().await.unwrap(), []);
    }
    assert_eq!(host.lines("cleaned"), [folder.display().to_string()]);
    assert_eq!((host.lines("starts").len(), host.lines("second").len()), (1, 0), "more than one agent was started");
    scaler.stop().await;
}

#[tokio::test]
async fn an_agent_that_dies_is_started_again() {
    let host = Host::new(LIVES);
    let scaler = host.scaler();
    let instance = host.create(&scaler.provider).await;
    for n in 1..4 {
        let pid = host.start(n).await;
        assert!(runs(pid));
        kill(pid.cast_signed());
    }
    host.start(4).await;
    assert_eq!(scaler.provider.list().await.unwrap(), [alive(instance)]);
    assert_eq!(host.lines("second"), [""; 0]);
    scaler.provider.destroy(instance).await.unwrap();
    scaler.stop().await;
}

#[tokio::test]
async fn five_deaths_in_a_row_are_enough() {
    let host = Host::new("exit 3");
    let scaler = host.scaler();
    let instance = host.create(&scaler.provider).await;
    let note = finished(&scaler.provider, instance).await;
    assert!(note.contains("5 times") && note.contains("exit status: 3") && note.contains("agent.log"), "{note}");
    scaler.stop().await;
    let second = host.scaler();
    // The second instance's start shows that the first one was looked at and left alone.
    let other = host.create(&second.provider).await;
    finished(&second.provider, other).await;
    assert_eq!(host.lines("starts").len(), 10);
    assert_eq!(finished(&second.provider, instance).await, note);
    for instance in [instance, other] {
        second.provider.destroy(instance).await.unwrap();
    }
    second.stop().await;
}

#[tokio::test]
async fn an_agent_that_left_for_good_is_not_started_again() {
    let host = Host::new(r#"echo "lapsed: no answer for 10m" >"$dir/done.new"; mv "$dir/done.new" "$dir/done""#);
    let scaler = host.scaler();
    let instance = host.create(&scaler.provider).await;
    assert_eq!(finished(&scaler.provider, instance).await, "lapsed: no answer for 10m");
    scaler.stop().await;
    let second = host.scaler();
    let other = host.create(&second.provider).await;
    finished(&second.provider, other).await;
    assert_eq!(host.lines("starts").len(), 2);
    second.provider.destroy(instance).await.unwrap();
    assert_eq!(second.provider.list().await.unwrap().len(), 1);
    second.stop().await;
}

#[tokio::test]
async fn agents_outlive_the_scaler_and_are_adopted() {
    let host = Host::new(LIVES);
    let first = host.scaler();
    let instance = host.create(&first.provider).await;
    let pid = host.start(1).await;
    first.stop().await;
    assert!(runs(pid));

    let second = host.scaler();
    let other = host.create(&second.provider).await;
    host.start(2).await;
    assert!(runs(pid), "adopted, not replaced");
    kill(pid.cast_signed());
    let again = host.start(3).await;
    assert_eq!(second.provider.list().await.unwrap().len(), 2);
    second.stop().await;

    // A scaler that only destroys, and never got as far as supervising.
    let third = host.provider();
    third.destroy(instance).await.unwrap();
    assert!(!runs(again));
    third.destroy(other).await.unwrap();
    assert_eq!(third.list().await.unwrap(), []);
    assert_eq!(host.lines("second"), [""; 0]);
}

#[tokio::test]
async fn a_scaler_that_is_dropped_at_once_loses_nothing() {
    let host = Host::new(LIVES);
    let first = host.scaler();
    let instance = host.create(&first.provider).await;
    first.supervision.abort();
    drop(first);
    let second = host.scaler();
    host.start(1).await;
    second.provider.destroy(instance).await.unwrap();
    assert_eq!(second.provider.list().await.unwrap(), []);
    for pid in host.lines("starts") {
        assert!(!runs(pid.parse().unwrap()));
    }
    second.stop().await;
}

#[tokio::test]
async fn zombies_are_dead() {
    let host = Host::new(LIVES);
    let provider = host.provider();
    let instance = host.create(&provider).await;
    let mut foreign = host.foreign_agent(instance);
    let pid = host.start(1).await;
    let scaler = host.scaler();
    let other = host.create(&scaler.provider).await;
    host.start(2).await;
    assert_eq!(host.lines("second"), [""; 0], "a second agent was started beside a living one");
    kill(pid.cast_signed());
    host.start(3).await;
    assert!(Path::new(&format!("/proc/{pid}")).exists(), "still a zombie, nobody reaped it");
    for instance in [instance, other] {
        scaler.provider.destroy(instance).await.unwrap();
    }
    foreign.wait().unwrap();
    scaler.stop().await;
}

#[tokio::test]
async fn a_lock_that_outlives_its_agent_is_waited_for() {
    // A child that was being forked when the agent died has a copy of the descriptor for a moment; here, for long.
    let host = Host::new(r#"timeout 20 cat "$out/pipe" & while :; do sleep 0.2 9>&-; done"#);
    assert!(std::process::Command::new("mkfifo").arg(host.path("pipe")).status().unwrap().success());
    let provider = host.provider();
    let instance = host.create(&provider).await;
    let mut foreign = host.foreign_agent(instance);
    let pid = host.start(1).await;
    // Opens once the child has it open too.
    let mut copy = tokio::fs::OpenOptions::new().write(true).open(host.path("pipe")).await.unwrap();
    kill(pid.cast_signed());
    eventually("it is a zombie", || !runs(pid)).await;
    let scaler = host.scaler();
    let text = Report(&scaler.provider.destroy(instance).await.unwrap_err()).to_string();
    assert!(text.contains("does not name"), "{text}");
    copy.shutdown().await.unwrap();
    drop(copy);
    scaler.provider.destroy(instance).await.unwrap();
    assert_eq!(scaler.provider.list().await.unwrap(), []);
    foreign.wait().unwrap();
    scaler.stop().await;
}

#[tokio::test]
async fn a_second_agent_on_a_directory_leaves() {
    let host = Host::new(LIVES);
    let scaler = host.scaler();
    let instance = host.create(&scaler.provider).await;
    let pid = host.start(1).await;
    assert_eq!(host.foreign_agent(instance).wait().unwrap().code(), Some(75));
    assert!(runs(pid));
    scaler.provider.destroy(instance).await.unwrap();
    scaler.stop().await;
}

#[tokio::test]
async fn what_cannot_be_read_is_not_taken_for_empty() {
    let host = Host::new(LIVES);
    let provider = host.provider();
    assert_eq!(provider.list().await.unwrap(), [], "nothing was made yet");
    let instance = host.create(&provider).await;
    fs::write(host.path("local/notes.txt"), "not an instance").unwrap();
    assert_eq!(provider.list().await.unwrap(), [alive(instance)]);
    // A file where a directory should be stands for all that cannot be read, also when root asks.
    let odd = host.folder(bootstrap().instance);
    fs::write(&odd, "").unwrap();
    let error = provider.list().await.unwrap_err();
    assert!(error.to_string().starts_with("cannot list the instances in"), "{error}");
    fs::remove_file(&odd).unwrap();
    provider.destroy(instance).await.unwrap();
    fs::remove_dir_all(host.path("local")).unwrap();
    fs::write(host.path("local"), "").unwrap();
    provider.list().await.unwrap_err();
}

#[tokio::test]
async fn a_create_that_was_cut_off_leaves_nothing() {
    let host = Host::new(LIVES);
    let instance = host.create(&host.provider()).await;
    let unfinished = host.folder(instance).with_extension("new");
    fs::rename(host.folder(instance), &unfinished).unwrap();
    let provider = host.provider();
    assert!(!unfinished.exists());
    assert_eq!(provider.list().await.unwrap(), []);
    provider.destroy(instance).await.unwrap();
}

#[tokio::test]
async fn an_agent_that_cannot_be_run_is_the_config_s_fault() {
    let host = Host::new(LIVES);
    let provider = host.provider();
    fs::write(host.path("plain"), "").unwrap();
    for (agent, expected) in [
        (None, "pilotlight-agent"),
        (Some(host.path("no-such")), "no-such"),
        (Some(host.path("plain")), "not executable"),
        (Some(host.dir.path().to_owned()), "not a file"),
    ] {
        let placement = LocalPlacement { agent, ..host.placement() };
        let error = provider.create(&bootstrap(), &placement, &tags()).await.unwrap_err();
        let text = error.to_string();
        assert!(
            matches!(error, CreateError::Invalid(_)) && text.contains(expected) && text.contains("`agent`"),
            "{text}"
        );
    }
    assert_eq!(provider.list().await.unwrap(), []);

    fs::write(host.path("local"), "in the way").unwrap();
    let error = provider.create(&bootstrap(), &host.placement(), &tags()).await.unwrap_err();
    assert!(matches!(error, CreateError::MayExist(_)), "{error}");
}

#[tokio::test]
async fn a_long_agent_log_is_set_aside() {
    let host = Host::new("echo from the agent; exit 1");
    let provider = host.provider();
    let instance = host.create(&provider).await;
    let log = host.folder(instance).join("agent.log");
    fs::File::create(&log).unwrap().set_len(10 * 1024 * 1024 + 1).unwrap();
    let scaler = host.scaler();
    finished(&scaler.provider, instance).await;
    assert_eq!(fs::read_to_string(&log).unwrap(), "from the agent\n".repeat(5));
    assert_eq!(fs::metadata(log.with_extension("log.1")).unwrap().len(), 10 * 1024 * 1024 + 1);
    scaler.provider.destroy(instance).await.unwrap();
    scaler.stop().await;
}
