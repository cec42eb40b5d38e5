//! A socket between the agent and the real Docker that can be down, lose what passes, and lie.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use pilotlight_agent::container::Engine;
use serde_json::Value;
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy, copy_bidirectional},
    net::{UnixListener, UnixStream},
    sync::watch,
    task::JoinHandle,
};

/// What one look at a container is answered with instead of the truth, which may be nothing.
type Lie = fn(Value) -> Option<Value>;

/// A method and a part of the path.
pub(crate) type Call = (&'static str, &'static str);

/// What is wrong with an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum How {
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

pub(crate) struct Proxy {
    dir: TempDir,
    tricks: Arc<Tricks>,
    task: JoinHandle<()>,
}

#[derive(Default)]
struct Tricks {
    /// Every call is cut off, but no attach: that is only as dead as its container.
    down: watch::Sender<bool>,
    /// Every attach that there is when this changes is cut off.
    cut: watch::Sender<u32>,
    /// The one call that is answered wrongly next, and how.
    spoilt: Mutex<Option<(Call, How)>>,
    lie: Mutex<Option<Lie>>,
    stream: Mutex<Stream>,
}

/// How the output of an attach goes on to the reader.
#[derive(Clone, Copy, Default)]
pub(crate) enum Stream {
    #[default]
    AsItComes,
    /// Its end never comes.
    Endless,
    /// A KiB at a time, with a pause before each.
    Slow(Duration),
}

impl Proxy {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("docker.sock")).unwrap();
        let tricks = Arc::new(Tricks::default());
        let shared = Arc::clone(&tricks);
        let task = tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                tokio::spawn(pass(client, Arc::clone(&shared)));
            }
        });
        Self { dir, tricks, task }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("docker.sock")
    }

    pub(crate) fn down(&self, down: bool) {
        self.tricks.down.send_replace(down);
    }

    pub(crate) fn cut_streams(&self) {
        self.tricks.cut.send_modify(|count| *count += 1);
    }

    pub(crate) fn stream(&self, how: Stream) {
        *self.tricks.stream.lock().unwrap() = how;
    }

    pub(crate) fn spoil(&self, call: Call, how: How) {
        *self.tricks.spoilt.lock().unwrap() = Some((call, how));
    }

    /// Whether the call has come.
    pub(crate) fn has_spoilt(&self) -> bool {
        self.tricks.spoilt.lock().unwrap().is_none()
    }

    pub(crate) fn lie(&self, lie: Lie) {
        *self.tricks.lie.lock().unwrap() = Some(lie);
    }

    pub(crate) fn tell_the_truth(&self) {
        *self.tricks.lie.lock().unwrap() = None;
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// One connection: one call.
async fn pass(mut client: UnixStream, tricks: Arc<Tricks>) {
    let mut down = tricks.down.subscribe();
    let Some(head) = head(&mut client).await else { return };
    if *down.borrow() {
        return;
    }
    let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
    let lie = *tricks.lie.lock().unwrap();
    if let Some(lie) = lie.filter(|_| path.contains("/containers/pilotlight-") && path.ends_with("/json"))
        && let Some(truth) = inspect(&path).await
    {
        let answer = lie(truth).map(|it| (200, it.to_string()));
        let (status, body) = answer.unwrap_or_else(|| (404, r#"{"message":"no such container"}"#.to_owned()));
        let head = format!("HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nConnection: close");
        let answer = format!("{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        let _client_left = client.write_all(answer.as_bytes()).await;
        return;
    }
    let line = head.lines().next().unwrap_or_default();
    let how = tricks
        .spoilt
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
    let attach = path.contains("/attach");
    // One call for each connection, so that each is seen.
    let head = if attach { head } else { head.replacen("\r\n", "\r\nConnection: close\r\n", 1) };
    let mut docker = UnixStream::connect(Engine::default_socket()).await.unwrap();
    docker.write_all(head.as_bytes()).await.unwrap();
    if let Some(how) = how {
        let (mut asked, mut body) = (docker.split(), client.split().0);
        let mut answer = [0; 64 * 1024];
        // The body of the request is still to come.
        tokio::select! {
            _ = asked.0.read(&mut answer) => {}
            _ = copy(&mut body, &mut asked.1) => {}
        }
        if let How::DoneAndFailed = how {
            let _client_left = client.write_all(FAILED.as_bytes()).await;
        }
        return;
    }
    let mut cut = tricks.cut.subscribe();
    let how = if attach { *tricks.stream.lock().unwrap() } else { Stream::AsItComes };
    let copied = async {
        match how {
            Stream::AsItComes => drop(copy_bidirectional(&mut client, &mut docker).await),
            Stream::Endless => {
                let _copied = copy(&mut docker, &mut client).await;
                std::future::pending::<()>().await;
            }
            Stream::Slow(pause) => {
                let mut piece = [0; 1024];
                while let Ok(read @ 1..) = docker.read(&mut piece).await {
                    tokio::time::sleep(pause).await;
                    if client.write_all(&piece[..read]).await.is_err() {
                        break;
                    }
                }
            }
        }
    };
    tokio::select! {
        () = copied => {}
        _ = down.wait_for(|down| *down), if !attach => {}
        _ = cut.changed(), if attach => {}
    }
}

/// A request up to its body. It may come in any number of pieces.
async fn head(client: &mut UnixStream) -> Option<String> {
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"\r\n\r\n") {
        bytes.push(client.read_u8().await.ok()?);
    }
    String::from_utf8(bytes).ok()
}

/// What Docker itself says about a container that there is.
async fn inspect(path: &str) -> Option<Value> {
    let mut docker = UnixStream::connect(Engine::default_socket()).await.unwrap();
    docker.write_all(format!("GET {path} HTTP/1.0\r\nHost: docker\r\n\r\n").as_bytes()).await.unwrap();
    let mut answer = String::new();
    docker.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    head.split(' ').nth(1).filter(|status| *status == "200").map(|_| serde_json::from_str(body).unwrap())
}
