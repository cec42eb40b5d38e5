//! A scaler's database as it lies on disk, looked at from the outside.

use std::path::Path;

use anyhow::{Result, ensure};
use rusqlite::Connection;

/// Checks a database whose machines are all gone: whole, every reference met, no machine forgotten, nothing kept of
/// what finished jobs ran.
///
/// # Errors
/// When it is not so.
pub fn check(database: &Path) -> Result<()> {
    let store = Connection::open(database)?;
    let text = |query: &str| store.query_row(query, [], |row| row.get::<_, String>(0));
    let integrity = text("PRAGMA integrity_check")?;
    ensure!(integrity == "ok", "the database is damaged: {integrity}");
    for (what, query) in [
        ("rows refer to nothing", "SELECT count(*) FROM pragma_foreign_key_check"),
        ("instances are not gone", "SELECT count(*) FROM instances WHERE phase <> 'gone'"),
        (
            "payloads of finished jobs are kept",
            "SELECT count(*) FROM payloads JOIN jobs ON job = id WHERE finished_at IS NOT NULL",
        ),
    ] {
        let found = count(&store, query)?;
        ensure!(found == 0, "{found} {what}");
    }
    Ok(())
}

/// How many jobs are not settled: not over, or their log not closed.
///
/// # Errors
/// When the database cannot be read.
pub fn unsettled(database: &Path) -> Result<i64> {
    count(&Connection::open(database)?, "SELECT count(*) FROM jobs WHERE settled = 0")
}

fn count(store: &Connection, query: &str) -> Result<i64> {
    Ok(store.query_row(query, [], |row| row.get(0))?)
}
