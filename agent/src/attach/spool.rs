//! The spool: what the job wrote, as it wrote it, within the limit of its log.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
    time::Duration,
};

use pilotlight_runtime::{failpoint, units::Size};

use crate::disk::{FULL_DISK_RETRY, full_disk_patience};

/// What is left free on the disk: room for the agent to say what happened, and for whatever else runs on the machine.
const HEADROOM: u64 = 8 * 1024 * 1024;

/// How much is written before the disk is asked again how full it is.
const ASK_AFTER: u64 = 2 * 1024 * 1024;

/// The spool of one job, open for appending.
#[derive(Debug)]
pub(super) struct Spool {
    file: File,
    size: u64,
    max: u64,
    /// Bytes dropped at the limit.
    over: u64,
    /// Bytes dropped because the disk was full, and not told yet.
    lost: u64,
    /// Whether bytes were ever dropped because the disk was full.
    dropped: bool,
    /// Bytes that may be written before the disk is asked again.
    room: u64,
    /// How long the job still waits for a full disk.
    patience: Duration,
    ends_line: bool,
}

impl Spool {
    pub(super) fn open(path: &Path, max: u64) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).read(true).mode(0o600).open(path)?;
        let size = file.metadata()?.len();
        let mut last = [b'\n'];
        if size > 0 {
            file.read_exact_at(&mut last, size - 1)?;
        }
        let patience = full_disk_patience();
        Ok(Self { patience, file, size, max, over: 0, lost: 0, dropped: false, room: 0, ends_line: last == [b'\n'] })
    }

    /// Appends what the job wrote; past the limit it is counted and dropped.
    pub(super) fn append(&mut self, bytes: &[u8]) {
        failpoint!("attach.output.unspooled");
        if self.over > 0 {
            self.over += bytes.len() as u64;
            return;
        }
        let room = usize::try_from(self.max.saturating_sub(self.size)).unwrap_or(usize::MAX);
        let (kept, over) = bytes.split_at(room.min(bytes.len()));
        self.write(kept);
        failpoint!("attach.output.spooled");
        if !over.is_empty() {
            self.notice(&format!("the log has reached max_log ({}); what follows is dropped", Size(self.max)));
            self.over = over.len() as u64;
        }
    }

    /// A line of ours, on a line of its own.
    pub(super) fn notice(&mut self, text: &str) {
        let line = self.line(text);
        self.write(line.as_bytes());
    }

    /// As [`Spool::notice`], at once and whole or not at all.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(super) fn notice_at_once(&mut self, text: &str) -> io::Result<()> {
        let line = self.line(text);
        self.file.write_all(line.as_bytes()).inspect_err(|_| {
            if let Err(error) = self.file.set_len(self.size) {
                tracing::warn!(%error, "half a notice stays in the spool");
            }
        })?;
        self.size += line.len() as u64;
        self.ends_line = true;
        Ok(())
    }

    fn line(&self, text: &str) -> String {
        let begin = if self.ends_line { "" } else { "\n" };
        format!("{begin}[pilotlight] {text}\n")
    }

    /// Says what was dropped, now that it is known. Returns how many bytes were dropped without a word because the disk
    /// is still full; nothing when none were ever dropped for that.
    pub(super) fn finish(&mut self) -> Option<u64> {
        if self.over > 0 {
            self.notice(&format!("{} bytes were dropped past max_log", self.over));
        }
        self.tell_lost();
        failpoint!("attach.end.unmarked");
        self.dropped.then_some(self.lost)
    }

    fn write(&mut self, bytes: &[u8]) {
        // Not in the headroom: what is said there would only be followed by the next wait.
        if self.lost > 0 && self.ask_for_room().is_ok_and(|room| room > 0) {
            self.tell_lost();
        }
        self.write_patiently(bytes);
    }

    /// Writes, and waits for a full disk: the job waits too, its pipe is full. When it has waited for long enough, what
    /// there is no room for is counted and dropped, until there is room again.
    fn write_patiently(&mut self, mut bytes: &[u8]) {
        let mut waits = false;
        while !bytes.is_empty() {
            match self.write_some(bytes) {
                Ok(written) => {
                    self.size += written as u64;
                    self.ends_line = bytes[..written].last().map_or(self.ends_line, |last| *last == b'\n');
                    bytes = &bytes[written..];
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if self.lost == 0 && !self.patience.is_zero() => {
                    if !std::mem::replace(&mut waits, true) {
                        tracing::warn!(%error, "the spool cannot be written; the job waits");
                    }
                    std::thread::sleep(FULL_DISK_RETRY);
                    self.patience = self.patience.saturating_sub(FULL_DISK_RETRY);
                }
                Err(error) => {
                    if self.lost == 0 {
                        tracing::warn!(%error, "the spool cannot be written; output is dropped");
                    }
                    self.lost += bytes.len() as u64;
                    self.dropped = true;
                    return;
                }
            }
        }
    }

    /// Writes as much as leaves the disk its headroom.
    fn write_some(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.room < bytes.len() as u64 {
            self.ask_for_room()?;
        }
        let len = usize::try_from(self.room).unwrap_or(usize::MAX).min(bytes.len());
        if len == 0 {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let written = self.file.write(&bytes[..len])?;
        self.room -= written as u64;
        Ok(written)
    }

    /// Asks how much may be written. A disk that has plenty is waited for anew when it is full again.
    fn ask_for_room(&mut self) -> io::Result<u64> {
        let disk = rustix::fs::fstatvfs(&self.file)?;
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        self.room = free.saturating_sub(HEADROOM).min(ASK_AFTER);
        if self.room == ASK_AFTER {
            self.patience = full_disk_patience();
        }
        Ok(self.room)
    }

    fn tell_lost(&mut self) {
        if self.lost > 0 && self.notice_at_once(&dropped(self.lost)).is_ok() {
            self.lost = 0;
        }
    }
}

/// What is said of bytes for which there was no room.
pub(super) fn dropped(lost: u64) -> String {
    format!("{lost} bytes were dropped here: the machine's disk was full")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_bytes_as_they_are_and_stops_at_the_limit_with_a_word() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("spool");
        let mut spool = Spool::open(&path, 10).unwrap();
        spool.append(b"ab\0\xff\n");
        spool.append(b"1234567890");
        spool.append(b"more");
        spool.finish();
        let text = std::fs::read(&path).unwrap();
        assert!(text.starts_with(b"ab\0\xff\n12345\n[pilotlight] the log has reached max_log (10 B)"), "{text:?}");
        assert!(text.ends_with(b"[pilotlight] 9 bytes were dropped past max_log\n"));
    }

    #[test]
    fn a_notice_stands_on_a_line_of_its_own_after_a_restart_too() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("spool");
        Spool::open(&path, 100).unwrap().append(b"half a line");
        let mut again = Spool::open(&path, 1000).unwrap();
        again.notice("gap");
        again.append(b"rest");
        assert_eq!(std::fs::read(&path).unwrap(), b"half a line\n[pilotlight] gap\nrest");
    }

    #[test]
    fn a_disk_that_stays_full_costs_bytes_but_says_how_many() {
        let mut spool = Spool::open(Path::new("/dev/full"), u64::MAX).unwrap();
        spool.lost = 1;
        spool.write_patiently(b"gone");
        spool.write_patiently(b"to");
        assert_eq!((spool.lost, spool.size), (7, 0));
        assert_eq!(spool.finish(), Some(7), "there is no room for a word either");
    }
}
