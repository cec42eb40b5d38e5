//! Logs go to stderr; under systemd that is the journal.

use tracing::{Level, Metadata};
use tracing_subscriber::{EnvFilter, filter::filter_fn, fmt, layer::SubscriberExt, util::SubscriberInitExt};

/// Starts logging: people's lines, or one JSON object a line. `PILOTLIGHT_LOG` filters (`debug`,
/// `pilotlight_scaler=trace`, …); `info` by default.
pub fn init(json: bool) {
    let filter = EnvFilter::try_from_env("PILOTLIGHT_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let registry = tracing_subscriber::registry().with(filter).with(filter_fn(keeps_secrets));
    // A second call (several programs in one test process) keeps the first subscriber.
    let _already_set = if json {
        registry.with(fmt::layer().json().with_writer(std::io::stderr)).try_init()
    } else {
        registry.with(fmt::layer().with_ansi(false).with_target(false).with_writer(std::io::stderr)).try_init()
    };
}

/// Whether what a place logs is fit to be read. The Docker client prints whole requests and answers when it debugs:
/// commands and environments of jobs, and their secrets. No filter of an admin's lets these through.
fn keeps_secrets(place: &Metadata<'_>) -> bool {
    *place.level() <= Level::INFO || !place.target().starts_with("bollard")
}
