//! The command line: parsing, the client commands, exit codes (design 7).

mod access;
mod check;
mod client;
mod commands;
mod drain;
mod environment;
pub mod exit;
mod screen;
mod stream;
mod submit;
#[cfg(test)]
mod tests;
mod views;

use std::{ffi::OsString, net::SocketAddr, path::PathBuf, process::ExitCode};

use clap::{Args, Parser, Subcommand, error::ErrorKind};
use pilotlight_runtime::units::Span;
use pilotlight_wire::{InstanceId, JobId, api::MAX_HOLD_SECONDS};

pub use self::access::AccessArgs;
use crate::config::{Invalid, Surroundings, Valid};

/// GPU machines for CI that exist only while a job needs them
#[derive(Debug, Parser)]
#[command(name = "pilotlight", version, subcommand_required = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the scaler
    Run(RunArgs),
    /// Check a config and say everything that is wrong with it
    Check(CheckArgs),
    /// Show the version
    Version(Output),
    #[command(flatten)]
    Client(ClientCommand),
}

/// Run the scaler.
#[derive(Args, Clone, Debug)]
pub struct RunArgs {
    /// Config file
    #[arg(long, env = "PILOTLIGHT_CONFIG", value_name = "FILE")]
    pub config: PathBuf,
    /// State directory [default: the config's]
    #[arg(long, env = "PILOTLIGHT_STATE_DIR", value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Listen on this loopback address instead of the config's; port 0 takes a free one
    #[arg(long, value_name = "ADDR", value_parser = loopback)]
    pub listen: Option<SocketAddr>,
    /// Log as JSON, one object a line
    #[arg(long)]
    pub json_logs: bool,
}

#[derive(Args, Debug)]
struct CheckArgs {
    /// Config file
    #[arg(long, env = "PILOTLIGHT_CONFIG", value_name = "FILE")]
    config: PathBuf,
    /// State directory [default: the config's]
    #[arg(long, env = "PILOTLIGHT_STATE_DIR", value_name = "DIR")]
    state_dir: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
}

