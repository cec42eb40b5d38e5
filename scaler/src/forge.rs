//! Forges: whose jobs are served, besides those of the built-in queue.
//!
//! A forge is read for what waits there ([`Gitea::run`]), registers runners for one job each ([`Gitea::grant`]), and
//! ends what such a runner leaves behind ([`Gitea::end`]). What to do when is the planner's business.

pub mod gitea;

use pilotlight_runtime::Report;

pub use gitea::Gitea;

/// Why a forge did not do what it was asked. Nothing destructive follows from it.
#[derive(Debug, thiserror::Error)]
pub enum ForgeError {
    /// The token's file cannot be read.
    #[error("token file {path}")]
    Token {
        /// Which.
        path: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Nothing came back, or not all of it.
    #[error("{call}")]
    Transport {
        /// What was called.
        call: String,
        /// Why.
        #[source]
        source: reqwest::Error,
    },
    /// The forge refuses.
    #[error("{call}: {status}{message}")]
    Status {
        /// What was called.
        call: String,
        /// What it answered.
        status: reqwest::StatusCode,
        /// What it said, with what that usually means.
        message: String,
    },
    /// The answer is not what this version understands.
    #[error("{call}: the answer is not understood")]
    Body {
        /// What was called.
        call: String,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
}

impl ForgeError {
    /// Whether the forge says that there is no such thing.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Status { status, .. } if *status == reqwest::StatusCode::NOT_FOUND)
    }

    /// Whether the forge does not know the runner (any more): HTTP 500 with this text, not 401 (spec gitea 5).
    #[must_use]
    pub fn is_unregistered(&self) -> bool {
        matches!(self, Self::Status { message, .. } if message.contains("unregistered runner"))
    }

    /// One line for people.
    #[must_use]
    pub fn line(&self) -> String {
        Report(self).to_string()
    }
}
