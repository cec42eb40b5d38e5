//! Where the scaler is and how to prove who we are.

use std::{
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
};

use clap::Args;
use pilotlight_wire::Secret;
use reqwest::Url;

use super::exit::{CONFIG, Failure, NO_PERMISSION, USAGE};
use crate::config::{self, DEFAULT_LISTEN, DEFAULT_STATE_DIR, Hints};

/// The token that the scaler makes at its first start, in its state directory.
pub(crate) const ADMIN_TOKEN: &str = "admin.token";
const TOKEN_VARIABLE: &str = "PILOTLIGHT_TOKEN";

/// How clients find the scaler.
#[derive(Args, Clone, Debug, Default)]
pub struct AccessArgs {
    /// URL of the scaler [default: where the config listens, or http://127.0.0.1:8470]
    #[arg(long, env = "PILOTLIGHT_URL", value_name = "URL")]
    pub url: Option<String>,
    /// File with the token [default: $PILOTLIGHT_TOKEN, or admin.token in the state directory]
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// State directory of a scaler on this box [default: the config's, or /var/lib/pilotlight]
    #[arg(long, env = "PILOTLIGHT_STATE_DIR", value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Config of a scaler on this box
    #[arg(long, env = "PILOTLIGHT_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// A resolved [`AccessArgs`].
#[derive(Debug)]
pub(crate) struct Access {
    /// Ends without a slash.
    pub(crate) url: String,
    /// Whether it is this very box.
    pub(crate) loopback: bool,
    pub(crate) token: Option<Secret>,
    /// Where the token comes from, or why there is none; for people.
    pub(crate) token_from: String,
}

impl AccessArgs {
    /// Finds URL and token. `variable` reads the environment.
    pub(crate) fn resolve(&self, variable: impl Fn(&str) -> Option<OsString>) -> Result<Access, Failure> {
        let told = self.token_file.is_some() || variable(TOKEN_VARIABLE).is_some_and(|text| !text.is_empty());
        let hints = match &self.config {
            // A client that was told everything may well be one that must not read the config.
            Some(_) if told && self.url.is_some() => Hints::default(),
            Some(path) => config::hints(path).map_err(|error| Failure::new(CONFIG, error.to_string()))?,
            None => Hints::default(),
        };
        let (url, loopback) = self.url(&hints)?;
        let (token, token_from) = self.token(&hints, loopback, variable)?;
        Ok(Access { url, loopback, token, token_from })
    }

    fn url(&self, hints: &Hints) -> Result<(String, bool), Failure> {
        let text = match (&self.url, hints.listen) {
            (Some(url), _) => url.clone(),
            (None, Some(listen)) => format!("http://{listen}"),
            (None, None) => format!("http://{DEFAULT_LISTEN}"),
        };
        let bad = |why: &str| Failure::new(USAGE, format!("{text:?} is not the URL of a scaler: {why}"));
        let url = Url::parse(&text).map_err(|error| bad(&error.to_string()))?;
        if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
            return Err(bad("write one such as http://127.0.0.1:8470"));
        }
        if !url.username().is_empty() || url.password().is_some() || url.query().is_some() || url.fragment().is_some() {
            return Err(bad("it takes no user, query or fragment; the token goes into a file"));
        }
        let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']);
        let loopback = host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback());
        Ok((url.as_str().trim_end_matches('/').to_owned(), loopback))
    }

    fn token(
        &self,
        hints: &Hints,
        loopback: bool,
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<(Option<Secret>, String), Failure> {
        if let Some(path) = &self.token_file {
            let text = read(path)?.ok_or_else(|| missing(path))?;
            return Ok((Some(text), path.display().to_string()));
        }
        if let Some(text) = variable(TOKEN_VARIABLE).filter(|text| !text.is_empty()) {
            let text = text.into_string().map_err(|_| Failure::new(NO_PERMISSION, "$PILOTLIGHT_TOKEN is not text"))?;
            return Ok((Some(token(&text, "$PILOTLIGHT_TOKEN")?), format!("${TOKEN_VARIABLE}")));
        }
        if !loopback {
            // The token of a scaler on this box is nobody else's business.
            return Ok((None, "none: give one with --token-file or $PILOTLIGHT_TOKEN".to_owned()));
        }
        let in_state_dir = |dir: &Path| dir.join(ADMIN_TOKEN);
        let path = match (&self.state_dir, &hints.admin_token_file, &hints.state_dir) {
            (_, Some(file), _) => file.clone(),
            (Some(dir), None, _) | (None, None, Some(dir)) => in_state_dir(dir),
            (None, None, None) => in_state_dir(Path::new(DEFAULT_STATE_DIR)),
        };
        match read(&path)? {
            Some(text) => Ok((Some(text), path.display().to_string())),
            None => Ok((None, format!("none: {} is not there; name another with --token-file", path.display()))),
        }
    }
}

