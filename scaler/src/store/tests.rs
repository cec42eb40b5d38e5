//! The store against real files: what was committed is there, what was not is not, and nothing lies open.

use std::{collections::BTreeMap, fs};

use jiff::SignedDuration;
use pilotlight_runtime::Report;
use pilotlight_wire::{ForgeName, Verdict, api::Phases};

use super::*;
use crate::fleet::{
    Cause, LocalPlacement, Phase, Placement, ProviderConfig,
    demand::{Ended, JobState, Log},
};

/// In a job's environment; it must never be seen in a file.
const MARKER: &str = "the-secret-of-the-job";

struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("pilotlight.db")
    }

    fn keys(&self) -> Arc<Keys> {
        Arc::new(Keys::load_or_create(&self.dir.path().join("key"), false).unwrap())
    }

    fn store(&self) -> Store {
        Store::open(&self.path(), self.keys()).unwrap()
    }

    /// A connection of our own, as an admin may have one.
    fn sql(&self, statement: &str) {
        Connection::open(self.path()).unwrap().execute_batch(statement).unwrap();
    }

    /// Whether a text is in the database or in what SQLite keeps beside it.
    fn holds(&self, text: &str) -> bool {
        let files = fs::read_dir(self.dir.path()).unwrap().map(|entry| fs::read(entry.unwrap().path()).unwrap());
        files.into_iter().any(|bytes| bytes.windows(text.len()).any(|window| window == text.as_bytes()))
    }
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_767_225_600 + second).unwrap()
}

fn instance() -> Instance {
    Instance {
        id: InstanceId::from_uuid(uuid::Uuid::now_v7()),
        pool: "here".parse().unwrap(),
        placement: Placement {
            name: "here".parse().unwrap(),
            gpus: 1,
            max_instances: None,
            price_per_hour: Some(1.5),
            provider: ProviderConfig::Local(LocalPlacement { gpu_ids: Vec::new(), agent: None, host_image: true }),
        },
        gpu_ids: vec![pilotlight_wire::GpuId("GPU-1".to_owned())],
        cpu_jobs: 0,
        phase: Phase::Booting,
        created_at: at(0),
        changed_at: at(1),
        boot_deadline: at(1200),
        lifetime_end: at(86_400),
        held_until: None,
        single_use: false,
        assigned_total: 0,
        enrolment: None,
        assignments: BTreeMap::new(),
    }
}

fn job(queued_at: i64) -> Job {
    Job {
        id: JobId::random(),
        forge: ForgeName::direct(),
        label: "cpu".parse().unwrap(),
        pool: "here".parse().unwrap(),
        gpus: 0,
        priority: 0,
        timeout: SignedDuration::from_hours(6),
        name: "train".to_owned(),
        body_hash: "00".repeat(32),
        queued_at: at(queued_at),
        state: JobState::Queued,
        refusal: None,
        phases: Phases::default(),
        instance: None,
        runner: None,
    }
}

fn ended(job: &Job, second: i64, log: Log) -> Job {
    let ended = Ended {
        verdict: Verdict::Success,
        exit_code: Some(0),
        reason: None,
        at: at(second),
        log,
        log_gap: false,
        usage: None,
        cost: None,
    };
    Job { state: JobState::Finished(Box::new(ended)), ..job.clone() }
}

fn payload() -> Work {
    serde_json::from_value(serde_json::json!({"kind": "job", "image": "x", "env": {"TOKEN": MARKER}})).unwrap()
}

fn jobs(jobs: &[&Job]) -> Commit {
    Commit { now: at(0), jobs: jobs.iter().map(|job| (*job).clone()).collect(), ..Commit::default() }
}

#[tokio::test]
async fn what_was_committed_is_loaded_by_the_next_scaler() {
    let place = Place::new();
    let store = place.store();
    let empty = store.load().unwrap();
    assert_eq!((empty.floor, empty.instances, empty.jobs), (Timestamp::UNIX_EPOCH, vec![], vec![]));

    let (kept, forgotten, mut waiting) = (instance(), instance(), job(0));
    let both = [&kept, &forgotten].map(|one| (one.id, Some(one.clone()))).into();
    let payloads = vec![(waiting.id, payload())];
    store.commit(Commit { now: at(5), instances: both, jobs: vec![waiting.clone()], payloads }).await.unwrap();
    let gone = Instance { phase: Phase::Gone { cause: Cause::Idle }, ..kept };
    waiting.phases.planned = Some(at(6));
    let instances = vec![(gone.id, Some(gone.clone())), (forgotten.id, None)];
    let later = Commit { now: at(7), instances, jobs: vec![waiting.clone()], payloads: Vec::new() };
    store.commit(later).await.unwrap();
    drop(store);

    let store = place.store();
    let loaded = store.load().unwrap();
    assert_eq!(loaded.floor, at(7), "time never lies below what was reached");
    assert_eq!(loaded.instances, [gone], "a tombstone stays, what was forgotten goes");
    assert_eq!(loaded.jobs, std::slice::from_ref(&waiting));
    assert_eq!(store.payload(waiting.id).await.unwrap(), Some(payload()), "a job that changes keeps its payload");
}

