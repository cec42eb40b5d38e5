//! The three calls that the attach process makes, by hand and blocking: a client library would be most of its memory.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::Duration,
};

use jiff::Timestamp;
use serde::Deserialize;

/// A version that every Docker from 20.10 on speaks, newer ones included.
const VERSION: &str = "v1.41";

/// How long a plain call may take.
const CALL: Duration = Duration::from_secs(10);

/// An answer about one container is a few KiB.
const MAX_ANSWER: u64 = 4 * 1024 * 1024;

/// Docker behind its socket.
#[derive(Debug)]
pub(super) struct Api {
    socket: PathBuf,
}

/// How a container is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// There is none.
    Absent,
    /// Made, or running with a first process of that id.
    Alive { pid: i32 },
    /// It has ended, then.
    Over { at: Option<Timestamp> },
}

impl Api {
    pub(super) fn new(socket: &Path) -> Self {
        Self { socket: socket.to_owned() }
    }

    /// Attaches to stdout and stderr; reads time out after `glance`.
    pub(super) fn attach(&self, container: &str, glance: Duration) -> io::Result<BufReader<UnixStream>> {
        let query = format!("/containers/{container}/attach?stream=1&stdout=1&stderr=1");
        let (status, reader) = self.send("POST", &query, "Connection: Upgrade\r\nUpgrade: tcp\r\n")?;
        match status {
            101 | 200 => {}
            other => return Err(io::Error::other(format!("Docker answers {other}"))),
        }
        reader.get_ref().set_read_timeout(Some(glance))?;
        Ok(reader)
    }

    pub(super) fn kill(&self, container: &str) -> io::Result<()> {
        match self.send("POST", &format!("/containers/{container}/kill"), "Connection: close\r\n")?.0 {
            // 409: it is not running any more.
            204 | 404 | 409 => Ok(()),
            other => Err(io::Error::other(format!("Docker answers {other}"))),
        }
    }

    /// Whether the container is known to be gone. A Docker that does not answer says nothing.
    pub(super) fn is_removed(&self, container: &str) -> bool {
        self.look(container).is_ok_and(|look| look == Look::Absent)
    }

    /// Looks at the container.
    pub(super) fn look(&self, container: &str) -> io::Result<Look> {
        let (status, reader) = self.send("GET", &format!("/containers/{container}/json"), "Connection: close\r\n")?;
        match status {
            200 => Ok(judge(serde_json::from_reader(reader.take(MAX_ANSWER))?)),
            404 => Ok(Look::Absent),
            other => Err(io::Error::other(format!("Docker answers {other}"))),
        }
    }

    /// Sends a request without a body and reads the head of the answer.
    fn send(&self, method: &str, path: &str, headers: &str) -> io::Result<(u16, BufReader<UnixStream>)> {
        let mut stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(CALL))?;
        stream.set_write_timeout(Some(CALL))?;
        // To a GET in the older version of the protocol Docker answers in one piece, not in chunks.
        let (minor, length) = if method == "POST" { (1, "Content-Length: 0\r\n") } else { (0, "") };
        let head = format!("{method} /{VERSION}{path} HTTP/1.{minor}\r\nHost: docker\r\n{headers}{length}\r\n");
        stream.write_all(head.as_bytes())?;
        let mut reader = BufReader::with_capacity(super::BUFFER, stream);
        let mut line = String::new();
        // A head of more than 64 KiB is not Docker's.
        let mut head = reader.by_ref().take(64 * 1024);
        head.read_line(&mut line)?;
        let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
        let status = status.ok_or_else(|| io::Error::other(format!("not an HTTP answer: {line:?}")))?;
        loop {
            line.clear();
            if head.read_line(&mut line)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if line == "\r\n" {
                return Ok((status, reader));
            }
        }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Container {
    state: State,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct State {
    status: String,
    pid: i32,
    finished_at: String,
}

fn judge(container: Container) -> Look {
    let State { status, pid, finished_at } = container.state;
    match status.as_str() {
        "exited" | "dead" | "removing" => Look::Over { at: finished_at.parse().ok() },
        _ => Look::Alive { pid },
    }
}

/// Whether a container's first process is alive as far as can be seen from here, and not in the middle of its exit:
/// that is when its streams end.
pub(super) fn holds_its_streams(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat_is_alive(&stat))
}

/// Whether there is such a process as far as can be seen from here.
pub(super) fn is_seen(pid: i32) -> bool {
    Path::new("/proc").join(pid.to_string()).exists()
}

fn stat_is_alive(stat: &str) -> bool {
    /// The kernel's `PF_EXITING`.
    const EXITING: u64 = 0x4;
    // The name in parentheses may hold anything. Behind it: the state first, the flags seventh.
    let Some((_, rest)) = stat.rsplit_once(')') else { return false };
    let mut fields = rest.split_ascii_whitespace();
    let dead = matches!(fields.next(), None | Some("Z" | "X" | "x"));
    let flags = fields.nth(5).and_then(|flags| flags.parse::<u64>().ok());
    !dead && flags.is_some_and(|flags| flags & EXITING == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_holds_its_streams_until_it_begins_to_exit() {
        let stat = |state: &str, flags: u32| format!("7 (a ) Z b) {state} 1 7 7 0 -1 {flags} 0 0 0 0");
        assert!(stat_is_alive(&stat("S", 0x0040_0100)));
        for gone in [stat("Z", 0x0040_0100), stat("R", 0x0040_0104), String::new(), "7 (x) S 1".to_owned()] {
            assert!(!stat_is_alive(&gone), "{gone}");
        }
        assert!(holds_its_streams(i32::try_from(std::process::id()).unwrap()));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        while holds_its_streams(pid) {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(!holds_its_streams(pid));
    }

    #[test]
    fn only_an_end_is_an_end() {
        let look = |status: &str| {
            let state = format!(r#"{{"Status":"{status}","Pid":12,"FinishedAt":"2026-01-01T00:00:00.5Z","More":[]}}"#);
            judge(serde_json::from_str(&format!(r#"{{"Id":"x","State":{state}}}"#)).unwrap())
        };
        for status in ["created", "running", "paused", "restarting", "another"] {
            assert_eq!(look(status), Look::Alive { pid: 12 }, "{status}");
        }
        for status in ["exited", "dead", "removing"] {
            assert_eq!(look(status), Look::Over { at: Some("2026-01-01T00:00:00.5Z".parse().unwrap()) });
        }
    }
}
