//! The client commands.

use std::collections::BTreeSet;

use pilotlight_wire::{
    DirectJob, JobId,
    api::{
        DrainTarget, HoldRequest, InstanceView, JobView, Orphan, PlanView, PoolView, ReleaseRequest, StatusView,
        SubmitJob,
    },
};
use reqwest::Method;
use serde::{Serialize, de::DeserializeOwned};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
};

use super::{
    AccessArgs, CancelArgs, ClientCommand, DrainArgs, HoldArgs, LogsArgs, ReapArgs, ReleaseArgs, SubmitArgs,
    client::Client,
    drain, environment,
    exit::{self, BAD_INPUT, Failure, INFRASTRUCTURE, USAGE},
    screen,
    stream::{StreamEnd, Tail, gave_up},
    submit::{ResultFile, Submission, clear_result_file},
    views,
};

/// Does a command and returns the exit code.
pub(super) async fn run(command: ClientCommand) -> Result<u8, Failure> {
    match command {
        ClientCommand::Submit(args) => submit(*args).await,
        ClientCommand::Logs(args) => logs(args).await,
        ClientCommand::Cancel(args) => cancel(args).await,
        ClientCommand::Drain(args) => drain(args).await,
        ClientCommand::Hold(args) => hold(args).await,
        ClientCommand::Release(args) => release(args).await,
        ClientCommand::Reap(args) => reap(args).await,
        ClientCommand::Jobs(args) => {
            let path = if args.all { "jobs?all=1" } else { "jobs" };
            show::<Vec<JobView>>(&args.access, path, args.output.json, |list| views::jobs(list)).await
        }
        ClientCommand::Instances(args) => {
            let path = if args.all { "instances?all=1" } else { "instances" };
            show::<Vec<InstanceView>>(&args.access, path, args.output.json, |list| views::instances(list)).await
        }
        ClientCommand::Pools(args) => {
            show::<Vec<PoolView>>(&args.access, "pools", args.output.json, |list| views::pools(list)).await
        }
        ClientCommand::Status(args) => {
            show::<StatusView>(&args.access, "status", args.output.json, views::status).await
        }
        ClientCommand::Plan(args) => show::<PlanView>(&args.access, "plan", args.output.json, views::plan).await,
    }
}

/// The program's version.
pub(super) fn version(json: bool) -> Result<u8, Failure> {
    #[derive(Serialize)]
    struct Version {
        version: &'static str,
    }
    let version = env!("CARGO_PKG_VERSION");
    print(&Version { version }, json, |_| format!("pilotlight {version}\n"))
}

fn connect(access: &AccessArgs) -> Result<Client, Failure> {
    Client::new(access.resolve(|name| std::env::var_os(name))?)
}

fn print<T: Serialize>(value: &T, json: bool, human: impl FnOnce(&T) -> String) -> Result<u8, Failure> {
    if json {
        screen::json(value)?
    } else {
        screen::out(&human(value))?
    }
    Ok(0)
}

async fn show<T: Serialize + DeserializeOwned>(
    access: &AccessArgs,
    path: &str,
    json: bool,
    human: impl FnOnce(&T) -> String,
) -> Result<u8, Failure> {
    print(&connect(access)?.get::<T>(path).await?, json, human)
}

async fn submit(args: SubmitArgs) -> Result<u8, Failure> {
    let id = JobId::random();
    let Some(path) = args.result_file.clone() else { return submit_as(id, args).await.0 };
    clear_result_file(&path)?;
    let (code, end) = submit_as(id, args).await;
    ResultFile::of(id, &end).write(&path)?;
    code
}

/// Submits and says both the exit code and how the job ended.
async fn submit_as(id: JobId, args: SubmitArgs) -> (Result<u8, Failure>, Result<JobView, Failure>) {
    let (detach, json) = (args.detach, args.json);
    let end = attend(id, args).await;
    let code = end.clone().and_then(|job| match (detach, json) {
        (true, true) => print(&job, true, |_| String::new()),
        (true, false) => print(&job, false, |job| format!("{}\n", job.id)),
        (false, _) => {
            screen::block(&if json { screen::to_json(&job)? } else { views::report(&job) });
            Ok(exit::of_job(&job))
        }
    });
    (code, end)
}

/// Submits and, unless detached, waits for the end.
async fn attend(id: JobId, args: SubmitArgs) -> Result<JobView, Failure> {
    let client = connect(&args.access)?;
    let detach = args.detach;
    let body = order(args)?;
    screen::note(&format!("job {id}"));
    let signals = signals()?;
    let submission = Submission { client: &client, id, body, signals, notes: &screen::note };
    let accepted = submission.accept().await?;
    if detach { Ok(accepted) } else { submission.follow(&mut screen::raw_stdout()?).await }
}