#[tokio::test]
async fn a_payload_is_sealed_and_gone_once_its_job_is_over() {
    let place = Place::new();
    let store = place.store();
    let (first, second) = (job(0), job(1));
    let both = vec![(first.id, payload()), (second.id, payload())];
    store.commit(Commit { payloads: both, ..jobs(&[&first, &second]) }).await.unwrap();
    assert!(place.holds("train"), "the search finds what is in the open");
    assert!(!place.holds(MARKER));
    store.commit(jobs(&[&ended(&first, 2, Log::Expected { bytes: 3 })])).await.unwrap();
    assert_eq!(store.payload(first.id).await.unwrap(), None, "over, its log still open");
    assert_eq!(store.payload(second.id).await.unwrap(), Some(payload()));
    assert_eq!(store.payload(JobId::random()).await.unwrap(), None);

    // Submitted and cancelled in one pass.
    let brief = job(3);
    let commit = jobs(&[&ended(&brief, 3, Log::Over { incomplete: false })]);
    store.commit(Commit { payloads: vec![(brief.id, payload())], ..commit }).await.unwrap();
    assert_eq!(store.payload(brief.id).await.unwrap(), None);
}

#[tokio::test]
async fn a_payload_opens_in_its_own_row_only() {
    let place = Place::new();
    let store = place.store();
    let (first, second) = (job(0), job(1));
    let payloads = vec![(first.id, payload())];
    store.commit(Commit { payloads, ..jobs(&[&first, &second]) }).await.unwrap();
    place.sql(&format!("UPDATE payloads SET job = '{}'", second.id));
    assert!(matches!(store.payload(second.id).await, Err(StoreError::Open(_))));
}

#[tokio::test]
async fn settled_jobs_are_listed_by_age_and_dropped_by_their_end() {
    let place = Place::new();
    let store = place.store();
    let settled: Vec<Job> = (0..5).map(|n| ended(&job(n), 100 - n, Log::Closed)).collect();
    let (open, waiting) = (ended(&job(0), 1, Log::Expected { bytes: 1 }), job(0));
    store.commit(jobs(&settled.iter().chain([&open, &waiting]).collect::<Vec<_>>())).await.unwrap();
    assert_eq!(store.settled_jobs(2).await.unwrap(), settled[3..], "the newest, oldest first");
    assert_eq!(store.load().unwrap().jobs.len(), 2, "a scaler starts without those");
    assert_eq!(store.job(settled[0].id).await.unwrap().as_ref(), Some(&settled[0]), "each is there by its id");

    assert_eq!(store.drop_settled_before(at(98)).await.unwrap(), 2, "before, not at");
    assert_eq!(store.keep_settled_longer(jiff::SignedDuration::from_secs(50)).await.unwrap(), 3);
    assert_eq!(store.drop_settled_before(at(140)).await.unwrap(), 0, "the clock has skipped so much");
    assert_eq!(store.settled_jobs(9).await.unwrap(), settled[..3]);
    assert_eq!(store.drop_settled_before(at(1000)).await.unwrap(), 3);
    assert_eq!(store.load().unwrap().jobs.len(), 2, "what is not settled stays, however old");
}

#[tokio::test]
async fn a_commit_that_fails_in_its_last_statement_leaves_everything_as_it_was() {
    let place = Place::new();
    let store = place.store();
    let (machine, waiting) = (instance(), job(0));
    let instances = vec![(machine.id, Some(machine.clone()))];
    let payloads = vec![(waiting.id, payload())];
    store.commit(Commit { now: at(1), instances, jobs: vec![waiting.clone()], payloads }).await.unwrap();

    place.sql("CREATE TRIGGER full BEFORE INSERT ON meta BEGIN SELECT RAISE(ABORT, 'the disk is full'); END");
    let (late, over) = (job(2), ended(&waiting, 2, Log::Closed));
    let commit = Commit {
        now: at(2),
        instances: vec![(machine.id, None)],
        jobs: vec![over.clone(), late.clone()],
        payloads: vec![(late.id, payload())],
    };
    let error = store.commit(commit).await.unwrap_err();
    assert!(Report(&error).to_string().contains("the disk is full"), "{}", Report(&error));
    let loaded = store.load().unwrap();
    assert_eq!((loaded.floor, loaded.instances, loaded.jobs), (at(1), vec![machine], vec![waiting.clone()]));
    assert_eq!(store.payload(waiting.id).await.unwrap(), Some(payload()));
    assert_eq!(store.payload(late.id).await.unwrap(), None);

    place.sql("DROP TRIGGER full");
    store.commit(jobs(&[&over])).await.unwrap();
    assert_eq!(store.job(over.id).await.unwrap(), Some(over), "the connection is none the worse");
}

#[test]
fn what_a_newer_version_wrote_is_refused_and_left_alone() {
    let place = Place::new();
    drop(place.store());
    place.sql("PRAGMA user_version = 99");
    let error = Store::open(&place.path(), place.keys()).unwrap_err();
    let text = Report(&error).to_string();
    assert!(matches!(error, StoreError::Migrate { .. }), "{text}");
    assert!(text.contains(&place.path().display().to_string()), "{text}");
    let version: i64 =
        Connection::open(place.path()).unwrap().query_row("PRAGMA user_version", [], |row| row.get(0)).unwrap();
    assert_eq!(version, 99);
}

#[tokio::test]
async fn a_row_that_cannot_be_read_is_named() {
    let place = Place::new();
    let store = place.store();
    let waiting = job(0);
    store.commit(jobs(&[&waiting])).await.unwrap();
    place.sql("UPDATE jobs SET doc = '{}'");
    let error = store.load().unwrap_err();
    assert!(matches!(&error, StoreError::Row { id, .. } if *id == waiting.id.to_string()), "{error}");
}
