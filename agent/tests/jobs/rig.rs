//! One instance of a test's own: what the agent has around its jobs.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use bollard::{API_DEFAULT_VERSION, Docker, query_parameters::*};
use jiff::Timestamp;
use pilotlight_agent::{
    container::{Engine, Networks, Share, reap, teardown},
    job::{
        AssignmentDir, Channels, End, Progress, Wish,
        direct::{self, JobContext},
    },
};
use pilotlight_runtime::clock::Clock;
use pilotlight_wire::{
    AssignmentId, DirectJob, ForgeName, Id, InstanceId, JobId, Usage, Verdict, Work,
    agent::{JobRef, Start},
};
use rustix::process::Pid;
use tempfile::TempDir;
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
    time::{Instant, sleep},
};
use uuid::Uuid;

/// How long anything may take before the test gives up.
const PATIENCE: Duration = Duration::from_secs(60);

const MIB: u64 = 1024 * 1024;

pub(crate) struct Rig {
    pub(crate) dir: TempDir,
    pub(crate) docker: Docker,
    pub(crate) context: JobContext,
    keeper: JoinHandle<()>,
}

/// A job's task and the other ends of its channels.
pub(crate) struct Job {
    pub(crate) dir: AssignmentDir,
    wish: watch::Sender<Wish>,
    progress: mpsc::Receiver<Progress>,
    pub(crate) details: Vec<String>,
    task: JoinHandle<End>,
}

/// `End::Finished`, to be taken apart.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) verdict: Verdict,
    pub(crate) code: Option<i32>,
    pub(crate) reason: String,
    pub(crate) gap: bool,
    pub(crate) usage: Option<Usage>,
}

impl Rig {
    pub(crate) async fn new() -> Self {
        Self::at(&Engine::default_socket()).await
    }

    /// With the agent's Docker at a socket of the test's own.
    pub(crate) async fn at(socket: &Path) -> Self {
        let dir = tempfile::Builder::new().prefix("pilotlight-jobs-").tempdir().unwrap();
        let instance: InstanceId = Id::from_uuid(Uuid::new_v4());
        let engine = Engine::connect(socket).await.unwrap();
        let networks = Networks::new(engine.clone(), instance);
        let real = Engine::default_socket();
        let docker = Docker::connect_with_unix(real.to_str().unwrap(), 60, API_DEFAULT_VERSION).unwrap();
        let docker = docker.negotiate_version().await.unwrap();
        let keep = networks.clone();
        let context = JobContext {
            engine,
            networks,
            instance,
            agent_dir: dir.path().to_owned(),
            program: PathBuf::from(env!("CARGO_BIN_EXE_pilotlight-agent")),
            share: Share { memory_bytes: 1024 * MIB, gpus: 0, cpu_jobs: 1 },
            host_image: true,
            clock: Clock::system(Timestamp::MIN),
        };
        Self { dir, docker, context, keeper: tokio::spawn(async move { keep.keep().await }) }
    }

    /// What a job is given: a script for bash in the built-in image.
    pub(crate) fn script(&self, script: &str) -> Start {
        let command = ["bash", "-c", script].map(str::to_owned).to_vec();
        self.start(DirectJob { command, ..image("pilotlight/host") })
    }

    pub(crate) fn start(&self, spec: DirectJob) -> Start {
        Start {
            assignment: Id::from_uuid(Uuid::new_v4()),
            job: JobRef {
                id: JobId::random(),
                forge: ForgeName::direct(),
                label: "cpu".parse().unwrap(),
                name: "test".to_owned(),
            },
            work: Work::Job(spec),
            gpus: Vec::new(),
            volumes: Vec::new(),
            remaining_seconds: 600,
            max_log_bytes: 1024 * MIB,
            stop_grace_seconds: 30,
        }
    }

    /// Begins a job, or carries on with it, as an agent that starts.
    pub(crate) fn begin(&self, start: &Start) -> Job {
        self.wished(start, Wish::Run)
    }

