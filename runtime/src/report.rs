//! Printing an error with its causes. Errors' own `Display` leaves the source out.

use std::{error::Error, fmt};

/// Displays an error and the chain of its sources, parted by `: `.
#[derive(Debug)]
pub struct Report<'a>(pub &'a dyn Error);

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let mut last = self.0.to_string();
        let mut source = self.0.source();
        while let Some(error) = source {
            let text = error.to_string();
            // Some libraries repeat their source in their own text; saying it twice helps nobody.
            if !last.contains(&text) {
                write!(f, ": {text}")?;
            }
            last = text;
            source = error.source();
        }
        Ok(())
    }
}
