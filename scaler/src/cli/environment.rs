//! A job's environment from `--env` and `--env-file`.

use std::{collections::BTreeMap, ffi::OsString, fs, path::PathBuf};

use super::exit::{BAD_INPUT, Failure};

/// Reads files first, then `--env`, which wins. `variable` reads our own environment.
///
/// A file has a line `K=V` for each variable: the value is every byte after the first `=`, quotes, blanks and a
/// trailing carriage return included. A line `K` takes our own value. Blank lines and lines that begin with `#` are
/// skipped.
pub(crate) fn collect(
    files: &[PathBuf],
    pairs: &[OsString],
    variable: impl Fn(&str) -> Option<OsString>,
) -> Result<BTreeMap<String, String>, Failure> {
    let mut collected = BTreeMap::new();
    for file in files {
        let bytes = fs::read(file)
            .map_err(|error| Failure::new(BAD_INPUT, format!("cannot read --env-file {}: {error}", file.display())))?;
        for (n, line) in bytes.split(|byte| *byte == b'\n').enumerate() {
            let place = format!("{}:{}", file.display(), n + 1);
            let line = std::str::from_utf8(line)
                .map_err(|_| Failure::new(BAD_INPUT, format!("{place}: is not UTF-8; a job's environment is text")))?;
            let line = line.trim_start();
            if !line.is_empty() && !line.starts_with('#') {
                let (key, value) = pair(line, &place, &variable)?;
                collected.insert(key, value);
            }
        }
    }
    for given in pairs {
        let Some(text) = given.to_str() else {
            let message = format!("--env {given:?}: is not UTF-8; a job's environment is text");
            return Err(Failure::new(BAD_INPUT, message));
        };
        let (key, value) = pair(text, "--env", &variable)?;
        collected.insert(key, value);
    }
    Ok(collected)
}

fn pair(text: &str, place: &str, variable: &impl Fn(&str) -> Option<OsString>) -> Result<(String, String), Failure> {
    let bad = |why: &str| Failure::new(BAD_INPUT, format!("{place}: {why}"));
    let (key, value) = match text.split_once('=') {
        Some((key, value)) => (key, value.to_owned()),
        None => {
            let key = text.trim_end();
            let value = variable(key).ok_or_else(|| bad(&format!("{key:?} is not set here; write {key}=VALUE")))?;
            (key, value.into_string().map_err(|_| bad(&format!("the value of {key:?} here is not UTF-8")))?)
        }
    };
    if key.is_empty() || key.chars().any(|c| c.is_whitespace() || c.is_control()) {
        return Err(bad(&format!("{key:?} is not the name of a variable; write K=V")));
    }
    // The value may be a secret, so it is not shown.
    if value.contains('\0') {
        return Err(bad(&format!("the value of {key:?} holds a NUL byte, which no environment can")));
    }
    Ok((key.to_owned(), value))
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    fn from_file(bytes: &[u8]) -> Result<BTreeMap<String, String>, Failure> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("job.env");
        fs::write(&path, bytes).unwrap();
        collect(&[path], &[], |key| (key == "HERE").then(|| "our value".into()))
    }

    #[test]
    fn values_are_byte_exact_after_the_first_equals_sign() {
        let got =
            from_file(b"# comment\n\n  # another\nA=1=2\nB=\"quoted\" 'x' \nC=\nHERE\nD=\xc3\xa4 # no comment\r\nE=x")
                .unwrap();
        let expected = [
            ("A", "1=2"),
            ("B", "\"quoted\" 'x' "),
            ("C", ""),
            ("D", "ä # no comment\r"),
            ("E", "x"),
            ("HERE", "our value"),
        ];
        assert_eq!(got, expected.map(|(key, value)| (key.to_owned(), value.to_owned())).into());
    }

    #[test]
    fn a_bad_line_is_named_and_its_value_is_not_shown() {
        for (bytes, named) in [
            (b"A=1\nSECRET=\xff\xfe\n".as_slice(), "job.env:2: is not UTF-8"),
            (b"A=1\n\n=secret", "job.env:3: \"\" is not the name"),
            (b"A B=secret", "job.env:1: \"A B\" is not the name"),
            (b"A=sec\0ret", "job.env:1: the value of \"A\" holds a NUL byte"),
            (b"MISSING", "\"MISSING\" is not set here"),
        ] {
            let failure = from_file(bytes).unwrap_err();
            assert_eq!(failure.code, BAD_INPUT);
            assert!(failure.message.contains(named) && !failure.message.contains("secret"), "{}", failure.message);
        }
        assert_eq!(collect(&["/nonexistent".into()], &[], |_| None).unwrap_err().code, BAD_INPUT);
    }

    #[test]
    fn the_command_line_wins_over_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("job.env");
        fs::write(&path, "A=file\nB=file").unwrap();
        let got = collect(&[path], &["A=line\nwith newline".into(), "H".into()], |_| Some("here".into())).unwrap();
        assert_eq!(got["A"], "line\nwith newline");
        assert_eq!(got["B"], "file");
        assert_eq!(got["H"], "here");
        let not_text = OsString::from_vec(b"A=\xff".to_vec());
        assert_eq!(collect(&[], &[not_text], |_| None).unwrap_err().code, BAD_INPUT);
    }
}
