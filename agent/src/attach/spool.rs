//! The spool: what the job wrote, as it wrote it, within the limit of its log.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
    time::Duration,
};

use pilotlight_runtime::{failpoint, units::Size};

/// How long the job waits for a full disk before its output is dropped.
const FULL_DISK: Duration = Duration::from_secs(600);

/// How often a full disk is tried again.
const RETRY: Duration = Duration::from_millis(500);

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
        Ok(Self { file, size, max, over: 0, lost: 0, ends_line: last == [b'\n'] })
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

    /// As [`Spool::notice`], without waiting for a full disk.
    pub(super) fn notice_at_once(&mut self, text: &str) {
        let line = self.line(text);
        self.write_patiently(line.as_bytes(), Duration::ZERO);
    }

    fn line(&self, text: &str) -> String {
        let begin = if self.ends_line { "" } else { "\n" };
        format!("{begin}[pilotlight] {text}\n")
    }

    /// Says what was dropped, now that it is known.
    pub(super) fn finish(&mut self) {
        if self.over > 0 {
            self.notice(&format!("{} bytes were dropped past max_log", self.over));
        }
        self.tell_lost();
        failpoint!("attach.end.unmarked");
    }

    fn write(&mut self, bytes: &[u8]) {
        if self.lost > 0 {
            self.tell_lost();
        }
        self.write_patiently(bytes, FULL_DISK);
    }

    /// Writes, and waits for a full disk: the job waits too, its pipe is full.
    fn write_patiently(&mut self, mut bytes: &[u8], patience: Duration) {
        let mut waited = Duration::ZERO;
        while !bytes.is_empty() {
            // A disk that was full for so long is tried once a write.
            let patience = if self.lost > 0 { Duration::ZERO } else { patience };
            match self.file.write(bytes) {
                Ok(written) => {
                    self.size += written as u64;
                    self.ends_line = bytes[..written].last().map_or(self.ends_line, |last| *last == b'\n');
                    bytes = &bytes[written..];
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if waited < patience => {
                    if waited.is_zero() {
                        tracing::warn!(%error, "the spool cannot be written; the job waits");
                    }
                    std::thread::sleep(RETRY);
                    waited += RETRY;
                }
                Err(error) => {
                    tracing::warn!(%error, bytes = bytes.len(), "output dropped");
                    self.lost += bytes.len() as u64;
                    return;
                }
            }
        }
    }

    fn tell_lost(&mut self) {
        if self.lost == 0 {
            return;
        }
        let lost = std::mem::take(&mut self.lost);
        let before = self.size;
        self.notice_at_once(&format!("{lost} bytes were dropped here: the machine's disk was full"));
        if self.size == before {
            self.lost = lost;
        }
    }
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
        spool.write_patiently(b"gone", Duration::ZERO);
        spool.write_patiently(b"too", Duration::ZERO);
        assert_eq!((spool.lost, spool.size), (7, 0));
    }
}