fn order(args: SubmitArgs) -> Result<SubmitJob, Failure> {
    let label = args.label.parse().map_err(|error| Failure::new(BAD_INPUT, format!("--label: {error}")))?;
    let env = environment::collect(&args.env_file, &args.env, |name| std::env::var_os(name))?;
    let entrypoint = args.entrypoint.map(|command| if command.is_empty() { Vec::new() } else { vec![command] });
    // A deadline is whole seconds; part of one counts as one, so that 500ms is not "at once".
    let timeout_seconds = args.timeout.map(|span| span.0.as_secs() + u64::from(span.0.subsec_nanos() > 0));
    if timeout_seconds == Some(0) {
        return Err(Failure::new(USAGE, "--timeout: a job needs more than no time"));
    }
    let (image, command, user, workdir) = (args.image, args.command, args.user, args.workdir);
    let spec = DirectJob { image, entrypoint, command, env, user, workdir };
    Ok(SubmitJob { label, name: args.name, spec, timeout_seconds, priority: args.priority })
}

/// Counts SIGINT, SIGTERM and SIGHUP.
fn signals() -> Result<watch::Receiver<u32>, Failure> {
    let listen = |kind| {
        signal(kind).map_err(|error| Failure::new(INFRASTRUCTURE, format!("cannot listen for signals: {error}")))
    };
    let mut interrupt = listen(SignalKind::interrupt())?;
    let mut terminate = listen(SignalKind::terminate())?;
    let mut hangup = listen(SignalKind::hangup())?;
    let (count, counted) = watch::channel(0);
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
                _ = hangup.recv() => {}
                () = count.closed() => return,
            }
            count.send_modify(|count| *count += 1);
        }
    });
    Ok(counted)
}

async fn logs(args: LogsArgs) -> Result<u8, Failure> {
    let client = connect(&args.access)?;
    let tail = Tail { client: &client, id: args.id, follow: args.follow, accepted: false, notes: &screen::note };
    match tail.copy(&mut screen::raw_stdout()?).await.map_err(|failure| gave_up(args.id, failure))? {
        StreamEnd::ReaderGone(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::new(INFRASTRUCTURE, format!("cannot write to stdout: {error}")))
        }
        StreamEnd::ReaderGone(_) | StreamEnd::Complete => Ok(0),
    }
}

/// Cancels all, and fails as the last that could not be.
async fn cancel(args: CancelArgs) -> Result<u8, Failure> {
    let client = connect(&args.access)?;
    let mut cancelled = Vec::new();
    let mut code = 0;
    for id in args.ids {
        match client.post::<JobView>(&format!("jobs/{id}/cancel")).await {
            Ok(job) => cancelled.push(job),
            Err(error) => {
                let failure = Failure::from(error);
                screen::note(&format!("{id}: {failure}"));
                code = failure.code;
            }
        }
    }
    print(&cancelled, args.output.json, |list| views::jobs(list))?;
    Ok(code)
}

async fn drain(args: DrainArgs) -> Result<u8, Failure> {
    let client = connect(&args.access)?;
    if args.resume {
        client.command("resume").await?;
        return print(&client.get::<Vec<PoolView>>("pools").await?, args.output.json, |pools| views::pools(pools));
    }
    let target = match (args.instance, args.pool) {
        (Some(instance), _) => DrainTarget::Instance(instance),
        (None, Some(pool)) => {
            DrainTarget::Pool(pool.parse().map_err(|error| Failure::new(BAD_INPUT, format!("--pool: {error}")))?)
        }
        (None, None) => DrainTarget::All,
    };
    let drained = drain::ask(&client, target, args.now).await?;
    if args.wait || (args.all && args.now) {
        // `--all` means those too that were on their way when it was asked for.
        let which: Option<BTreeSet<_>> = (!args.all).then(|| drained.instances.iter().copied().collect());
        drain::wait(&client, which.as_ref(), &screen::note).await?;
    }
    print(&drained, args.output.json, |drained| drained.instances.iter().map(|id| format!("{id}\n")).collect())
}

async fn hold(args: HoldArgs) -> Result<u8, Failure> {
    let request = HoldRequest { instance: args.instance, seconds: args.duration.0.as_secs() };
    let held: InstanceView = connect(&args.access)?.send(Method::POST, "hold", &request).await?;
    if let Some(until) = held.held_until {
        screen::note(&format!("instance {} is held until {until:.0}; `pilotlight release` ends that", held.id));
    }
    print(&held, args.output.json, |held| views::instances(std::slice::from_ref(held)))
}

async fn release(args: ReleaseArgs) -> Result<u8, Failure> {
    let request = ReleaseRequest { instance: args.instance };
    let released: InstanceView = connect(&args.access)?.send(Method::POST, "release", &request).await?;
    print(&released, args.output.json, |released| views::instances(std::slice::from_ref(released)))
}

async fn reap(args: ReapArgs) -> Result<u8, Failure> {
    let client = connect(&args.access)?;
    let orphans: Vec<Orphan> = if args.yes { client.post("reap").await? } else { client.get("orphans").await? };
    if !args.yes && !orphans.is_empty() {
        screen::note("destroy them with `pilotlight reap --yes`");
    }
    print(&orphans, args.output.json, |orphans| views::orphans(orphans))
}
