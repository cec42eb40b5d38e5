//! A Docker that does not answer for a while, played by a socket between the agent and the real one.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use pilotlight_agent::container::Engine;
use pilotlight_wire::Verdict;
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
    /// The next answer to a start is lost.
    lose_start: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Proxy {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("docker.sock")).unwrap();
        let (down, is_down) = watch::channel(false);
        let lose_start = Arc::new(AtomicBool::new(false));
        let lose = Arc::clone(&lose_start);
        let task = tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                tokio::spawn(pass(client, is_down.clone(), Arc::clone(&lose)));
            }
        });
        Self { dir, down, lose_start, task }
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
async fn pass(mut client: UnixStream, mut down: watch::Receiver<bool>, lose_start: Arc<AtomicBool>) {
    let mut head = vec![0; 64 * 1024];
    let mut read = 0;
    // The attach process writes its request in pieces, and the first may not say yet what it asks for.
    while !head[..read].windows(2).any(|end| end == b"\r\n") {
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
    docker.write_all(&head[..read]).await.unwrap();
    if line.contains("/start") && lose_start.swap(false, Ordering::SeqCst) {
        let _answer = docker.read(&mut head).await;
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
    proxy.lose_start.store(true, Ordering::SeqCst);
    let start = rig.script("echo ran; sleep 1; exit 3");
    let (text, end) = rig.output(&start).await;
    assert!(!proxy.lose_start.load(Ordering::SeqCst), "it was lost");
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
