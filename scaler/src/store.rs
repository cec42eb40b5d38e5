//! The store: SQLite, one transaction per pass of the control task (design 8, link 9).
//!
//! One connection writes and one reads; both are used on blocking threads, which hold paused time still in tests.

#[cfg(feature = "failpoints")]
mod cuts;

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use jiff::{SignedDuration, Timestamp};
use pilotlight_runtime::clock;
use pilotlight_wire::{InstanceId, JobId, Work};
use rusqlite::{Connection, OpenFlags, OptionalExtension, Row, params};
use rusqlite_migration::{M, Migrations};

use crate::{
    fleet::{Instance, Job},
    keys::{KeyError, Keys, OpenError},
};

const MIGRATIONS: &[M<'static>] = &[M::up(include_str!("store/migrations/001.sql"))];

/// Why the store failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// SQLite failed.
    #[error("store {}", .path.display())]
    Sqlite {
        /// The database.
        path: PathBuf,
        /// Why.
        #[source]
        source: rusqlite::Error,
    },
    /// The schema cannot be brought up to date, for instance because a newer version wrote it.
    #[error("migrate store {}", .path.display())]
    Migrate {
        /// The database.
        path: PathBuf,
        /// Why.
        #[source]
        source: rusqlite_migration::Error,
    },
    /// A row is not what this version writes.
    #[error("row {id} of the store is not readable")]
    Row {
        /// Which.
        id: String,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// A payload cannot be sealed.
    #[error("seal payload")]
    Seal(#[from] KeyError),
    /// A payload cannot be opened.
    #[error("open payload")]
    Open(#[from] OpenError),
    /// The blocking thread died.
    #[error("the store's thread died")]
    Thread(#[from] tokio::task::JoinError),
}

/// What one pass changed; committed whole or not at all.
#[derive(Debug, Default)]
pub struct Commit {
    /// The time reached: after a restart the core's time never lies below it (link 8).
    pub now: Timestamp,
    /// Instances as they are now; `None` for those forgotten.
    pub instances: Vec<(InstanceId, Option<Instance>)>,
    /// Jobs as they are now.
    pub jobs: Vec<Job>,
    /// What new assignments run.
    pub payloads: Vec<(JobId, Work)>,
}

/// What a scaler starts from.
#[derive(Debug)]
pub struct Loaded {
    /// The time reached by the last scaler.
    pub floor: Timestamp,
    /// How long ago that was by the boot clock; unknown after a reboot.
    pub floor_age: Option<Duration>,
    /// All instances, tombstones included.
    pub instances: Vec<Instance>,
    /// Jobs that are not settled.
    pub jobs: Vec<Job>,
}

/// The store. Clones share it.
#[derive(Clone, Debug)]
pub struct Store(Arc<Inner>);

struct Inner {
    path: PathBuf,
    keys: Arc<Keys>,
    writer: Mutex<Connection>,
    reader: Mutex<Connection>,
    boot: Boot,
}

/// The kernel's id of this boot. A time of the boot clock beside it tells a stepped wall clock from time that passed.
struct Boot(String);

impl Boot {
    fn mark(&self) -> String {
        format!("{} {}", self.0, clock::boottime().as_millis())
    }

    /// How long ago a mark was made; `None` for one of another boot.
    fn age(&self, mark: &str) -> Option<Duration> {
        let (boot, at) = mark.split_once(' ')?;
        let at = Duration::from_millis(at.parse().ok().filter(|_| boot == self.0 && !boot.is_empty())?);
        clock::boottime().checked_sub(at)
    }
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Store {
    /// Opens or makes the database and brings its schema up to date. Blocks.
    ///
    /// # Errors
    /// When the file cannot be used, or a newer version wrote it.
    pub fn open(path: &Path, keys: Arc<Keys>) -> Result<Self, StoreError> {
        let sqlite = |source| StoreError::Sqlite { path: path.to_owned(), source };
        let mut writer = Connection::open(path).map_err(sqlite)?;
        // FULL: intent must be on disk before the provider is called, power cut or not.
        writer
            .execute_batch("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON;")
            .map_err(sqlite)?;
        Migrations::from_slice(MIGRATIONS)
            .to_latest(&mut writer)
            .map_err(|source| StoreError::Migrate { path: path.to_owned(), source })?;
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let reader = Connection::open_with_flags(path, flags).map_err(sqlite)?;
        Ok(Self(Arc::new(Inner {
            path: path.to_owned(),
            keys,
            writer: Mutex::new(writer),
            reader: Mutex::new(reader),
            // Without it, every start is one after a reboot.
            boot: Boot(clock::boot_id().unwrap_or_default()),
        })))
    }

    /// What a scaler starts from. Blocks.
    ///
    /// # Errors
    /// When the database or one of its rows cannot be read.
    pub fn load(&self) -> Result<Loaded, StoreError> {
        let reader = lock(&self.0.reader);
        let meta = |key: &str| -> Result<Option<String>, StoreError> {
            reader
                .query_row("SELECT value FROM meta WHERE key = ?1", [key], |row| row.get(0))
                .optional()
                .map_err(|source| self.sqlite(source))
        };
        let (floor, boot) = (meta("now")?, meta("boot")?);
        Ok(Loaded {
            floor: floor.and_then(|text| text.parse().ok()).unwrap_or(Timestamp::UNIX_EPOCH),
            floor_age: boot.as_deref().and_then(|text| self.0.boot.age(text)),
            instances: self.documents(&reader, "SELECT id, doc FROM instances", [])?,
            jobs: self.documents(&reader, "SELECT id, doc FROM jobs WHERE settled = 0", [])?,
        })
    }

    /// Commits what one pass changed.
    ///
    /// # Errors
    /// When nothing was committed: the caller must not reply or act, and exit (link 9).
    pub async fn commit(&self, commit: Commit) -> Result<(), StoreError> {
        self.blocking(move |store| store.commit_blocking(&commit)).await
    }

    /// What a job runs; `None` when it is over or unknown.
    ///
    /// # Errors
    /// When the row cannot be read or opened.
    pub async fn payload(&self, job: JobId) -> Result<Option<Work>, StoreError> {
        self.blocking(move |store| {
            let sealed: Option<Vec<u8>> = lock(&store.0.reader)
                .query_row("SELECT sealed FROM payloads WHERE job = ?1", [job.to_string()], |row| row.get(0))
                .optional()
                .map_err(|source| store.sqlite(source))?;
            let Some(sealed) = sealed else { return Ok(None) };
            let plain = store.0.keys.open(job.uuid().as_bytes(), &sealed)?;
            serde_json::from_slice(&plain).map(Some).map_err(|source| StoreError::Row { id: job.to_string(), source })
        })
        .await
    }

    /// A job, settled or not.
    ///
    /// # Errors
    /// When the row cannot be read.
    pub async fn job(&self, id: JobId) -> Result<Option<Job>, StoreError> {
        self.blocking(move |store| {
            let reader = lock(&store.0.reader);
            let found = store.documents(&reader, "SELECT id, doc FROM jobs WHERE id = ?1", [id.to_string()])?;
            Ok(found.into_iter().next())
        })
        .await
    }

    /// The newest settled jobs, oldest first.
    ///
    /// # Errors
    /// When a row cannot be read.
    pub async fn settled_jobs(&self, limit: u32) -> Result<Vec<Job>, StoreError> {
        self.blocking(move |store| {
            let reader = lock(&store.0.reader);
            let mut jobs: Vec<Job> = store.documents(
                &reader,
                "SELECT id, doc FROM jobs WHERE settled = 1 ORDER BY queued_at DESC, id DESC LIMIT ?1",
                [limit],
            )?;
            jobs.reverse();
            Ok(jobs)
        })
        .await
    }

    /// Drops settled jobs that were over before a time.
    ///
    /// # Errors
    /// When the database cannot be written.
    pub async fn drop_settled_before(&self, time: Timestamp) -> Result<usize, StoreError> {
        self.blocking(move |store| {
            lock(&store.0.writer)
                .execute("DELETE FROM jobs WHERE settled = 1 AND finished_at < ?1", [time.as_millisecond()])
                .map_err(|source| store.sqlite(source))
        })
        .await
    }

    /// Lets settled jobs be kept for longer: the clock has skipped so much time.
    ///
    /// # Errors
    /// When the database cannot be written.
    pub async fn keep_settled_longer(&self, by: SignedDuration) -> Result<usize, StoreError> {
        let milliseconds = i64::try_from(by.as_millis()).unwrap_or(i64::MAX / 4);
        self.blocking(move |store| {
            lock(&store.0.writer)
                .execute("UPDATE jobs SET finished_at = finished_at + ?1 WHERE settled = 1", [milliseconds])
                .map_err(|source| store.sqlite(source))
        })
        .await
    }

    fn commit_blocking(&self, commit: &Commit) -> Result<(), StoreError> {
        let mut writer = lock(&self.0.writer);
        let sqlite = |source| self.sqlite(source);
        let transaction = writer.transaction().map_err(sqlite)?;
        for (id, instance) in &commit.instances {
            match instance {
                Some(instance) => {
                    let doc = encode(id, instance)?;
                    transaction
                        .prepare_cached("INSERT OR REPLACE INTO instances (id, phase, doc) VALUES (?1, ?2, ?3)")
                        .and_then(|mut insert| insert.execute(params![id.to_string(), instance.phase.word(), doc]))
                        .map_err(sqlite)?;
                }
                None => {
                    transaction.execute("DELETE FROM instances WHERE id = ?1", [id.to_string()]).map_err(sqlite)?;
                }
            }
        }
        for job in &commit.jobs {
            let finished_at = job.ended().map(|ended| ended.at.as_millisecond());
            let doc = encode(&job.id, job)?;
            // An upsert, not a replace: a replaced row would take its payload along.
            transaction
                .prepare_cached(
                    "INSERT INTO jobs (id, settled, queued_at, finished_at, doc) VALUES (?1, ?2, ?3, ?4, ?5)
                     ON CONFLICT (id) DO UPDATE SET settled = ?2, finished_at = ?4, doc = ?5",
                )
                .and_then(|mut insert| {
                    insert.execute(params![
                        job.id.to_string(),
                        job.is_settled(),
                        job.queued_at.as_millisecond(),
                        finished_at,
                        doc
                    ])
                })
                .map_err(sqlite)?;
        }
        for (job, payload) in &commit.payloads {
            let plain =
                serde_json::to_vec(payload).map_err(|source| StoreError::Row { id: job.to_string(), source })?;
            let sealed = self.0.keys.seal(job.uuid().as_bytes(), &plain)?;
            transaction
                .execute(
                    "INSERT OR IGNORE INTO payloads (job, sealed) VALUES (?1, ?2)",
                    params![job.to_string(), sealed],
                )
                .map_err(sqlite)?;
        }
        // After the new ones: a job may be submitted and cancelled in one pass. A runner's credentials are kept until its
        // registration is gone: with them the scaler ends the job of a machine that died.
        for job in commit.jobs.iter().filter(|job| !job.needs_payload()) {
            transaction.execute("DELETE FROM payloads WHERE job = ?1", [job.id.to_string()]).map_err(sqlite)?;
        }
        for (key, value) in [("now", commit.now.to_string()), ("boot", self.0.boot.mark())] {
            transaction
                .prepare_cached("INSERT OR REPLACE INTO meta (key, value) VALUES (?1, ?2)")
                .and_then(|mut insert| insert.execute([key, &value]))
                .map_err(sqlite)?;
        }
        #[cfg(feature = "failpoints")]
        cuts::before(commit);
        transaction.commit().map_err(sqlite)?;
        #[cfg(feature = "failpoints")]
        cuts::after(commit);
        Ok(())
    }

    fn documents<T: serde::de::DeserializeOwned>(
        &self,
        connection: &Connection,
        query: &str,
        parameters: impl rusqlite::Params,
    ) -> Result<Vec<T>, StoreError> {
        let sqlite = |source| self.sqlite(source);
        let text = |row: &Row<'_>| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?));
        let mut statement = connection.prepare_cached(query).map_err(sqlite)?;
        let rows = statement.query_map(parameters, text).map_err(sqlite)?;
        rows.map(|row| {
            let (id, doc) = row.map_err(sqlite)?;
            serde_json::from_str(&doc).map_err(|source| StoreError::Row { id, source })
        })
        .collect()
    }

    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let store = self.clone();
        tokio::task::spawn_blocking(move || work(&store)).await?
    }

    fn sqlite(&self, source: rusqlite::Error) -> StoreError {
        StoreError::Sqlite { path: self.0.path.clone(), source }
    }
}

fn encode(id: &impl ToString, document: &impl serde::Serialize) -> Result<String, StoreError> {
    serde_json::to_string(document).map_err(|source| StoreError::Row { id: id.to_string(), source })
}

fn lock(connection: &Mutex<Connection>) -> MutexGuard<'_, Connection> {
    // A panic in between leaves a rolled-back transaction, not a broken connection.
    connection.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
