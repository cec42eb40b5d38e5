//! `pilotlight`: the scaler daemon and the client commands.

use std::process::ExitCode;

use pilotlight_runtime::logging;
use pilotlight_scaler::cli::{self, Invocation, RunArgs};
use tokio::runtime::Runtime;

fn main() -> ExitCode {
    match cli::parse(std::env::args_os()) {
        Invocation::Run(args) => run(&args),
        Invocation::Client(command) => block_on(cli::client(command)),
        Invocation::Done(code) => code,
    }
}

fn run(args: &RunArgs) -> ExitCode {
    let valid = match cli::load(args) {
        Ok(valid) => valid,
        Err(code) => return code,
    };
    logging::init(args.json_logs);
    // The daemon starts here: pilotlight_scaler::run(valid.config, state_dir, shutdown).
    tracing::error!(state_dir = %valid.config.state_dir.display(), "this build has no scaler in it");
    ExitCode::FAILURE
}

fn block_on(work: impl Future<Output = ExitCode>) -> ExitCode {
    let runtime = match Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => {
            logging::init(false);
            tracing::error!(%error, "cannot start the runtime");
            return ExitCode::FAILURE;
        }
    };
    let code = runtime.block_on(work);
    // A reader that takes nothing more must not keep us from leaving.
    runtime.shutdown_background();
    code
}
