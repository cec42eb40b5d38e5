//! The three calls that the attach process makes, by hand and blocking: a client library would be most of its memory.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::Deserialize;

/// A version that every Docker from 20.10 on speaks, newer ones included.
const VERSION: &str = "v1.41";

/// How long a plain call may take.
const CALL: Duration = Duration::from_secs(10);

/// The longest answer that is read, bytes.
const MAX_ANSWER: u64 = 4 * 1024 * 1024;

/// How a container is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Running, paused, or about to be started.
    Running,
    /// It has ended.
    Over,
    /// It is not there any more.
    Removed,
}

/// Docker behind its socket.
#[derive(Debug)]
pub(super) struct Api {
    socket: PathBuf,
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

    /// Looks at the container. A Docker that does not answer says nothing.
    pub(super) fn state(&self, container: &str) -> io::Result<State> {
        let path = format!("/containers/{container}/json");
        let (status, reader) = self.send("GET", &path, "Connection: close\r\n")?;
        match status {
            200 => {}
            404 => return Ok(State::Removed),
            other => return Err(io::Error::other(format!("Docker answers {other}"))),
        }
        let mut body = Vec::new();
        reader.take(MAX_ANSWER).read_to_end(&mut body)?;
        state(&body)
    }

    /// Sends a request without a body and reads the head of the answer.
    fn send(&self, method: &str, path: &str, headers: &str) -> io::Result<(u16, BufReader<UnixStream>)> {
        let mut stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(CALL))?;
        stream.set_write_timeout(Some(CALL))?;
        let length = if method == "POST" { "Content-Length: 0\r\n" } else { "" };
        // An answer to the older version comes in one piece and ends with the connection.
        let http = if method == "POST" { "1.1" } else { "1.0" };
        write!(stream, "{method} /{VERSION}{path} HTTP/{http}\r\nHost: docker\r\n{headers}{length}\r\n")?;
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
struct Inspected {
    state: InspectedState,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct InspectedState {
    status: String,
}

fn state(body: &[u8]) -> io::Result<State> {
    let Inspected { state } = serde_json::from_slice(body)?;
    Ok(match state.status.as_str() {
        "exited" | "dead" | "removing" => State::Over,
        _ => State::Running,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_state_that_says_so_is_an_end() {
        let look = |status: &str| {
            state(format!(r#"{{"Id":"x","State":{{"Status":"{status}"}},"Args":["exited"]}}"#).as_bytes())
        };
        for status in ["exited", "dead", "removing"] {
            assert_eq!(look(status).unwrap(), State::Over);
        }
        for status in ["created", "running", "paused", "restarting", "stopping"] {
            assert_eq!(look(status).unwrap(), State::Running);
        }
        assert!(state(b"<html>").is_err());
    }
}
