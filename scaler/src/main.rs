//! `pilotlight`: the scaler daemon and the client commands.

use std::process::ExitCode;

use pilotlight_runtime::{Report, limits, logging, signals};
use pilotlight_scaler::{
    RunError,
    cli::{self, Invocation, RunArgs, exit},
    reload,
};
use tokio::runtime::Runtime;

fn main() -> ExitCode {
    match cli::parse(std::env::args_os()) {
        Invocation::Run(args) => run(&args),
        Invocation::Client(command) => block_on(cli::client(command)),
        Invocation::Done(code) => code,
    }
}

fn run(args: &RunArgs) -> ExitCode {
    let (valid, again) = match cli::load(args) {
        Ok(loaded) => loaded,
        Err(code) => return code,
    };
    logging::init(args.json_logs);
    if let Err(error) = limits::raise_open_files() {
        tracing::warn!(%error, "cannot raise the limit of open files; each agent needs one");
    }
    block_on(async move {
        let result = match signals::shutdown_token().and_then(|shutdown| Ok((reload::at_hangup(again)?, shutdown))) {
            Ok((reloads, shutdown)) => pilotlight_scaler::run(valid.config, reloads, shutdown).await,
            Err(source) => Err(RunError::Serve(source)),
        };
        match result {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                tracing::error!(error = %Report(&error), "the scaler cannot go on");
                ExitCode::from(exit::of_run(&error))
            }
        }
    })
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
