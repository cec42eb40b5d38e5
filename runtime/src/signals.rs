//! SIGTERM and SIGINT: the first asks, the second exits at once even when the runtime is wedged.

use std::sync::{Arc, atomic::AtomicBool};

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// The exit code after a second SIGTERM or SIGINT: 128 + SIGTERM.
pub const HARD_EXIT: i32 = 143;

/// Cancels the returned token at the first SIGTERM or SIGINT. The second one ends the process with [`HARD_EXIT`]
/// from the signal handler itself.
///
/// # Errors
/// When handlers cannot be installed.
pub fn shutdown_token() -> std::io::Result<CancellationToken> {
    let asked = Arc::new(AtomicBool::new(false));
    for number in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        // The order matters: the exit is registered first, so the first signal finds the flag still down.
        signal_hook::flag::register_conditional_shutdown(number, HARD_EXIT, Arc::clone(&asked))?;
        signal_hook::flag::register(number, Arc::clone(&asked))?;
    }
    let token = CancellationToken::new();
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let cancel = token.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
            () = cancel.cancelled() => {}
        }
        cancel.cancel();
    });
    Ok(token)
}
