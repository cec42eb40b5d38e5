//! The one place that prints. Results go to stdout, everything else to stderr.

use std::{
    borrow::Cow,
    io::{self, Write},
    os::fd::AsFd,
};

use serde::Serialize;

use super::exit::{Failure, INFRASTRUCTURE};

/// Writes a result to stdout. A reader that has seen enough (`| head`) is no failure.
pub(crate) fn out(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::new(INFRASTRUCTURE, format!("cannot write to stdout: {error}")))
        }
        _ => Ok(()),
    }
}

/// Stdout for a job's bytes: no lines, no buffer, and waiting for its reader blocks no other work.
pub(crate) fn raw_stdout() -> Result<tokio::fs::File, Failure> {
    match io::stdout().as_fd().try_clone_to_owned() {
        Ok(stdout) => Ok(tokio::fs::File::from_std(stdout.into())),
        Err(error) => Err(Failure::new(INFRASTRUCTURE, format!("cannot write to stdout: {error}"))),
    }
}

/// Writes a result to stdout as JSON.
pub(crate) fn json(value: &impl Serialize) -> Result<(), Failure> {
    out(&to_json(value)?)
}

/// A value as lines of JSON.
pub(crate) fn to_json(value: &impl Serialize) -> Result<String, Failure> {
    match serde_json::to_string_pretty(value) {
        Ok(text) => Ok(text + "\n"),
        Err(error) => Err(Failure::new(INFRASTRUCTURE, format!("cannot write JSON: {error}"))),
    }
}

/// Writes a block of lines that are fit for a terminal to stderr.
pub(crate) fn block(text: &str) {
    // With stderr closed there is nobody to tell.
    let _nobody_listens = io::stderr().lock().write_all(text.as_bytes());
}

/// Writes one line for people to stderr, escaped.
pub(crate) fn note(text: &str) {
    block(&format!("pilotlight: {}\n", escape(text)));
}

/// Makes text fit for a terminal: control characters and those that turn the direction of writing are shown as
/// escapes, so that a job's name can neither move the cursor nor forge a line.
pub(crate) fn escape(text: &str) -> Cow<'_, str> {
    let hostile = |c: char| {
        c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    if !text.contains(hostile) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if hostile(c) { safe.extend(c.escape_default()) } else { safe.push(c) }
    }
    Cow::Owned(safe)
}

/// Sets rows below a header in columns. Cells are escaped; an empty cell is shown as `-`.
pub(crate) fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let cell = |text: &str| if text.is_empty() { "-".to_owned() } else { escape(text).into_owned() };
    let mut lines: Vec<Vec<String>> = vec![header.iter().map(|title| (*title).to_owned()).collect()];
    lines.extend(rows.iter().map(|row| row.iter().map(|text| cell(text)).collect()));
    let width = |column: usize| {
        lines.iter().filter_map(|line| line.get(column)).map(|text| text.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let mut text = String::new();
    for line in &lines {
        let padded: Vec<String> =
            line.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}", width = *width)).collect();
        text.push_str(padded.join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_reaches_the_terminal_that_could_steer_it() {
        assert_eq!(escape("a\u{1b}[2Jb\nc\td\u{9b}e\u{7f}\r"), r"a\u{1b}[2Jb\nc\td\u{9b}e\u{7f}\r");
        assert_eq!(escape("user\u{202e}txt.exe"), r"user\u{202e}txt.exe");
        assert_eq!(escape("Grüße \\n 漢字"), "Grüße \\n 漢字");
    }

    #[test]
    fn a_table_has_one_line_a_row_whatever_the_cells_hold() {
        let rows = vec![vec!["1".to_owned(), "evil\nname\u{1b}[31m".to_owned()], vec!["22".to_owned(), String::new()]];
        assert_eq!(table(&["ID", "NAME"], &rows), "ID  NAME\n1   evil\\nname\\u{1b}[31m\n22  -\n");
    }
}
