//! Places where a test kills the process, to see what the next one makes of it.
//!
//! A failpoint is named where it lies: `failpoint!("scaler.submit.unanswered");`. Without the feature `failpoints` the
//! line is nothing at all. With it, the process whose environment names that failpoint kills itself there with
//! SIGKILL, the first time that any process of the test comes by:
//!
//! ```text
//! PILOTLIGHT_FAILPOINT=DIR/scaler.submit.unanswered    the file's name is the failpoint's
//! ```
//!
//! The file is made by the process that dies, so that the one started in its place goes on; it holds a line for each
//! time that the place was reached. A test that ends without the file has not tested what it was for.

#[cfg(all(feature = "failpoints", not(debug_assertions)))]
compile_error!("failpoints kill the process they are in: they must not be in a release build");

/// The environment variables that have to be handed on to every process of ours. None without the feature.
pub const VARIABLES: &[&str] = if cfg!(feature = "failpoints") { &["PILOTLIGHT_FAILPOINT"] } else { &[] };

/// Names a place where a test may kill the process; with a condition, only where that holds. See
/// [`crate::failpoint`](mod@crate::failpoint).
#[cfg(feature = "failpoints")]
#[macro_export]
macro_rules! failpoint {
    ($name:literal) => {
        $crate::failpoint::reach($name)
    };
    ($name:literal, $condition:expr) => {
        if $condition {
            $crate::failpoint::reach($name)
        }
    };
}

/// Names a place where a test may kill the process; nothing without the feature `failpoints`. See
/// [`crate::failpoint`](mod@crate::failpoint).
#[cfg(not(feature = "failpoints"))]
#[macro_export]
macro_rules! failpoint {
    ($name:literal) => {};
    ($name:literal, $condition:expr) => {};
}

/// Dies here if this is the place and the first time; what `failpoint!` stands for.
#[cfg(feature = "failpoints")]
pub fn reach(name: &str) {
    use std::{fs::File, io::Write, path::PathBuf};

    let Some(file) = VARIABLES.first().and_then(std::env::var_os).map(PathBuf::from) else { return };
    if file.file_name().is_none_or(|armed| armed != name) {
        return;
    }
    let first = File::options().append(true).create_new(true).open(&file);
    let dies = first.is_ok();
    if let Ok(mut file) = first.or_else(|_there| File::options().append(true).open(&file)) {
        // Whoever reads it wants to know who died; that it is there at all is what counts.
        let _unwritable = writeln!(file, "{}", std::process::id());
    }
    if dies {
        // SIGKILL cannot be caught: nothing is flushed, unlocked or told.
        let _dead = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}