    /// As [`Rig::begin`], with a wish that was there before.
    pub(crate) fn wished(&self, start: &Start, wish: Wish) -> Job {
        let dir = AssignmentDir::new(self.dir.path(), start.assignment);
        fs::create_dir_all(dir.path()).unwrap();
        let (wish, wishes) = watch::channel(wish);
        let (tell, progress) = mpsc::channel(64);
        let run = direct::run(self.context.clone(), start.clone(), Channels { wish: wishes, progress: tell });
        Job { dir, wish, progress, details: Vec::new(), task: tokio::spawn(run) }
    }

    /// Runs a job to its end.
    pub(crate) async fn run(&self, start: &Start) -> Finished {
        finished(self.begin(start).end().await)
    }

    /// What a script printed, and how it ended.
    pub(crate) async fn output(&self, start: &Start) -> (String, Finished) {
        let job = self.begin(start);
        let dir = job.dir.clone();
        let end = finished(job.end().await);
        (String::from_utf8_lossy(&fs::read(dir.spool()).unwrap_or_default()).into_owned(), end)
    }

    /// The names of this instance's containers, running or not.
    pub(crate) async fn containers(&self) -> Vec<String> {
        let options = ListContainersOptions { all: true, filters: self.ours(), ..ListContainersOptions::default() };
        let found = self.docker.list_containers(Some(options)).await.unwrap();
        found.into_iter().flat_map(|one| one.names.unwrap()).collect()
    }

    /// How many networks this instance has.
    pub(crate) async fn networks(&self) -> usize {
        self.network_names().await.len()
    }

    /// The names of this instance's networks.
    pub(crate) async fn network_names(&self) -> BTreeSet<String> {
        let options = ListNetworksOptions { filters: self.ours() };
        let found = self.docker.list_networks(Some(options)).await.unwrap();
        found.into_iter().filter_map(|one| one.name).collect()
    }

    fn ours(&self) -> Option<HashMap<String, Vec<String>>> {
        Some(HashMap::from([("label".to_owned(), vec![format!("pilotlight.instance={}", self.context.instance)])]))
    }

    /// Directories of an assignment's, or of the whole instance's, cgroup.
    pub(crate) fn cgroups(&self, assignment: Option<AssignmentId>) -> Vec<PathBuf> {
        let mut path = Path::new("pilotlight").join(self.context.instance.to_string());
        path.extend(assignment.map(|id| id.to_string()));
        let roots = fs::read_dir("/sys/fs/cgroup").unwrap().map(|entry| entry.unwrap().path());
        roots.chain([PathBuf::from("/sys/fs/cgroup")]).map(|root| root.join(&path)).filter(|dir| dir.is_dir()).collect()
    }

    /// The state of a job's container, as Docker says it.
    pub(crate) async fn state(&self, id: AssignmentId) -> String {
        let found = self.docker.inspect_container(&name(id), None::<InspectContainerOptions>).await;
        found.map_or_else(|_| "absent".to_owned(), |one| one.state.unwrap().status.unwrap().to_string())
    }

    /// Checks that jobs left nothing, and removes the spare network.
    pub(crate) async fn finish(self) {
        assert_eq!(self.containers().await, Vec::<String>::new());
        assert_eq!(self.cgroups(None), Vec::<PathBuf>::new());
        until("no network but the spare one", async || self.networks().await == 1).await;
        self.clear().await;
    }

