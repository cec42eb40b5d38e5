//! The command line: what it offers, and what its exit codes mean.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{Parser, Subcommand};
use pilotlight_runtime::{Report, failpoint, logging, signals};
use pilotlight_wire::{AssignmentId, agent::Bootstrap};
use tokio::runtime::{Builder, Runtime};

use crate::{
    attach::{self, AttachArgs},
    bootstrap::{self, AgentDir, DirError},
    container,
    power::Switch,
    run::{self, Containers, RunError},
    workshop::{self, Workshop},
};

/// Bad arguments.
const USAGE: u8 = 64;
/// The disk or the machine failed; started again, the agent takes up its jobs.
const FAILED: u8 = 74;
/// Another agent has the directory.
const TAKEN: u8 = 75;
/// The bootstrap is not usable.
const CONFIG: u8 = 78;

/// The agent on a Pilotlight machine
#[derive(Debug, Parser)]
#[command(name = "pilotlight-agent", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Enrol with the scaler, run jobs, leave when told to
    Run {
        /// The directory with bootstrap.json
        #[arg(long, env = "PILOTLIGHT_AGENT_DIR", value_name = "DIR")]
        dir: PathBuf,
        /// Log as JSON, one object a line
        #[arg(long)]
        json_logs: bool,
    },
    /// Keep one container's output (the agent starts this by itself)
    #[command(hide = true)]
    Attach(AttachArgs),
    /// End everything that a dead agent has on this box (the local provider starts this by itself)
    #[command(hide = true)]
    Clean {
        /// The agent's directory
        #[arg(long, value_name = "DIR")]
        dir: PathBuf,
    },
    /// Show the version
    Version,
}

/// Parses the arguments, does what they say, and gives the exit code: 0 after SIGTERM or when the agent has left, 64
/// for bad arguments, 74 when disk or machine failed, 75 when another agent has the directory, 78 for a bad bootstrap.
#[must_use]
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let command = match Cli::try_parse_from(args) {
        Ok(cli) => cli.command,
        Err(error) => {
            let code = if error.use_stderr() { USAGE } else { 0 };
            // Nobody is left to tell when even that cannot be written.
            let _unwritable = error.print();
            return code.into();
        }
    };
    let result = match command {
        Command::Run { dir, json_logs } => {
            logging::init(json_logs);
            runtime().and_then(|runtime| runtime.block_on(run_agent(&dir)))
        }
        Command::Attach(args) => {
            logging::init(false);
            return match attach::run(&args) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    tracing::warn!(assignment = %args.assignment, error = %Report(&error), "attach ended");
                    ExitCode::from(FAILED)
                }
            };
        }
        Command::Clean { dir } => {
            logging::init(false);
            runtime().and_then(|runtime| runtime.block_on(clean(&dir)))
        }
        Command::Version => writeln!(io::stdout(), "{}", env!("CARGO_PKG_VERSION")).map_err(RunError::Runtime),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = %Report(&error), "the agent failed");
            exit_code(&error).into()
        }
    }
}

async fn run_agent(dir: &Path) -> Result<(), RunError> {
    let shutdown = signals::shutdown_token().map_err(RunError::Runtime)?;
    let open = async |bootstrap: &Bootstrap, kept: BTreeSet<AssignmentId>| {
        let workshop = Workshop::open(dir, bootstrap, &kept).await;
        let (version, ready, last) = (workshop.docker(), workshop.clone(), workshop.clone());
        Containers {
            version,
            runner: move |job, channels| workshop.clone().run(job, channels),
            keep_ready: async move || ready.keep_ready().await,
            teardown: async move || last.close().await,
        }
    };
    run::run(dir, Switch::REAL, shutdown, open).await
}

async fn clean(dir: &Path) -> Result<(), RunError> {
    let bootstrap = bootstrap::read_bootstrap(dir)?;
    // Held to the end, so that no agent starts meanwhile.
    let held = AgentDir::take(dir)?;
    failpoint!("clean.lock.taken");
    let left = held.done()?.is_some();
    let engine = workshop::connect(1).await?;
    container::teardown(&engine, dir, bootstrap.instance, left).await?;
    failpoint!("clean.all.removed");
    Ok(())
}

/// One thread is enough for what the agent does, and keeps it small; file work has threads of its own.
fn runtime() -> Result<Runtime, RunError> {
    Builder::new_current_thread().enable_all().build().map_err(RunError::Runtime)
}

fn exit_code(error: &RunError) -> u8 {
    match error {
        RunError::Dir(DirError::Taken { .. }) => TAKEN,
        RunError::Dir(DirError::Bootstrap { .. }) => CONFIG,
        _ => FAILED,
    }
}
