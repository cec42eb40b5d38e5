//! Files that the config names: secrets must be readable by us and by nobody else.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

/// What a secret's file must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// 32 random bytes (link 1).
    Key,
    /// One line of text.
    Token,
}

/// Why a secret's file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FileError {
    #[error("{path:?} cannot be read: {source}")]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{path:?} has mode {mode:04o}, so others may read it: chmod 600 it")]
    Open { path: PathBuf, mode: u32 },
    #[error("{path:?} has {found} bytes, and a key has 32: make one with `head -c 32 /dev/urandom`")]
    KeyLength { path: PathBuf, found: usize },
    #[error("{path:?} holds no token: write one line of text")]
    NoToken { path: PathBuf },
}

/// Checks a secret's file. Files beneath `credentials` (systemd's `$CREDENTIALS_DIRECTORY`) show a group bit that is
/// the mask of their access list, and the directory keeps others out; their mode is not judged.
pub(crate) fn check(path: &Path, content: Content, credentials: Option<&Path>) -> Result<(), FileError> {
    let unreadable = |source| FileError::Unreadable { path: path.to_owned(), source };
    let bytes = fs::read(path).map_err(unreadable)?;
    let mode = fs::metadata(path).map_err(unreadable)?.permissions().mode() & 0o7777;
    if mode & 0o177 != 0 && !credentials.is_some_and(|dir| path.starts_with(dir)) {
        return Err(FileError::Open { path: path.to_owned(), mode });
    }
    match content {
        Content::Key if bytes.len() != 32 => Err(FileError::KeyLength { path: path.to_owned(), found: bytes.len() }),
        Content::Token if bytes.trim_ascii().is_empty() || bytes.trim_ascii().contains(&b'\n') => {
            Err(FileError::NoToken { path: path.to_owned() })
        }
        Content::Key | Content::Token => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_private_and_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        assert!(matches!(check(&path, Content::Key, None), Err(FileError::Unreadable { .. })));
        fs::write(&path, [7; 32]).unwrap();
        for (mode, good) in [(0o600, true), (0o400, true), (0o640, false), (0o604, false), (0o700, false)] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(check(&path, Content::Key, None).is_ok(), good, "{mode:o}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o440)).unwrap();
        assert!(check(&path, Content::Key, Some(dir.path())).is_ok(), "a systemd credential");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&path, [7; 31]).unwrap();
        assert!(matches!(check(&path, Content::Key, None), Err(FileError::KeyLength { found: 31, .. })));
        for (text, good) in [("secret\n", true), ("", false), (" \n", false), ("two\nlines", false)] {
            fs::write(&path, text).unwrap();
            assert_eq!(check(&path, Content::Token, None).is_ok(), good, "{text:?}");
        }
    }
}
