//! Limits of the process.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the number of files that may be open as far as the hard limit allows. Each agent holds a connection, and
/// systemd and login shells give 1024, for programs that use select(2).
///
/// # Errors
/// When the kernel refuses; the limit is then as it was.
pub fn raise_open_files() -> io::Result<()> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    Ok(setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_files_may_be_open_as_the_hard_limit_says() {
        let before = getrlimit(Resource::Nofile);
        let low = Rlimit { current: before.maximum.map(|maximum| maximum - 1), maximum: before.maximum };
        setrlimit(Resource::Nofile, low).unwrap();
        assert_ne!(getrlimit(Resource::Nofile).current, before.maximum);
        raise_open_files().unwrap();
        assert_eq!(getrlimit(Resource::Nofile).current, before.maximum);
    }
}
