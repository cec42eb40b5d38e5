//! A Docker that does not answer for a while, or not as it should, played by a socket between the agent and the real one.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use pilotlight_agent::{container::Engine, job::End};
use pilotlight_wire::{Verdict, Volume};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional},
    net::{UnixListener, UnixStream},
    sync::watch,
    task::JoinHandle,
};

use crate::rig::{Rig, finished};

struct Proxy {
    dir: TempDir,
    down: watch::Sender<bool>,
    spoilt: Spoilt,
    task: JoinHandle<()>,
}

/// The one call that is answered wrongly next, and how.
type Spoilt = Arc<Mutex<Option<(Call, How)>>>;

/// A method and a part of the path.
type Call = (&'static str, &'static str);

/// What is wrong with an answer.
#[derive(Clone, Copy, Debug)]
enum How {
    /// Done, and the answer is lost.
    Lost,
    /// Done, and said to have failed.
    DoneAndFailed,
    /// Not done: an error of Docker's.
    Failed,
    /// Not done: no HTTP.
    Garbage,
    /// Not done: somebody else's page.
    Page,
}

const FAILED: &str = "HTTP/1.1 500 Internal Server Error\r\nContent-Type: application/json\r\nConnection: close\r\n\
                      Content-Length: 20\r\n\r\n{\"message\":\"spoilt\"}";
const PAGE: &str = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\nContent-Length: 6\r\n\r\n<html>";

