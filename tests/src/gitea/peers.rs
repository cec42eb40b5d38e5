//! The programs that `tests/peers/build.sh` makes.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};

/// Gitea and its official runner, built.
#[derive(Clone, Debug)]
pub struct Peers {
    dir: PathBuf,
}

impl Peers {
    /// Builds them if they are not there yet: minutes the first time on a machine, milliseconds from then on.
    ///
    /// # Errors
    /// When they cannot be built: these tests need them and do not skip.
    pub fn get() -> Result<Self> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/build.sh");
        let output = Command::new(&script).stdin(Stdio::null()).stderr(Stdio::inherit()).output();
        let output = output.with_context(|| script.display().to_string())?;
        ensure!(output.status.success(), "{}: {}", script.display(), output.status);
        let dir = String::from_utf8(output.stdout)?;
        Ok(Self { dir: PathBuf::from(dir.trim_end()) })
    }

    /// Where they are. What takes long to make from them is kept there too.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The server.
    #[must_use]
    pub fn gitea(&self) -> PathBuf {
        self.dir.join("gitea")
    }

    /// The official runner.
    #[must_use]
    pub fn runner(&self) -> PathBuf {
        self.dir.join("gitea-runner")
    }

    /// Gitea's templates, options and public files.
    #[must_use]
    pub fn static_root(&self) -> PathBuf {
        self.dir.join("static")
    }
}