#[derive(Args, Clone, Copy, Debug)]
struct Output {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A command that asks a running scaler.
#[derive(Debug, Subcommand)]
pub enum ClientCommand {
    /// Submit a job, show its output and exit with its code
    ///
    /// The job's bytes go to stdout, everything else to stderr. SIGINT, SIGTERM and SIGHUP cancel the job; a second
    /// signal leaves at once. When stdout is closed (`| head`) the job goes on, and its end is waited for.
    ///
    /// Exit codes: the job's own; 64 usage, 65 unknown label, unusable image or bad input, 69 no answer from the
    /// scaler, 75 infrastructure failure, 77 no permission, 124 timeout, 130 cancelled.
    Submit(Box<SubmitArgs>),
    /// List jobs
    Jobs(ListArgs),
    /// Show a job's output
    Logs(LogsArgs),
    /// Cancel jobs
    Cancel(CancelArgs),
    /// Show machines, jobs and alerts at a glance
    Status(QueryArgs),
    /// List pools and their placements
    Pools(QueryArgs),
    /// List machines
    Instances(ListArgs),
    /// Show what would be done now, and why
    Plan(QueryArgs),
    /// Give machines no new jobs; they go away when their jobs are done
    Drain(DrainArgs),
    /// Keep a machine for debugging: no new jobs, and it does not go away
    Hold(HoldArgs),
    /// End a hold
    Release(ReleaseArgs),
    /// List machines that carry our mark and that the scaler does not know
    Reap(ReapArgs),
}

/// Arguments of `submit`.
#[derive(Args, Debug)]
pub struct SubmitArgs {
    #[command(flatten)]
    access: AccessArgs,
    /// What the job asks for
    #[arg(long, value_name = "LABEL")]
    label: String,
    /// Image, or pilotlight/host for the machine's own /usr
    #[arg(long, value_name = "IMAGE")]
    image: String,
    /// Replaces the image's entrypoint; empty for none
    #[arg(long, value_name = "CMD")]
    entrypoint: Option<String>,
    /// Variable of the job; K alone takes our own value
    #[arg(long, value_name = "K=V|K")]
    env: Vec<OsString>,
    /// File of K=V lines; values are taken byte for byte after the first =, quotes included
    #[arg(long, value_name = "FILE")]
    env_file: Vec<PathBuf>,
    /// User, uid, user:group or uid:gid [default: the image's]
    #[arg(long, value_name = "USER")]
    user: Option<String>,
    /// Working directory [default: the image's]
    #[arg(long, value_name = "DIR")]
    workdir: Option<String>,
    /// From assignment to the job's deadline, such as 90s or 2h [default: the label's]
    #[arg(long, value_name = "DURATION")]
    timeout: Option<Span>,
    /// What to call the job [default: image and command]
    #[arg(long, value_name = "NAME", default_value = "")]
    name: String,
    /// Higher goes first [default: the label's]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    priority: Option<i32>,
    /// Print the job's id and leave; the job goes on
    #[arg(long)]
    detach: bool,
    /// Write the result as JSON: verdict, exit_code, reason, job, log_gap, usage
    #[arg(long, value_name = "FILE", conflicts_with = "detach")]
    result_file: Option<PathBuf>,
    /// Print the job as JSON: on stderr at its end, or on stdout with --detach
    #[arg(long)]
    json: bool,
    /// Replaces the image's command
    #[arg(last = true, value_name = "CMD")]
    command: Vec<String>,
}

/// Arguments of commands that ask one question.
#[derive(Args, Debug)]
pub struct QueryArgs {
    #[command(flatten)]
    access: AccessArgs,
    #[command(flatten)]
    output: Output,
}

/// Arguments of lists.
#[derive(Args, Debug)]
pub struct ListArgs {
    #[command(flatten)]
    access: AccessArgs,
    /// Also finished jobs, or machines that are gone
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    output: Output,
}

/// Arguments of `logs`.
#[derive(Args, Debug)]
pub struct LogsArgs {
    #[command(flatten)]
    access: AccessArgs,
    /// The job
    #[arg(value_name = "JOB")]
    id: JobId,
    /// Go on until the job is over
    #[arg(long, short)]
    follow: bool,
}

/// Arguments of `cancel`.
#[derive(Args, Debug)]
pub struct CancelArgs {
    #[command(flatten)]
    access: AccessArgs,
    /// The jobs
    #[arg(value_name = "JOB", required = true)]
    ids: Vec<JobId>,
    #[command(flatten)]
    output: Output,
}

/// Arguments of `drain`.
#[derive(Args, Debug)]
#[command(group = clap::ArgGroup::new("target").required(true).args(["instance", "pool", "all", "resume"]))]
pub struct DrainArgs {
    #[command(flatten)]
    access: AccessArgs,
    /// One machine
    #[arg(value_name = "INSTANCE")]
    instance: Option<InstanceId>,
    /// All machines of a pool
    #[arg(long, value_name = "POOL")]
    pool: Option<String>,
    /// All machines; nothing is launched until the scaler's next start or --resume
    #[arg(long)]
    all: bool,
    /// Cancel running jobs; with --all, also wait until every machine is gone
    #[arg(long)]
    now: bool,
    /// Wait until the machines are gone
    #[arg(long)]
    wait: bool,
    /// Undo --all: launch again
    #[arg(long, conflicts_with_all = ["now", "wait"])]
    resume: bool,
    #[command(flatten)]
    output: Output,
}

/// Arguments of `hold`.
#[derive(Args, Debug)]
pub struct HoldArgs {
    #[command(flatten)]
    access: AccessArgs,
    /// The machine
    #[arg(value_name = "INSTANCE")]
    instance: InstanceId,
    /// How long from now, at most 24h; a second hold replaces the first
    #[arg(long = "for", value_name = "DURATION", default_value = "4h", value_parser = hold)]
    duration: Span,
    #[command(flatten)]
    output: Output,
}

/// Arguments of `release`.
#[derive(Args, Debug)]
pub struct ReleaseArgs {
    #[command(flatten)]
    access: AccessArgs,
    /// The machine
    #[arg(value_name = "INSTANCE")]
    instance: InstanceId,
    #[command(flatten)]
    output: Output,
}

/// Arguments of `reap`.
#[derive(Args, Debug)]
pub struct ReapArgs {
    #[command(flatten)]
    access: AccessArgs,
    /// Destroy them
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    output: Output,
}

/// What the command line asks of the program.
#[derive(Debug)]
pub enum Invocation {
    /// Run the scaler.
    Run(RunArgs),
    /// Anything else; [`client`] does it.
    Client(ClientCommand),
    /// It is done; exit so.
    Done(ExitCode),
}

/// Parses the command line, and does at once what needs no scaler. Wrong usage exits 64.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Invocation {
    let done = |result: Result<u8, exit::Failure>| Invocation::Done(ExitCode::from(code(result)));
    match Cli::try_parse_from(args) {
        Ok(Cli { command: Command::Run(args) }) => Invocation::Run(args),
        Ok(Cli { command: Command::Client(command) }) => Invocation::Client(command),
        Ok(Cli { command: Command::Check(args) }) => {
            let around = surroundings(args.state_dir.as_deref());
            done(around.and_then(|around| check::run(&args.config, &around, args.output.json)))
        }
        Ok(Cli { command: Command::Version(output) }) => done(commands::version(output.json)),
        Err(error) => {
            let asked = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            // With nobody to read it there is nothing else to say it on.
            let _nobody_reads = error.print();
            Invocation::Done(ExitCode::from(if asked { 0 } else { exit::USAGE }))
        }
    }
}

