//! A network of a test's own, whose packets can be lost (netfilter, root).
//!
//! The test's thread moves into a network namespace without a name, and so does everything that it starts: scaler,
//! agents and clients share one loopback device that nobody else has. Docker is reached by its Unix socket, so jobs
//! run all the same. Agents dial 127.0.0.1, clients [`CLIENTS`]: connection tracking tells whose packet it is.
//! Nothing has to be cleaned up: the namespace goes with its last process, and its rules go with it.

use std::{
    fs::{self, File},
    io::Write,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// The address by which clients reach the scaler, see [`crate::site::Site::clients_dial`].
pub const CLIENTS: &str = "127.0.0.2";

/// Whose packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// Between agents and the scaler.
    Agents,
    /// Between clients and the scaler.
    Clients,
}

/// Which packets are lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Those to the scaler.
    Requests,
    /// Those from the scaler, acknowledgements too.
    Replies,
    /// Those from the scaler that carry data: it takes every request in, and no answer ever comes.
    Answers,
    /// None, but both ends are told that the connection is reset.
    Resets,
    /// All.
    Everything,
}

/// The calling thread's network, until it is dropped.
#[derive(Debug)]
pub struct Net {
    before: File,
    table: String,
}

impl Net {
    /// Moves the calling thread, and what it starts from now on, into a network of its own.
    ///
    /// # Errors
    /// When this is not root, or `unshare`, `ip` or `nft` is missing: these tests need them and do not skip.
    pub fn enter() -> Result<Self> {
        let before = File::open("/proc/thread-self/ns/net")?;
        // Somebody has to be in a new namespace until this thread is.
        let mut holder = Command::new("unshare")
            .args(["--net", "cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("unshare (util-linux)")?;
        let entered = (|| {
            // What comes back tells that the namespace is there.
            let (stdin, stdout) = (holder.stdin.as_mut(), holder.stdout.as_mut());
            stdin.context("stdin")?.write_all(b"x")?;
            let there = std::io::Read::read(stdout.context("stdout")?, &mut [0])?;
            ensure!(there == 1, "no network namespace can be made: this test needs root");
            let new = File::open(format!("/proc/{}/ns/net", holder.id()))?;
            Ok(move_into_link_name_space(std::os::fd::AsFd::as_fd(&new), Some(LinkNameSpaceType::Network))?)
        })();
        let _ended = holder.kill();
        let _reaped = holder.wait();
        entered?;
        let net = Self { before, table: format!("plt-{}", std::process::id()) };
        run(Command::new("ip").args(["link", "set", "lo", "up"]), "")?;
        // Data that nobody acknowledges is given up after half a minute here instead of a quarter of an hour.
        fs::write("/proc/sys/net/ipv4/tcp_retries2", "6").context("net.ipv4.tcp_retries2")?;
        let table = &net.table;
        // Docker needs the same parts of the kernel, so they are there.
        net.nft(&format!(
            "table inet {table} {{\n\
             chain dial {{ type nat hook output priority -100; ip daddr {CLIENTS} meta l4proto tcp dnat ip to 127.0.0.1; }}\n\
             chain cut {{ type filter hook input priority 0; }}\n}}"
        ))?;
        Ok(net)
    }

    /// Loses packets from now on, of connections that are there and of new ones.
    ///
    /// # Errors
    /// When `nft` refuses.
    pub fn cut(&self, whose: Whose, cut: Cut) -> Result<()> {
        let dialled = match whose {
            Whose::Agents => "127.0.0.1",
            Whose::Clients => CLIENTS,
        };
        let lost: &[&str] = match cut {
            Cut::Requests => &["ct direction original drop"],
            Cut::Replies => &["ct direction reply drop"],
            // Longer than the headers of a packet without data.
            Cut::Answers => &["ct direction reply meta length > 100 drop"],
            Cut::Resets => &["reject with tcp reset"],
            Cut::Everything => &["drop"],
        };
        for lost in lost {
            self.nft(&format!(
                "add rule inet {} cut meta l4proto tcp ct original ip daddr {dialled} {lost}",
                self.table
            ))?;
        }
        Ok(())
    }

    /// Loses nothing any more.
    ///
    /// # Errors
    /// When `nft` refuses.
    pub fn heal(&self) -> Result<()> {
        self.nft(&format!("flush chain inet {} cut", self.table))
    }

    /// Connections that the one who listens on `port` believes to be up.
    ///
    /// # Errors
    /// When the kernel does not say.
    pub fn accepted(&self, port: u16) -> Result<usize> {
        const ESTABLISHED: &str = "01";
        let table = fs::read_to_string("/proc/thread-self/net/tcp")?;
        let local = format!(":{port:04X}");
        let is = |line: &str| {
            let mut words = line.split_whitespace().skip(1);
            words.next().is_some_and(|at| at.ends_with(&local)) && words.nth(1) == Some(ESTABLISHED)
        };
        Ok(table.lines().filter(|line| is(line)).count())
    }

    fn nft(&self, rules: &str) -> Result<()> {
        run(Command::new("nft").args(["-f", "-"]), rules)
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        let before = std::os::fd::AsFd::as_fd(&self.before);
        let _stays_where_it_is = move_into_link_name_space(before, Some(LinkNameSpaceType::Network));
    }
}

fn run(command: &mut Command, input: &str) -> Result<()> {
    let what = format!("{command:?}");
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("{what}: packaging/scripts/tools.sh installs what these tests need"))?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(input.as_bytes())?;
    }
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "{what}: {}: {}", input, String::from_utf8_lossy(&output.stderr));
    Ok(())
}
