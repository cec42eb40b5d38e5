//! Forges: where they are, what of them is served, and with which secrets.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use jiff::SignedDuration;
use pilotlight_wire::{ForgeName, LabelName};
use toml::Spanned;

use super::{
    Surroundings,
    document::{Document, Section, did_you_mean},
    duration,
    files::{self, Content},
    tables,
};
use crate::fleet::Forge;

/// The kinds of forge that are built.
const KINDS: [&str; 1] = ["gitea"];

/// A Gitea server, or a part of one, whose jobs are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GiteaForge {
    /// Its name in the config.
    pub name: ForgeName,
    /// The server's base URL, without a trailing slash.
    pub url: String,
    /// What of the server is served.
    pub scope: Scope,
    /// A file with an access token; read anew at each call, so that it may be rotated.
    pub token_file: PathBuf,
    /// A file with the secret that webhooks are signed with.
    pub webhook_secret_file: Option<PathBuf>,
    /// The labels that are served; absent: every one.
    pub labels: Option<Vec<LabelName>>,
    /// The repositories whose jobs are served, as `owner/name` or `owner/*`; absent: every one of the scope.
    pub repositories: Option<Vec<String>>,
    /// How often the server is asked while there is something to do.
    pub poll: SignedDuration,
    /// Whether a job whose machine was lost is run again, once.
    pub rerun_lost: bool,
}

impl GiteaForge {
    /// What the fleet core goes by.
    #[must_use]
    pub fn rules(&self) -> Forge {
        Forge { name: self.name.clone(), per_repository: self.repositories.is_some(), rerun: self.rerun_lost }
    }
}

/// What of a Gitea server is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// All of it; the token must be a site admin's.
    Site,
    /// One organisation.
    Organisation(String),
    /// One repository.
    Repository {
        /// Who it belongs to.
        owner: String,
        /// Its name.
        name: String,
    },
}

impl Scope {
    /// `site`, `OWNER` or `OWNER/NAME`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let word = |text: &str| {
            !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
        };
        match text.split_once('/') {
            None if text == "site" => Some(Self::Site),
            None => word(text).then(|| Self::Organisation(text.to_owned())),
            Some((owner, name)) => {
                (word(owner) && word(name)).then(|| Self::Repository { owner: owner.to_owned(), name: name.to_owned() })
            }
        }
    }
}

/// What a forge serves, and where the file says so.
pub(super) struct Served {
    pub(super) path: String,
    /// `None`: every label.
    pub(super) labels: Option<Vec<Spanned<String>>>,
}

const NOT_URL: &str = "a URL such as \"https://git.example.com\", without a user, query or fragment";
const NOT_SCOPE: &str = "\"site\", an organisation such as \"acme\", or a repository such as \"acme/train\"";
const NOT_REPOSITORY: &str = "a repository such as \"acme/train\", or \"acme/*\" for all of an owner";

/// Reads all forges.
pub(super) fn forges(
    document: &Document<'_>,
    root: &mut Section<'_, '_>,
    around: &Surroundings,
) -> (BTreeMap<ForgeName, GiteaForge>, BTreeMap<ForgeName, Served>) {
    let (mut found, mut served) = (BTreeMap::new(), BTreeMap::new());
    for (given, section) in root.tables("forge", "[forge.NAME.gitea]") {
        let name: Option<ForgeName> = tables::name(document, &given, &section);
        if given.get_ref() == ForgeName::direct().as_str() {
            let message = "is the built-in queue, which needs no table: give the forge another name";
            document.error(given.span().start, section.own_path(), message);
        }
        let kinds = section.children("[forge.NAME.gitea]");
        if section.is_empty() {
            let message = format!("says not what kind of forge it is: write [{}.gitea]", section.own_path());
            document.error(section.start(), section.own_path(), message);
        }
        for (n, (kind, form)) in kinds.into_iter().enumerate() {
            let (at, text) = (kind.span().start, kind.get_ref().as_str());
            if !KINDS.contains(&text) {
                let near = did_you_mean(text, &KINDS);
                let known = KINDS.join(", ");
                let message =
                    format!("{text:?} is not a kind of forge that is built yet{near}; known kinds are: {known}");
                document.error(at, form.own_path(), message);
            } else if n > 0 {
                document.error(at, form.own_path(), "a forge has one kind");
            } else if let Some(name) = &name {
                let message = "the agents of this version refuse runners: its jobs are shown and wait";
                document.warn(at, form.own_path(), message);
                let path = form.own_path().to_owned();
                let (forge, labels) = gitea(name, form, around);
                served.insert(name.clone(), Served { path, labels });
                found.extend(forge.map(|forge| (name.clone(), forge)));
            }
        }
    }
    (found, served)
}

