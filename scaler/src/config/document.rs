//! A config file as it is walked: where each value stands, and everything that is wrong with it.
//!
//! The file is walked as toml's own spanned tables and not decoded with serde: a decoder stops at the first bad value
//! of a table and knows no place for an unknown key, and a person who mends a file wants to hear all of it at once,
//! with lines.

use std::{cell::RefCell, fmt, ops::Range, path::PathBuf};

use pilotlight_runtime::units::{Size, Span};
use serde::Serialize;
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

/// One thing that is wrong, or odd, with a config file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The file.
    pub file: PathBuf,
    /// The line, from 1; absent when the file could not be read.
    pub line: Option<usize>,
    /// The dotted path of the key; empty for the file as a whole.
    pub key: String,
    /// The value, what is wrong with it and what is allowed.
    pub message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.file.display())?;
        if let Some(line) = self.line {
            write!(f, "{line}:")?;
        }
        if !self.key.is_empty() {
            write!(f, " {}:", self.key)?;
        }
        write!(f, " {}", self.message)
    }
}

/// The text of a file and what was found in it so far.
pub(crate) struct Document<'t> {
    file: PathBuf,
    text: &'t str,
    errors: RefCell<Vec<Finding>>,
    warnings: RefCell<Vec<Finding>>,
}

impl<'t> Document<'t> {
    pub(crate) fn new(file: PathBuf, text: &'t str) -> Self {
        Self { file, text, errors: RefCell::default(), warnings: RefCell::default() }
    }

    pub(crate) fn error(&self, at: usize, key: impl Into<String>, message: impl Into<String>) {
        self.errors.borrow_mut().push(self.finding(at, key.into(), message.into()));
    }

    pub(crate) fn warn(&self, at: usize, key: impl Into<String>, message: impl Into<String>) {
        self.warnings.borrow_mut().push(self.finding(at, key.into(), message.into()));
    }

    pub(crate) fn has_errors(&self) -> bool {
        !self.errors.borrow().is_empty()
    }

    /// Errors and warnings, each in the order of the file's lines.
    pub(crate) fn into_findings(self) -> (Vec<Finding>, Vec<Finding>) {
        let (mut errors, mut warnings) = (self.errors.into_inner(), self.warnings.into_inner());
        errors.sort_by_key(|finding| finding.line);
        warnings.sort_by_key(|finding| finding.line);
        (errors, warnings)
    }

    fn finding(&self, at: usize, key: String, message: String) -> Finding {
        let before = self.text.as_bytes().get(..at).unwrap_or(self.text.as_bytes());
        let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
        Finding { file: self.file.clone(), line: Some(line), key, message }
    }

    /// A value as its author wrote it, cut short.
    fn raw(&self, span: Range<usize>) -> String {
        let text = self.text.get(span).unwrap_or_default();
        let line = text.lines().next().unwrap_or_default();
        let short: String = line.chars().take(60).filter(|c| !c.is_control()).collect();
        if short.len() < text.len() { format!("{short}…") } else { short }
    }
}

/// One table of the file. Keys that nobody asked for by [`Section::finish`] are errors.
pub(crate) struct Section<'d, 't> {
    document: &'d Document<'t>,
    table: &'d DeTable<'t>,
    path: String,
    start: usize,
    asked: Vec<&'static str>,
}

impl<'d, 't> Section<'d, 't> {
    pub(crate) fn root(document: &'d Document<'t>, table: &'d DeTable<'t>) -> Self {
        Self { document, table, path: String::new(), start: 0, asked: Vec::new() }
    }

    /// The key's full path.
    pub(crate) fn path(&self, key: &str) -> String {
        let bare = !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-'));
        let key = if bare { key.to_owned() } else { format!("{key:?}") };
        if self.path.is_empty() { key } else { format!("{}.{key}", self.path) }
    }

    /// The table's own path.
    pub(crate) fn own_path(&self) -> &str {
        &self.path
    }

    /// Where the table's name stands.
    pub(crate) fn start(&self) -> usize {
        self.start
    }

    /// Says that a value of this table is wrong.
    pub(crate) fn error<T>(&self, key: &str, value: &Spanned<T>, message: impl Into<String>) {
        self.document.error(value.span().start, self.path(key), message);
    }

    /// A value as its author wrote it, cut short.
    pub(crate) fn raw<T>(&self, value: &Spanned<T>) -> String {
        self.document.raw(value.span())
    }

    /// Says that a value of this table is odd.
    pub(crate) fn warn<T>(&self, key: &str, value: &Spanned<T>, message: impl Into<String>) {
        self.document.warn(value.span().start, self.path(key), message);
    }

    /// Says that a key is missing.
    pub(crate) fn missing(&self, key: &str, expects: &str) {
        if !self.has(key) {
            self.document.error(self.start, self.path(key), format!("is missing: write {expects}"));
        }
    }