/// Does a client command and returns the exit code.
pub async fn client(command: ClientCommand) -> ExitCode {
    ExitCode::from(code(commands::run(command).await))
}

/// An address of this box only: without TLS the scaler serves nobody else.
fn loopback(text: &str) -> Result<SocketAddr, String> {
    let address: SocketAddr =
        text.parse().map_err(|_bad| format!("{text:?} is not ADDRESS:PORT, such as 127.0.0.1:8470"))?;
    if address.ip().is_loopback() {
        Ok(address)
    } else {
        Err(format!("{address} is not a loopback address; without TLS tokens would cross the network in the clear"))
    }
}

/// Loads the config of `run`, telling errors and warnings on stderr, and says how to load it again. With errors the
/// result is the exit code.
///
/// # Errors
/// 78 when the config has errors.
pub fn load(args: &RunArgs) -> Result<(Valid, impl Fn() -> Result<Valid, Invalid> + Clone + Send + 'static), ExitCode> {
    let around = surroundings(args.state_dir.as_deref()).map_err(|failure| ExitCode::from(code(Err(failure))))?;
    // A reload may come after the working directory has changed.
    let path = std::path::absolute(&args.config).unwrap_or_else(|_| args.config.clone());
    let (config, listen) = (args.config.clone(), args.listen);
    let load = move |path: &std::path::Path| {
        let mut valid = crate::config::load(path, &around)?;
        valid.config.listen = listen.unwrap_or(valid.config.listen);
        Ok(valid)
    };
    match load(&config) {
        Ok(valid) => {
            check::findings(&[], &valid.warnings);
            Ok((valid, move || load(&path)))
        }
        Err(invalid) => {
            check::findings(&invalid.errors, &invalid.warnings);
            Err(ExitCode::from(exit::CONFIG))
        }
    }
}

/// A time for which a machine may be held.
fn hold(text: &str) -> Result<Span, String> {
    let span: Span = text.parse().map_err(|error| format!("{error}"))?;
    match span.0.as_secs() {
        0 => Err(format!("{text} is too short: write at least \"1s\"; `pilotlight release` ends a hold")),
        1..=MAX_HOLD_SECONDS => Ok(span),
        _ => Err(format!("{text} is too long: 24h at most; hold it again before that is over")),
    }
}

/// This box, with the state directory of the command line made absolute.
fn surroundings(state_dir: Option<&std::path::Path>) -> Result<Surroundings, exit::Failure> {
    let absolute = state_dir.map(std::path::absolute).transpose();
    let state_dir = absolute.map_err(|error| exit::Failure::new(exit::USAGE, format!("--state-dir: {error}")))?;
    Ok(Surroundings { state_dir, ..Surroundings::of_this_box() })
}

/// The exit code of a command, having told its failure.
fn code(result: Result<u8, exit::Failure>) -> u8 {
    match result {
        Ok(code) => code,
        Err(failure) => {
            for line in failure.message.lines() {
                screen::note(line);
            }
            failure.code
        }
    }
}
