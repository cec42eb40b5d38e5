//! SIGHUP: the config is read anew. A valid one is taken in, an invalid one is refused and the running one kept; either
//! way no job is killed (design 2).

use pilotlight_runtime::Report;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, watch},
};

use crate::{
    config::{Config, Invalid, Rules, Valid},
    control::Handle,
    fleet::Event,
};

/// What an admin made of the config file.
pub type Reload = Result<Box<Valid>, Invalid>;

/// Reads the config at each SIGHUP.
///
/// # Errors
/// When the handler cannot be installed.
pub fn at_hangup(
    load: impl Fn() -> Result<Valid, Invalid> + Clone + Send + 'static,
) -> std::io::Result<mpsc::Receiver<Reload>> {
    let mut hangup = signal(SignalKind::hangup())?;
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        while hangup.recv().await.is_some() {
            let load = load.clone();
            let loaded = match tokio::task::spawn_blocking(load).await {
                Ok(loaded) => loaded.map(Box::new),
                Err(error) => {
                    tracing::error!(error = %Report(&error), "config not read");
                    continue;
                }
            };
            if sender.send(loaded).await.is_err() {
                return;
            }
        }
    });
    Ok(receiver)
}

/// Takes in what comes, for ever.
pub(crate) async fn follow(
    mut reloads: mpsc::Receiver<Reload>,
    running: Config,
    rules: watch::Sender<Rules>,
    control: Handle,
) {
    while let Some(reload) = reloads.recv().await {
        match reload {
            Ok(valid) => {
                for warning in &valid.warnings {
                    tracing::warn!(%warning, "config");
                }
                for key in running.needs_restart(&valid.config) {
                    tracing::warn!(key, "this key changes only with a restart of the scaler");
                }
                rules.send_replace(valid.config.rules());
                control.tell(Event::Reloaded(Box::new(valid.config.settings()))).await;
                tracing::info!("config reloaded");
            }
            Err(invalid) => {
                for error in &invalid.errors {
                    tracing::error!(%error, "config");
                }
                tracing::error!(errors = invalid.errors.len(), "the new config is refused; the running one is kept");
                control.tell(Event::ReloadFailed { message: invalid.to_string() }).await;
            }
        }
    }
    // Nobody can reload any more; the rules must outlive that.
    rules.closed().await;
}