    /// Whether the table says nothing at all.
    pub(crate) fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    pub(crate) fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    /// Reads a value; a value that `parse` does not take is an error that says what it is `not`.
    pub(crate) fn leaf<T>(
        &mut self,
        key: &'static str,
        not: &str,
        parse: impl FnOnce(&DeValue<'_>) -> Option<T>,
    ) -> Option<Spanned<T>> {
        self.asked.push(key);
        let value = self.table.get(key)?;
        match parse(value.get_ref()) {
            Some(parsed) => Some(Spanned::new(value.span(), parsed)),
            None => {
                self.error(key, value, format!("{} is not {not}", self.raw(value)));
                None
            }
        }
    }

    /// Reads a list; each element that `parse` does not take is an error of its own.
    pub(crate) fn list<T>(
        &mut self,
        key: &'static str,
        not: &str,
        not_element: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Option<Spanned<Vec<Spanned<T>>>> {
        self.asked.push(key);
        let value = self.table.get(key)?;
        let Some(array) = value.get_ref().as_array() else {
            self.error(key, value, format!("{} is not {not}", self.raw(value)));
            return None;
        };
        let mut parsed = Vec::new();
        for element in array {
            match element.get_ref().as_str().and_then(&parse) {
                Some(good) => parsed.push(Spanned::new(element.span(), good)),
                None => {
                    self.error(key, element, format!("{} is not {not_element}", self.raw(element)));
                }
            }
        }
        Some(Spanned::new(value.span(), parsed))
    }

    /// A duration such as `"10m"`.
    pub(crate) fn span(&mut self, key: &'static str) -> Option<Spanned<Span>> {
        let not =
            "a duration: write a whole number and a unit (ms, s, m, h, d) in quotes, such as \"10m\" or \"1h30m\"";
        self.leaf(key, not, |value| value.as_str()?.parse().ok())
    }

    /// A size such as `"1GiB"`.
    pub(crate) fn size(&mut self, key: &'static str) -> Option<Spanned<Size>> {
        let not = "a size: write a whole number and a unit (B, KB, KiB, MB, MiB, GB, GiB, TB, TiB) in quotes, such as \"1GiB\"";
        self.leaf(key, not, |value| value.as_str()?.parse().ok())
    }

    /// A whole number between two bounds.
    pub(crate) fn count(&mut self, key: &'static str, least: u32, most: u32) -> Option<Spanned<u32>> {
        let not = if most == u32::MAX {
            format!("a whole number of at least {least}")
        } else {
            format!("a whole number from {least} to {most}")
        };
        self.leaf(key, &not, |value| {
            u32::try_from(integer(value)?).ok().filter(|number| (least..=most).contains(number))
        })
    }

    pub(crate) fn bool(&mut self, key: &'static str) -> Option<Spanned<bool>> {
        self.leaf(key, "true or false", |value| value.as_bool())
    }

    /// An absolute path without `..`.
    pub(crate) fn absolute_path(&mut self, key: &'static str) -> Option<Spanned<PathBuf>> {
        let not = "an absolute path: write it from / on, in quotes and without ..";
        self.leaf(key, not, |value| {
            let path = PathBuf::from(value.as_str()?);
            let up = path.components().any(|part| part == std::path::Component::ParentDir);
            (path.is_absolute() && !up).then_some(path)
        })
    }

    /// The tables inside the table `key`, each with its name; an entry that is no table is an error.
    pub(crate) fn tables(&mut self, key: &'static str, example: &str) -> Vec<(Spanned<String>, Section<'d, 't>)> {
        self.asked.push(key);
        let Some(value) = self.table.get(key) else { return Vec::new() };
        let Some(table) = value.get_ref().as_table() else {
            self.error(key, value, format!("{} is not a table: write {example}", self.raw(value)));
            return Vec::new();
        };
        let group =
            Section { path: self.path(key), table, start: value.span().start, ..Self::root(self.document, table) };
        group.children(example)
    }

    /// All entries of this table as tables.
    pub(crate) fn children(&self, example: &str) -> Vec<(Spanned<String>, Section<'d, 't>)> {
        let mut found = Vec::new();
        for (key, value) in self.table {
            let name = Spanned::new(key.span(), key.get_ref().to_string());
            match value.get_ref().as_table() {
                Some(table) => {
                    let path = self.path(name.get_ref());
                    let section = Section { path, start: key.span().start, ..Self::root(self.document, table) };
                    found.push((name, section));
                }
                None => {
                    let raw = self.raw(value);
                    self.error(key.get_ref(), value, format!("{raw} is not a table: write {example}"));
                }
            }
        }
        // In the order of the file, so that a first of two wins and the second is the error.
        found.sort_by_key(|(name, _)| name.span().start);
        found
    }

    /// Ends the reading of this table: keys that were never asked for are unknown.
    pub(crate) fn finish(self) {
        for key in self.table.keys() {
            let name: &str = key.get_ref();
            if self.asked.contains(&name) {
                continue;
            }
            let known = self.asked.join(", ");
            let message = format!("is not a key of this table{}; known are: {known}", did_you_mean(name, &self.asked));
            self.error(name, key, message);
        }
    }
}

/// A whole number as the file has it.
pub(crate) fn integer(value: &DeValue<'_>) -> Option<i64> {
    let integer = value.as_integer()?;
    i64::from_str_radix(&integer.as_str().replace('_', ""), integer.radix()).ok()
}

/// ` (did you mean "…"?)`, or nothing when no known name is near.
pub(crate) fn did_you_mean<'k>(name: &str, known: impl IntoIterator<Item = &'k (impl AsRef<str> + 'k)>) -> String {
    known
        .into_iter()
        .map(|known| (strsim::jaro_winkler(name, known.as_ref()), known.as_ref()))
        .filter(|(near, _)| *near > 0.8)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map_or_else(String::new, |(_, known)| format!(" (did you mean {known:?}?)"))
}
