//! A machine of the local provider without an agent: a process that holds the instance's lock, as the real agent does,
//! and sleeps. The measurement's own program is given to the scaler as the agent's binary.

use std::{fs, io::Write, path::Path, process, thread, time::Duration};

use anyhow::{Context, bail};

/// How often a machine looks whether its directory is still there: none outlives its measurement.
const LOOK: Duration = Duration::from_secs(5);

/// Acts as the agent's binary when the scaler calls; says whether it did.
///
/// # Errors
/// When the directory cannot be used.
pub fn played(arguments: &[String]) -> anyhow::Result<bool> {
    match arguments {
        [verb, option, dir] if verb == "run" && option == "--dir" => sleep_in(Path::new(dir)).map(|()| true),
        [verb, option, _] if verb == "clean" && option == "--dir" => Ok(true),
        _ => Ok(false),
    }
}

fn sleep_in(dir: &Path) -> anyhow::Result<()> {
    let mut lock = fs::OpenOptions::new().append(true).create(true).open(dir.join("agent.lock"))?;
    lock.try_lock().context("another one has this directory")?;
    let stat = fs::read_to_string("/proc/self/stat")?;
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let Some(started) = fields.split_ascii_whitespace().nth(19) else { bail!("/proc/self/stat: {stat}") };
    lock.set_len(0)?;
    writeln!(lock, "{} {started}", process::id())?;
    while dir.join("bootstrap.json").exists() {
        thread::sleep(LOOK);
    }
    Ok(())
}
