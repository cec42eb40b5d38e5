-- Documents are the serde forms of fleet::Instance and fleet::Job; the columns beside them are what queries need.
CREATE TABLE instances (
    id    TEXT PRIMARY KEY NOT NULL,
    phase TEXT NOT NULL,
    doc   TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE jobs (
    id          TEXT PRIMARY KEY NOT NULL,
    -- 1 once nothing can change any more: over, and the log closed.
    settled     INTEGER NOT NULL,
    -- Milliseconds since the epoch.
    queued_at   INTEGER NOT NULL,
    finished_at INTEGER,
    doc         TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX jobs_by_time ON jobs (settled, queued_at);

-- What a job runs, sealed (AES-256-GCM, the job's id as associated data); gone once the job is over.
CREATE TABLE payloads (
    job    TEXT PRIMARY KEY NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    sealed BLOB NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE meta (
    key   TEXT PRIMARY KEY NOT NULL,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;