fn missing(path: &Path) -> Failure {
    Failure::new(NO_PERMISSION, format!("cannot read the token file {}: it is not there", path.display()))
}

/// Reads a token; `None` when the file is not there.
fn read(path: &Path) -> Result<Option<Secret>, Failure> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(token(&text, &path.display().to_string())?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => {
            let message =
                format!("cannot read the token file {}: {error}; run as its owner or use --token-file", path.display());
            Err(Failure::new(NO_PERMISSION, message))
        }
    }
}

fn token(text: &str, from: &str) -> Result<Secret, Failure> {
    let text = text.trim();
    if text.is_empty() || !text.chars().all(|c| c.is_ascii_graphic()) {
        return Err(Failure::new(NO_PERMISSION, format!("{from} holds no token: it must be one line of ASCII")));
    }
    Ok(Secret::new(text))
}

#[cfg(test)]
mod tests {

    use super::*;

    fn found(args: &AccessArgs, variable: Option<&str>) -> (Option<String>, String) {
        let access = args.resolve(|_| variable.map(OsString::from)).unwrap();
        (access.token.map(|token| token.expose().to_owned()), access.token_from)
    }

    #[test]
    fn the_token_is_looked_for_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            fs::write(dir.path().join(name), text).unwrap();
            dir.path().join(name)
        };
        fs::create_dir(dir.path().join("state")).unwrap();
        let flag = write("flag", "from-flag\n");
        write("state/admin.token", "from-state\n");
        let listed = write("listed", "from-config\n");
        let config = write("c.toml", &format!("state_dir = {:?}\nlisten = \"127.0.0.1:9\"", dir.path().join("state")));
        let config_with_file = write("d.toml", &format!("admin_token_file = {listed:?}"));

        let mut args = AccessArgs { token_file: Some(flag), config: Some(config_with_file), ..AccessArgs::default() };
        assert_eq!(found(&args, Some("from-variable")).0.unwrap(), "from-flag");
        args.token_file = None;
        assert_eq!(found(&args, Some("from-variable")), (Some("from-variable".into()), "$PILOTLIGHT_TOKEN".into()));
        assert_eq!(found(&args, None).0.unwrap(), "from-config");
        args.config = Some(config);
        assert_eq!(found(&args, Some("")).0.unwrap(), "from-state");
        assert_eq!(args.resolve(|_| None).unwrap().url, "http://127.0.0.1:9", "the config says where it listens");
        args.state_dir = Some(dir.path().to_owned());
        let (token, from) = found(&args, None);
        assert!(token.is_none() && from.contains("admin.token is not there"), "{from}");
    }

    #[test]
    fn a_remote_scaler_does_not_get_this_boxs_token() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(ADMIN_TOKEN), "secret").unwrap();
        let mut args = AccessArgs { state_dir: Some(dir.path().to_owned()), ..AccessArgs::default() };
        for (url, sent) in [
            ("http://127.0.0.1:1", true),
            ("http://[::1]:1/", true),
            ("http://localhost:1", true),
            ("http://10.0.0.1:1", false),
            ("https://127.0.0.1.example.com", false),
        ] {
            args.url = Some(url.to_owned());
            assert_eq!(found(&args, None).0.is_some(), sent, "{url}");
        }
    }

    #[test]
    fn what_is_no_url_or_token_is_said_so() {
        let args = |url: &str| AccessArgs { url: Some(url.to_owned()), ..AccessArgs::default() };
        for bad in ["127.0.0.1:8470", "unix:///x", "http://u:p@h", "http://h?x=1"] {
            assert_eq!(args(bad).resolve(|_| Some("t".into())).unwrap_err().code, USAGE, "{bad}");
        }
        let missing = AccessArgs { token_file: Some("/nonexistent/t".into()), ..AccessArgs::default() };
        assert_eq!(missing.resolve(|_| None).unwrap_err().code, NO_PERMISSION);
        let unreadable = AccessArgs { config: Some("/nonexistent/c.toml".into()), ..AccessArgs::default() };
        assert_eq!(unreadable.resolve(|_| Some("t".into())).unwrap_err().code, CONFIG);
        let told = AccessArgs { url: Some("http://h".into()), ..unreadable };
        assert!(told.resolve(|_| Some("t".into())).is_ok(), "nothing is wanted of the config");
        let two_lines = args("http://h").resolve(|_| Some("a\nb".into())).unwrap_err();
        assert_eq!(two_lines.code, NO_PERMISSION);
    }
}