    /// Removes everything, jobs that run included.
    pub(crate) async fn clear(self) {
        self.keeper.abort();
        let engine = Engine::connect(&Engine::default_socket()).await.unwrap();
        teardown(&engine, self.dir.path(), self.context.instance, false).await.unwrap();
        assert_eq!((self.containers().await.len(), self.networks().await), (0, 0));
        assert_eq!(self.cgroups(None), Vec::<PathBuf>::new());
        assert_eq!(reap(&engine, self.context.instance, &BTreeSet::new()).await.unwrap(), 0);
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        // Docker has thirty networks for everybody: a test that failed must not keep its own.
        let filter = format!("label=pilotlight.instance={}", self.context.instance);
        let docker = |args: &[&str]| Command::new("docker").args(args).output();
        for (list, remove) in [(["ps", "-aq"], ["rm", "-f"]), (["network", "ls"], ["network", "rm"])] {
            let Ok(found) = docker(&[list[0], list[1], "-q", "--filter", &filter]) else { continue };
            for id in String::from_utf8_lossy(&found.stdout).lines() {
                let _best_effort = docker(&[remove[0], remove[1], id]);
            }
        }
        for assignments in self.cgroups(None) {
            let _best_effort = Command::new("find").arg(assignments).args(["-depth", "-type", "d", "-delete"]).output();
        }
    }
}

impl Job {
    pub(crate) fn wish(&self, wish: Wish) {
        self.wish.send_replace(wish);
    }

    /// Waits until the container was started; keeps the lines that came before.
    pub(crate) async fn started(&mut self) {
        loop {
            match tokio::time::timeout(PATIENCE, self.progress.recv()).await.unwrap() {
                Some(Progress::Started { .. }) => return,
                Some(Progress::Detail(line)) => self.details.push(line),
                None => panic!("ended before it started"),
            }
        }
    }

    /// Waits for a line to the job's author.
    pub(crate) async fn detail(&mut self, word: &str) {
        while !self.details.iter().any(|line| line.contains(word)) {
            match tokio::time::timeout(PATIENCE, self.progress.recv()).await.unwrap() {
                Some(Progress::Detail(line)) => self.details.push(line),
                other => panic!("{other:?} before {word:?}: {:?}", self.details),
            }
        }
    }

    /// Waits until the job has printed something.
    pub(crate) async fn printed(&self, text: &str) {
        until(text, async || self.spool().contains(text)).await;
    }

    pub(crate) fn spool(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.dir.spool()).unwrap_or_default()).into_owned()
    }

    /// The living attach process, from its lock.
    pub(crate) fn attach(&self) -> Pid {
        let text = fs::read_to_string(self.dir.attach_lock()).unwrap();
        Pid::from_raw(text.lines().next().unwrap().parse().unwrap()).unwrap()
    }

    pub(crate) fn is_over(&self) -> bool {
        self.task.is_finished()
    }

    /// The agent is killed.
    pub(crate) async fn lose(self) {
        self.task.abort();
        assert!(self.task.await.unwrap_err().is_cancelled());
    }

    pub(crate) async fn end(mut self) -> End {
        self.progress.close();
        tokio::time::timeout(PATIENCE, self.task).await.expect("it ends").unwrap()
    }
}

/// A job of an image's own command.
/// What a start runs.
pub(crate) fn spec(start: &mut Start) -> &mut DirectJob {
    match &mut start.work {
        Work::Job(spec) => spec,
        Work::Runner(_) => panic!("not a job in hand"),
    }
}

pub(crate) fn image(name: &str) -> DirectJob {
    DirectJob {
        image: name.to_owned(),
        entrypoint: None,
        command: Vec::new(),
        env: BTreeMap::new(),
        user: None,
        workdir: None,
    }
}

pub(crate) fn name(id: AssignmentId) -> String {
    format!("pilotlight-{id}")
}

pub(crate) fn finished(end: End) -> Finished {
    match end {
        End::Finished { verdict, exit_code, reason, log_gap, usage, .. } => {
            Finished { verdict, code: exit_code, reason: reason.unwrap_or_default(), gap: log_gap, usage }
        }
        End::Refused { reason } => panic!("refused: {reason}"),
    }
}

/// Waits until something holds.
pub(crate) async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds().await {
        assert!(Instant::now() < deadline, "in vain: {what}");
        sleep(Duration::from_millis(20)).await;
    }
}