fn gitea(
    name: &ForgeName,
    mut form: Section<'_, '_>,
    around: &Surroundings,
) -> (Option<GiteaForge>, Option<Vec<Spanned<String>>>) {
    let url = form.leaf("url", NOT_URL, |value| base_url(value.as_str()?));
    form.missing("url", "where the server is, such as url = \"https://git.example.com\"");
    let scope = form.leaf("scope", NOT_SCOPE, |value| Scope::parse(value.as_str()?));
    form.missing("scope", "what of it is served, such as scope = \"acme\" (an organisation), or \"site\" for all");
    let token_file = secret(&mut form, "token_file", around);
    form.missing("token_file", "a file with an access token, such as token_file = \"/etc/pilotlight/gitea.token\"");
    let webhook_secret_file = secret(&mut form, "webhook_secret_file", around);
    let labels = form.list("labels", "a list of labels such as [\"gpu-h200\"]", "a label's name in quotes", |text| {
        text.parse::<LabelName>().ok().map(|label| label.to_string())
    });
    let repositories =
        form.list("repositories", "a list of repositories such as [\"acme/*\"]", NOT_REPOSITORY, |text| {
            let (owner, name) = text.split_once('/')?;
            let good = !owner.is_empty() && !owner.contains('*') && !name.is_empty() && !name.contains('/');
            (good && (name == "*" || !name.contains('*'))).then(|| text.to_owned())
        });
    let poll = duration(&mut form, "poll", Duration::from_secs(3), Duration::from_millis(200));
    let rerun_lost = form.bool("rerun_lost").is_none_or(Spanned::into_inner);
    form.finish();
    let labels = labels.map(Spanned::into_inner);
    let plain = |list: Vec<Spanned<String>>| list.into_iter().map(Spanned::into_inner).collect();
    let names = labels.as_ref().map(|list| list.iter().filter_map(|label| label.get_ref().parse().ok()).collect());
    let (Some(url), Some(scope), Some(token_file)) = (url, scope, token_file) else { return (None, labels) };
    let forge = GiteaForge {
        name: name.clone(),
        url: url.into_inner(),
        scope: scope.into_inner(),
        token_file,
        webhook_secret_file,
        labels: names,
        repositories: repositories.map(Spanned::into_inner).map(plain),
        poll,
        rerun_lost,
    };
    (Some(forge), labels)
}

fn secret(form: &mut Section<'_, '_>, key: &'static str, around: &Surroundings) -> Option<PathBuf> {
    let path = form.absolute_path(key)?;
    if let Err(error) = files::check(path.get_ref(), Content::Token, around.credentials.as_deref()) {
        form.error(key, &path, error.to_string());
    }
    Some(path.into_inner())
}

/// The URL without a trailing slash, if it is one that paths can be put behind.
fn base_url(text: &str) -> Option<String> {
    let url = reqwest::Url::parse(text).ok()?;
    let plain = url.username().is_empty() && url.password().is_none() && url.query().is_none();
    let good = matches!(url.scheme(), "http" | "https") && url.host_str().is_some() && plain;
    (good && url.fragment().is_none()).then(|| text.trim_end_matches('/').to_owned())
}

/// Whether a policy of allowed repositories holds one. Gitea's names are the same in capitals.
#[must_use]
pub fn allows(patterns: &[String], repository: &str) -> bool {
    patterns.iter().any(|pattern| match pattern.strip_suffix("/*") {
        Some(owner) => repository.split_once('/').is_some_and(|(of, _)| of.eq_ignore_ascii_case(owner)),
        None => pattern.eq_ignore_ascii_case(repository),
    })
}
