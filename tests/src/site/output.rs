//! A job's output as it can be had, and what the programs that carry it need for that.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Write},
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context, Result, anyhow, ensure};

use super::{Site, tools::PATIENCE};

/// How often memory is looked at.
const SAMPLE: Duration = Duration::from_millis(20);

impl Site {
    /// The pid of the scaler.
    ///
    /// # Errors
    /// When it does not run.
    pub fn scaler_pid(&self) -> Result<u32> {
        Ok(self.scaler.as_ref().context("the scaler runs")?.id())
    }

    /// A job's log as `GET …/log` has it, from its first byte until it is closed. Answers how long it is.
    ///
    /// # Errors
    /// When nobody answers, or the log cannot be written on.
    pub fn copy_log(&self, job: &str, to: &mut impl Write) -> Result<u64> {
        let token = fs::read_to_string(self.state().join("admin.token"))?;
        let mut offset = 0;
        loop {
            let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
            stream.set_read_timeout(Some(PATIENCE))?;
            let path = format!("/api/v1/jobs/{job}/log?offset={offset}&follow=1");
            let head = format!("Host: x\r\nConnection: close\r\nAuthorization: Bearer {}", token.trim());
            write!(stream, "GET {path} HTTP/1.1\r\n{head}\r\n\r\n")?;
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer)?;
            let body = answer.windows(4).position(|four| four == b"\r\n\r\n").context("a head")? + 4;
            let head = String::from_utf8_lossy(&answer[..body]).to_lowercase();
            ensure!(head.starts_with("http/1.1 200"), "{head}");
            let size = head.split("pilotlight-log-size: ").nth(1).and_then(|rest| rest.split_whitespace().next());
            to.write_all(&answer[body..])?;
            offset += u64::try_from(answer.len() - body)?;
            if head.contains("pilotlight-log-state: closed") && size == Some(&offset.to_string()) {
                return Ok(offset);
            }
        }
    }
}

/// The most memory that a process has had resident so far, bytes; zero when it is gone.
#[must_use]
pub fn peak_rss(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()).unwrap_or(0) * 1024
}

/// Looks at the memory of processes until they end or it is asked for the result.
#[derive(Debug)]
pub struct Peaks {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<BTreeMap<&'static str, u64>>,
}

impl Peaks {
    /// Begins to look.
    #[must_use]
    pub fn of(pids: BTreeMap<&'static str, u32>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut peaks = BTreeMap::new();
            loop {
                let last = stopped.load(Ordering::Relaxed);
                for (name, pid) in &pids {
                    let peak = peaks.entry(*name).or_insert(0);
                    *peak = peak_rss(*pid).max(*peak);
                }
                if last {
                    return peaks;
                }
                std::thread::sleep(SAMPLE);
            }
        });
        Self { stop, thread }
    }

    /// The most that each had, bytes.
    ///
    /// # Errors
    /// When the looking failed.
    pub fn end(self) -> Result<BTreeMap<&'static str, u64>> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_panic| anyhow!("memory was not looked at"))
    }
}
