//! `check`: everything that is wrong with a config.

use std::path::Path;

use serde::Serialize;

use super::{
    exit::{CONFIG, Failure},
    screen,
};
use crate::config::{self, Finding, Surroundings, Valid};

/// What `check --json` prints.
#[derive(Serialize)]
struct Report<'a> {
    errors: &'a [Finding],
    warnings: &'a [Finding],
}

/// Checks a config and prints what was found; returns the exit code.
pub(crate) fn run(path: &Path, around: &Surroundings, json: bool) -> Result<u8, Failure> {
    let (errors, warnings, summary) = match config::load(path, around) {
        Ok(valid) => {
            let summary = summary(path, &valid);
            (Vec::new(), valid.warnings, summary)
        }
        Err(invalid) => (invalid.errors, invalid.warnings, String::new()),
    };
    if json {
        screen::json(&Report { errors: &errors, warnings: &warnings })?;
    } else {
        findings(&errors, &warnings);
        screen::out(&summary)?;
    }
    Ok(if errors.is_empty() { 0 } else { CONFIG })
}

/// Prints errors and warnings to stderr.
pub(crate) fn findings(errors: &[Finding], warnings: &[Finding]) {
    for (kind, findings) in [("error", errors), ("warning", warnings)] {
        for finding in findings {
            screen::block(&format!("{}\n", screen::escape(&format!("{kind}: {finding}"))));
        }
    }
}

fn summary(path: &Path, valid: &Valid) -> String {
    let config = &valid.config;
    let count = |n: usize, what: &str| if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") };
    format!(
        "{}: good: {}, {}, {}; {} on this box; listens on {}\n",
        path.display(),
        count(config.labels.len(), "label"),
        count(config.pools.len(), "pool"),
        count(config.placements.len(), "placement"),
        count(valid.box_gpus.len(), "GPU"),
        config.listen,
    )
}
