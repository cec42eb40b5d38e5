//! What leaving means, by the bootstrap's power mode and by nothing else (design 5).

use std::{io, process::Command};

use pilotlight_runtime::Report;
use pilotlight_wire::agent::PowerMode;
use tracing::{info, warn};

/// The machine's switch; another one in tests.
#[derive(Clone, Copy, Debug)]
pub struct Switch {
    /// Asks the init system to power off.
    pub ask: fn() -> io::Result<()>,
    /// Powers off without asking, file systems synced and nothing else.
    pub force: fn() -> io::Result<()>,
}

impl Switch {
    /// This machine's.
    pub const REAL: Self = Self { ask: ask_systemd, force: reboot_call };
}

/// Leaves the machine in the way that the bootstrap says. With [`PowerMode::Exit`] nothing happens: the process ends.
///
/// # Errors
/// When the machine could not be powered off; its provider's own bound ends it then.
pub fn leave(mode: PowerMode, switch: Switch) -> io::Result<()> {
    match mode {
        PowerMode::Exit => Ok(()),
        PowerMode::Poweroff => {
            info!("powering off");
            (switch.ask)().or_else(|error| {
                warn!(error = %Report(&error), "the init system does not power off; forcing it");
                (switch.force)()
            })
        }
    }
}

fn ask_systemd() -> io::Result<()> {
    let status = Command::new("systemctl").arg("poweroff").status()?;
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("systemctl poweroff: {status}"))) }
}

fn reboot_call() -> io::Result<()> {
    rustix::fs::sync();
    Ok(rustix::system::reboot(rustix::system::RebootCommand::PowerOff)?)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        static DONE: Cell<&'static str> = const { Cell::new("") };
    }

    fn works(name: &'static str) -> io::Result<()> {
        DONE.set(name);
        Ok(())
    }

    fn fails() -> io::Result<()> {
        Err(io::Error::other("no init system"))
    }

    #[test]
    fn only_a_bootstrap_that_says_so_powers_off() {
        let switch = Switch { ask: || works("ask"), force: || works("force") };
        leave(PowerMode::Exit, switch).unwrap();
        assert_eq!(DONE.get(), "");
        leave(PowerMode::Poweroff, switch).unwrap();
        assert_eq!(DONE.get(), "ask");
    }

    #[test]
    fn a_machine_whose_init_does_not_answer_is_forced_off() {
        leave(PowerMode::Poweroff, Switch { ask: fails, force: || works("force") }).unwrap();
        assert_eq!(DONE.get(), "force");
        assert!(leave(PowerMode::Poweroff, Switch { ask: fails, force: fails }).is_err());
    }
}
