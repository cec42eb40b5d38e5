//! Logs go to stderr; under systemd that is the journal.

use tracing_subscriber::{EnvFilter, fmt, layer::SubscriberExt, util::SubscriberInitExt};

/// Starts logging: people's lines, or one JSON object a line. `PILOTLIGHT_LOG` filters (`debug`,
/// `pilotlight_scaler=trace`, …); `info` by default.
pub fn init(json: bool) {
    let filter = EnvFilter::try_from_env("PILOTLIGHT_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let registry = tracing_subscriber::registry().with(filter);
    // A second call (several programs in one test process) keeps the first subscriber.
    let _already_set = if json {
        registry.with(fmt::layer().json().with_writer(std::io::stderr)).try_init()
    } else {
        registry.with(fmt::layer().with_ansi(false).with_target(false).with_writer(std::io::stderr)).try_init()
    };
}
