//! What a job writes, byte for byte, within its bound and with little memory.

use std::fs;

use pilotlight_wire::Verdict;
use tokio::time::Instant;

use crate::rig::{Rig, finished};

#[tokio::test]
async fn bytes_are_kept_as_they_are_in_the_order_they_came() {
    let rig = Rig::new().await;
    let script = r"printf 'a\0b\377\376\r\n'; sleep 0.3; printf 'to stderr\n' >&2; sleep 0.3; printf 'no end'";
    let job = rig.begin(&rig.script(script));
    let spool = job.dir.spool();
    assert_eq!(finished(job.end().await).verdict, Verdict::Success);
    assert_eq!(fs::read(spool).unwrap(), b"a\0b\xff\xfe\r\nto stderr\nno end");
    rig.finish().await;
}

#[tokio::test]
async fn much_output_comes_whole_and_is_not_held_in_memory() {
    const SIZE: u64 = 100 * 1024 * 1024;
    let rig = Rig::new().await;
    let script = format!("yes {} | head -c {SIZE}", "x".repeat(99));
    let began = Instant::now();
    let mut job = rig.begin(&rig.script(&script));
    job.started().await;
    let (attach, spool) = (job.attach().as_raw_nonzero(), job.dir.spool());
    let mut peak = 0;
    let end = {
        let mut end = std::pin::pin!(job.end());
        loop {
            tokio::select! {
                end = &mut end => break finished(end),
                () = tokio::time::sleep(std::time::Duration::from_millis(20)) => {
                    let status = fs::read_to_string(format!("/proc/{attach}/status")).unwrap_or_default();
                    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
                    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
                    peak = peak.max(kib.unwrap_or(0));
                }
            }
        }
    };
    assert_eq!((end.verdict, end.gap), (Verdict::Success, false));
    assert_eq!(fs::metadata(&spool).unwrap().len(), SIZE);
    println!("100 MiB in {:?} from begin to end, attach process at most {peak} KiB", began.elapsed());
    assert!((1..40 * 1024).contains(&peak), "{peak} KiB");
    let bytes = fs::read(&spool).unwrap();
    assert!(bytes.chunks(100).all(|line| line.starts_with(b"xxx") && line.ends_with(b"x\n")));
    rig.finish().await;
}

#[tokio::test]
async fn past_the_limit_output_is_counted_and_dropped_with_a_word() {
    let rig = Rig::new().await;
    let mut start = rig.script("echo 123456789; echo 123456789; seq 1000 | head -c 3000");
    start.max_log_bytes = 15;
    let (text, end) = rig.output(&start).await;
    assert_eq!((end.verdict, end.gap), (Verdict::Success, false));
    assert!(text.starts_with("123456789\n12345\n[pilotlight] the log has reached max_log"), "{text}");
    assert!(text.ends_with("[pilotlight] 3005 bytes were dropped past max_log\n"), "{text}");
    rig.finish().await;
}

#[tokio::test]
async fn what_is_written_in_the_moment_of_the_exit_is_never_lost() {
    let rig = Rig::new().await;
    for n in 0..10 {
        let jobs = [
            // The last write is the last thing before the exit: by the first process, by a child, through a pipe.
            (format!("echo last {n}"), format!("last {n}\n")),
            (format!("exec printf 'last %s' {n}"), format!("last {n}")),
            (format!("(echo last {n} >&2)"), format!("last {n}\n")),
            (format!("head -c 65536 /dev/zero | tr '\\0' {n}"), n.to_string().repeat(65536)),
            (format!("echo last {n}; kill -KILL $$"), format!("last {n}\n")),
        ];
        for (script, want) in jobs {
            let (text, end) = rig.output(&rig.script(&script)).await;
            assert!(text == want && !end.gap, "{script}: {text:?}, {end:?}");
        }
    }
    rig.finish().await;
}