impl Proxy {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("docker.sock")).unwrap();
        let (down, is_down) = watch::channel(false);
        let spoilt = Spoilt::default();
        let spoil = Arc::clone(&spoilt);
        let task = tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                tokio::spawn(pass(client, is_down.clone(), Arc::clone(&spoil)));
            }
        });
        Self { dir, down, spoilt, task }
    }

    fn spoil(&self, call: Call, how: How) {
        *self.spoilt.lock().unwrap() = Some((call, how));
    }

    /// Whether the call has come.
    fn has_spoilt(&self) -> bool {
        self.spoilt.lock().unwrap().is_none()
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("docker.sock")
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// One connection: cut while Docker is down, unless it is an attach, which is only as dead as its container.
async fn pass(mut client: UnixStream, mut down: watch::Receiver<bool>, spoilt: Spoilt) {
    let mut head = vec![0; 64 * 1024];
    let mut read = 0;
    // The attach process writes its request in pieces, and the first may not say yet what it asks for.
    while !head[..read].windows(4).any(|end| end == b"\r\n\r\n") {
        match client.read(&mut head[read..]).await {
            Ok(0) | Err(_) => return,
            Ok(more) => read += more,
        }
    }
    let line = String::from_utf8_lossy(&head[..read]).lines().next().unwrap_or_default().to_owned();
    if *down.borrow() {
        return;
    }
    let real: &Path = &Engine::default_socket();
    let mut docker = UnixStream::connect(real).await.unwrap();
    let how = spoilt
        .lock()
        .unwrap()
        .take_if(|((method, part), _)| line.starts_with(*method) && line.contains(*part))
        .map(|(_, how)| how);
    let undone = match how {
        None | Some(How::Lost | How::DoneAndFailed) => None,
        Some(How::Failed) => Some(FAILED),
        Some(How::Garbage) => Some("\0\u{1}nonsense\r\n\r\n"),
        Some(How::Page) => Some(PAGE),
    };
    if let Some(answer) = undone {
        let _client_left = client.write_all(answer.as_bytes()).await;
        return;
    }
    let end = head.iter().position(|byte| *byte == b'\n').unwrap_or(0) + 1;
    // Closed after the answer, so that each call comes through here.
    let upgrades = String::from_utf8_lossy(&head[..read]).to_lowercase().contains("upgrade:");
    let close: &[u8] = if upgrades { b"" } else { b"Connection: close\r\n" };
    if docker.write_all(&[&head[..end], close, &head[end..read]].concat()).await.is_err() {
        return;
    }
    if let Some(how) = how {
        let _answer = docker.read(&mut head).await;
        if let How::DoneAndFailed = how {
            let _client_left = client.write_all(FAILED.as_bytes()).await;
        }
        return;
    }
    let copied = async { drop(copy_bidirectional(&mut client, &mut docker).await) };
    if line.contains("/attach") {
        copied.await;
        return;
    }
    tokio::select! {
        () = copied => {}
        _ = down.wait_for(|down| *down) => {}
    }
}

#[tokio::test]
async fn a_start_whose_answer_is_lost_is_no_second_run() {
    let proxy = Proxy::new();
    let rig = Rig::at(&proxy.socket()).await;
    proxy.spoil(START, How::Lost);
    let start = rig.script("echo ran; sleep 1; exit 3");
    let (text, end) = rig.output(&start).await;
    assert!(proxy.has_spoilt(), "it was lost");
    assert_eq!((end.verdict, end.code, end.gap), (Verdict::Failure, Some(3), false));
    assert_eq!(text, "ran\n");
    rig.finish().await;
}

#[tokio::test]
async fn a_job_goes_on_while_docker_does_not_answer() {
    let proxy = Proxy::new();
    let rig = Rig::at(&proxy.socket()).await;
    let start = rig.script("echo on; sleep 1; echo off; exit 4");
    let job = rig.begin(&start);
    job.printed("on\n").await;
    proxy.down.send_replace(true);
    job.printed("off\n").await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    proxy.down.send_replace(false);
    let end = finished(job.end().await);
    assert_eq!((end.verdict, end.code, end.gap), (Verdict::Failure, Some(4), false));
    rig.finish().await;
}

/// One wrong answer at each step: the job runs once and has its own code, or it was refused and has not run.
async fn one_wrong_answer(calls: &[Call], how: How) {
    for &call in calls {
        let proxy = Proxy::new();
        let rig = Rig::at(&proxy.socket()).await;
        let marks = tempfile::tempdir().unwrap();
        let mut start = rig.script("echo ran | tee -a /marks/ran; sleep 1; exit 3");
        start.volumes.push(Volume {
            name: "marks".to_owned(),
            host: marks.path().to_str().unwrap().to_owned(),
            mount: "/marks".to_owned(),
            read_only: false,
        });
        proxy.spoil(call, how);
        let job = rig.begin(&start);
        let spool = job.dir.spool();
        let end = job.end().await;
        assert!(proxy.has_spoilt(), "{call:?} was never called");
        let ran = fs::read_to_string(marks.path().join("ran")).unwrap_or_default();
        match &end {
            End::Refused { reason } => assert_eq!(ran, "", "{call:?}: {reason}"),
            End::Finished { verdict, exit_code, .. } => {
                assert_eq!((*verdict, *exit_code, &*ran), (Verdict::Failure, Some(3), "ran\n"), "{call:?}: {end:?}");
                let text = fs::read_to_string(spool).unwrap();
                assert!(text.starts_with("ran\n"), "{call:?}: {text}");
            }
        }
        rig.finish().await;
    }
}

const INSPECT: Call = ("GET", "/containers/");
const CREATE: Call = ("POST", "/containers/create");
const START: Call = ("POST", "/start");
const WAIT: Call = ("POST", "/wait");
const REMOVE: Call = ("DELETE", "/containers/");
/// The last one is the attach process's own look, by the version that it speaks.
const CALLS: [Call; 8] =
    [INSPECT, ("GET", "/images/"), CREATE, ("POST", "/attach"), START, WAIT, REMOVE, ("GET", "/v1.41/containers/")];

#[tokio::test]
async fn one_error_of_dockers_costs_no_job() {
    one_wrong_answer(&CALLS, How::Failed).await;
}

#[tokio::test]
async fn what_docker_does_and_says_has_failed_is_not_done_twice() {
    one_wrong_answer(&[CREATE, START, REMOVE], How::DoneAndFailed).await;
}

#[tokio::test]
async fn one_answer_that_is_none_costs_no_job() {
    one_wrong_answer(&CALLS, How::Garbage).await;
    one_wrong_answer(&[INSPECT, CREATE, WAIT], How::Page).await;
}

#[tokio::test]
async fn an_error_while_a_job_is_taken_up_again_does_not_end_it() {
    let proxy = Proxy::new();
    let rig = Rig::at(&proxy.socket()).await;
    let start = rig.script("echo on; sleep 4; echo off; exit 3");
    let job = rig.begin(&start);
    job.printed("on\n").await;
    job.lose().await;
    proxy.spoil(INSPECT, How::Failed);
    let (text, end) = rig.output(&start).await;
    assert!(proxy.has_spoilt());
    assert_eq!((&*text, end.code, end.gap), ("on\noff\n", Some(3), false));
    rig.finish().await;
}
