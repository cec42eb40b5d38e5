//! An agent's directory, a scaler and containers; agents live in it one after the other.

use std::{
    cell::OnceCell,
    collections::BTreeSet,
    io::Write,
    path::Path,
    sync::{Arc, Mutex},
};

use jiff::Timestamp;
use pilotlight_wire::{
    InstanceId, JobId, Secret, Verdict,
    agent::{AssignmentEventKind, Health, Inventory, JobRef},
};
use tempfile::TempDir;
use tokio::time::timeout;
use uuid::Uuid;

use super::{
    super::*,
    fake::{Fake, policy},
};
use crate::job::Progress;

pub(super) fn id(n: u128) -> AssignmentId {
    AssignmentId::from_uuid(Uuid::from_u128(n))
}

pub(super) fn start(n: u128) -> Start {
    Start {
        assignment: id(n),
        job: JobRef {
            id: JobId::from_uuid(Uuid::from_u128(n)),
            forge: "direct".parse().unwrap(),
            label: "cpu-small".parse().unwrap(),
            name: "test".to_owned(),
        },
        work: serde_json::from_str(r#"{"kind":"job","image":"busybox"}"#).unwrap(),
        gpus: vec![],
        volumes: vec![],
        remaining_seconds: 36_000,
        max_log_bytes: 1 << 30,
        stop_grace_seconds: 10,
    }
}

/// Boot time that follows the test's paused clock.
pub(super) fn boottime() -> Duration {
    thread_local! {
        static BOOT: OnceCell<Instant> = const { OnceCell::new() };
    }
    Duration::from_secs(500) + BOOT.with(|boot| boot.get_or_init(Instant::now).elapsed())
}

/// Docker, as far as jobs go: containers live on while agents come and go.
#[derive(Clone, Default)]
pub(super) struct Docker(Arc<Mutex<BTreeMap<AssignmentId, Container>>>);

pub(super) struct Container {
    created: usize,
    wishes: Vec<Wish>,
    exit: watch::Sender<bool>,
}

impl Docker {
    /// What `job::direct::run` promises: idempotent by assignment, progress told again, ends by exit or wish.
    pub(super) async fn run(self, dir: PathBuf, job: Job, mut channels: Channels) -> End {
        assert_eq!(job.cpu_jobs, policy().cpu_jobs);
        let id = job.start.assignment;
        let mut exit = {
            let mut containers = self.0.lock().unwrap();
            let container = containers.entry(id).or_insert_with(|| {
                append(&dir, id, b"begin\n");
                Container { created: 1, wishes: vec![], exit: watch::Sender::new(false) }
            });
            container.exit.subscribe()
        };
        let wall = Timestamp::UNIX_EPOCH;
        let started = Progress::Started { image_ready_at: wall, started_at: wall, image_id: None };
        channels.progress.send(started).await.unwrap();
        let verdict = tokio::select! {
            biased;
            _ = exit.wait_for(|exited| *exited) => Verdict::Success,
            wish = channels.wish.wait_for(|wish| *wish != Wish::Run) => {
                let wish = *wish.unwrap();
                self.0.lock().unwrap().get_mut(&id).unwrap().wishes.push(wish);
                match wish {
                    Wish::Timeout => Verdict::Timeout,
                    _ => Verdict::Cancelled,
                }
            }
        };
        End::Finished { verdict, exit_code: None, reason: None, log_gap: false, usage: None, finished_at: wall }
    }

    pub(super) fn exit(&self, n: u128) {
        self.0.lock().unwrap()[&id(n)].exit.send_replace(true);
    }

    pub(super) fn wishes(&self, n: u128) -> Vec<Wish> {
        self.0.lock().unwrap().get(&id(n)).map_or_else(Vec::new, |container| container.wishes.clone())
    }

    pub(super) fn created(&self) -> usize {
        self.0.lock().unwrap().values().map(|container| container.created).sum()
    }
}

pub(super) fn append(dir: &Path, id: AssignmentId, bytes: &[u8]) {
    let spool = AssignmentDir::new(dir, id).spool();
    std::fs::OpenOptions::new().create(true).append(true).open(spool).unwrap().write_all(bytes).unwrap();
}

pub(super) struct World {
    pub(super) dir: TempDir,
    pub(super) fake: Fake,
    pub(super) docker: Docker,
    pub(super) stop: CancellationToken,
}

impl World {
    pub(super) async fn new() -> Self {
        let (dir, fake) = (tempfile::tempdir().unwrap(), Fake::start().await);
        Self { dir, fake, docker: Docker::default(), stop: CancellationToken::new() }
    }

    /// One life of an agent, from what is on disk.
    pub(super) async fn agent(&self) -> Exit {
        let dir = bootstrap::AgentDir::take(self.dir.path()).unwrap();
        let path = dir.path().to_owned();
        let setup = Setup {
            client: Client::new(&self.fake.url).unwrap(),
            enrol: EnrolRequest {
                instance: InstanceId::from_uuid(Uuid::from_u128(99)),
                secret: Secret::new("secret"),
                nonce: dir.nonce().unwrap(),
                agent_version: String::new(),
                agent_started_at: Timestamp::UNIX_EPOCH,
                inventory: Inventory::default(),
                health: Health::default(),
                bearer: dir.bearer().unwrap(),
            },
            machine: crate::machine::Setup {
                run: dir.next_run().unwrap(),
                boot_id: "boot".to_owned(),
                gpus: BTreeSet::new(),
                policy: dir.policy().unwrap(),
                found: assignment::load(&path).unwrap(),
                disk_free: u64::MAX,
            },
            clock: Clock::anchored(Timestamp::UNIX_EPOCH),
            boottime,
            dir: path.clone(),
        };
        let docker = self.docker.clone();
        run(setup, move |job, channels| docker.clone().run(path.clone(), job, channels), self.stop.clone())
            .await
            .unwrap()
    }

    /// Runs an agent beside a script; the agent must outlive it, and is killed then (nothing is said to it).
    pub(super) async fn beside<T>(&self, script: impl Future<Output = T>) -> T {
        let result = tokio::select! {
            biased;
            result = script => result,
            exit = self.agent() => panic!("the agent ended: {exit:?}"),
        };
        // Paused time stands still while file work of the killed agent is under way; a real one dies with it.
        tokio::time::sleep(Duration::from_millis(1)).await;
        result
    }

    /// Runs an agent to its own end, beside a script.
    pub(super) async fn to_its_end(&self, script: impl Future<Output = ()>) -> Exit {
        tokio::join!(self.agent(), script).0
    }

    pub(super) async fn started(&self, n: u128) {
        self.fake.wait("started", |scaler| scaler.events.contains_key(&id(n))).await;
    }

    pub(super) async fn delivered(&self, n: u128, log: &[u8]) {
        self.fake.wait("finished", |scaler| scaler.finished(id(n))).await;
        self.fake.wait("forgotten", |scaler| !scaler.lists(id(n))).await;
        self.fake.with(|scaler| {
            assert_eq!(scaler.logs.get(&id(n)).map_or(&[][..], |log| log), log);
            let Some(AssignmentEventKind::Finished(last)) = scaler.events[&id(n)].last().map(|e| e.event.clone())
            else {
                panic!("{:?}", scaler.events)
            };
            assert_eq!(last.log_bytes, log.len() as u64);
        });
        let deleted = async {
            while AssignmentDir::new(self.dir.path(), id(n)).path().exists() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(Duration::from_secs(60), deleted).await.expect("deleted");
    }
}
