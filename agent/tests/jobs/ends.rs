//! How jobs end by themselves, and what they are given.

use pilotlight_agent::job::End;
use pilotlight_wire::{DirectJob, Verdict, Volume};

use crate::rig::{Rig, finished, image, spec};

#[tokio::test]
async fn c32_exit_codes_are_the_jobs_own() {
    let rig = Rig::new().await;
    for want in [0, 1, 2, 22, 126, 127, 137, 143, 255] {
        let end = rig.run(&rig.script(&format!("exit {want}"))).await;
        assert_eq!(end.code, Some(want), "{end:?}");
        assert_eq!(end.verdict, if want == 0 { Verdict::Success } else { Verdict::Failure });
        assert!(!end.gap);
    }
    rig.finish().await;
}

#[tokio::test]
async fn use_is_measured_from_start_to_exit() {
    let rig = Rig::new().await;
    // By its own count, in hundredths: on a busy machine two seconds may hold little of it.
    let script = "x=$(head -c 40000000 /dev/zero | tr '\\0' x); \
                  until read -ra stat < /proc/$$/stat && [ ${stat[13]} -ge 100 ]; do for i in {1..9999}; do :; done; done";
    let usage = rig.run(&rig.script(script)).await.usage.unwrap();
    assert!((0.9..60.0).contains(&usage.wall_seconds), "{usage:?}");
    assert!((0.9..30.0).contains(&usage.cpu_seconds.unwrap()), "{usage:?}");
    assert!(usage.memory_peak_bytes.unwrap() > 40_000_000, "{usage:?}");
    assert!(!usage.out_of_memory);
    rig.finish().await;
}

#[tokio::test]
async fn c32_out_of_memory_is_told_apart() {
    let mut rig = Rig::new().await;
    rig.context.share.memory_bytes = (256 + 64) * 1024 * 1024;
    let end = rig.run(&rig.script("exec tail /dev/zero")).await;
    assert_eq!((end.verdict, end.code), (Verdict::Failure, Some(137)));
    assert!(end.reason.contains("out of memory") && end.reason.contains("64.0 MiB"), "{}", end.reason);
    assert!(end.usage.unwrap().out_of_memory);
    rig.finish().await;
}

#[tokio::test]
async fn c22_shared_memory_is_half_of_the_jobs_memory_share() {
    let mut rig = Rig::new().await;
    for (machine, share) in [(1024, 768), (384, 128)] {
        rig.context.share.memory_bytes = machine << 20;
        let (text, end) = rig.output(&rig.script("df -B1 --output=size /dev/shm | tail -1")).await;
        assert_eq!((text.trim(), end.code), ((share << 19).to_string().as_str(), Some(0)), "{end:?}");
    }
    rig.context.share.memory_bytes = 1024 << 20;
    // Four times Docker's own 64 MiB; and beyond the half it is a full disk, not a dead machine.
    let script = "head -c 256M /dev/zero > /dev/shm/x && stat -c %s /dev/shm/x; head -c 256M /dev/zero > /dev/shm/y";
    let (text, end) = rig.output(&rig.script(script)).await;
    assert!(text.starts_with("268435456\n") && text.contains("No space left"), "{text}");
    assert_eq!((end.verdict, end.code), (Verdict::Failure, Some(1)), "{end:?}");
    rig.finish().await;
}

#[tokio::test]
async fn c31_environment_arrives_byte_for_byte() {
    let rig = Rig::new().await;
    let long: String = ('!'..='~').cycle().take(100 * 1024).collect();
    for value in ["a b", "l1\nl2\n", "'\"\\$(id)`id`", "a=b", "", "🔥\u{7f}\t\r\n\n", &long] {
        let mut start = rig.script("printf %s \"$VALUE\"");
        spec(&mut start).env.insert("VALUE".to_owned(), value.to_owned());
        let (text, end) = rig.output(&start).await;
        assert_eq!(end.verdict, Verdict::Success, "{end:?}");
        assert_eq!(text, value);
    }
    rig.finish().await;
}

#[tokio::test]
async fn user_directory_and_entrypoint_are_the_jobs_choice() {
    let rig = Rig::new().await;
    let mut start = rig.start(DirectJob {
        entrypoint: Some(vec!["bash".to_owned(), "-c".to_owned()]),
        command: vec!["id -u; id -g; pwd; cat /proc/self/status | grep -c NoNewPrivs:.1".to_owned()],
        user: Some("1234:99".to_owned()),
        workdir: Some("/var/tmp/deep".to_owned()),
        ..image("pilotlight/host")
    });
    assert_eq!(rig.output(&start).await.0, "1234\n99\n/var/tmp/deep\n1\n");
    start =
        rig.script("touch /usr/x /bin/x 2>&1 | grep -c Read-only; echo x > /tmp/x && echo x > /root/x && cat /root/x");
    assert_eq!(rig.output(&start).await.0, "2\nx\n");
    start = rig.script("ls /var/run/docker.sock /run/docker.sock; grep CapEff /proc/1/status");
    let text = rig.output(&start).await.0;
    assert!(!text.contains("\n/"), "{text}");
    assert!(text.contains("CapEff:\t00000000a80425fb"), "Docker's own set and no more: {text}");
    rig.finish().await;
}

#[tokio::test]
async fn what_no_container_can_be_given_is_the_jobs_fault_and_has_no_exit_code() {
    let mut rig = Rig::new().await;
    let wrong = |change: &dyn Fn(&mut DirectJob)| {
        let mut start = rig.script("true");
        change(spec(&mut start));
        start
    };
    let set = |name: &str, value: &str| {
        let (name, value) = (name.to_owned(), value.to_owned());
        wrong(&move |job| drop(job.env.insert(name.clone(), value.clone())))
    };
    let long = "x".repeat(128 * 1024);
    for (start, word) in [
        (wrong(&|job| job.user = Some("nosuchuser".to_owned())), "nosuchuser"),
        (wrong(&|job| job.workdir = Some("not/absolute".to_owned())), "not/absolute"),
        (wrong(&|job| job.workdir = Some("/etc/passwd".to_owned())), "/etc/passwd"),
        (wrong(&|job| job.command.push("a\0b".to_owned())), "zero byte"),
        (wrong(&|job| job.command.push(long.clone())), "131072"),
        (set("A=B", "x"), "A=B"),
        (set("", "x"), "\"\""),
        (set("A", "x\0"), "zero byte"),
        (set("LONG", &long), "LONG"),
        (wrong(&|job| job.image = "../info?x".to_owned()), "not the name of an image"),
    ] {
        let end = rig.run(&start).await;
        assert_eq!((end.verdict, end.code), (Verdict::Failure, None), "{word}: {end:?}");
        assert!(end.reason.contains(word), "{word}: {}", end.reason);
        assert_eq!(end.usage, None);
    }
    rig.context.host_image = false;
    let end = rig.run(&rig.script("true")).await;
    assert_eq!((end.verdict, end.code), (Verdict::Failure, None));
    assert!(end.reason.contains("host_image"), "{}", end.reason);
    rig.finish().await;
}

#[tokio::test]
async fn volumes_are_seen_as_the_admin_wrote_them() {
    let rig = Rig::new().await;
    let data = tempfile::tempdir().unwrap();
    std::fs::write(data.path().join("in"), "in\n").unwrap();
    let volume = |mount: &str, read_only| Volume {
        name: "data".to_owned(),
        host: data.path().to_str().unwrap().to_owned(),
        mount: mount.to_owned(),
        read_only,
    };
    let mut start = rig.script("cat /ro/in; echo out > /rw/out; echo no > /ro/no; test $? = 1");
    start.volumes = vec![volume("/ro", true), volume("/rw", false)];
    let (text, end) = rig.output(&start).await;
    // Two streams: which comes first is Docker's affair.
    assert!(text.contains("in\n") && text.contains("Read-only"), "{text}");
    assert_eq!(end.code, Some(0));
    assert_eq!(std::fs::read_to_string(data.path().join("out")).unwrap(), "out\n");

    let mut start = rig.script("true");
    start.volumes = vec![Volume { host: "/no/such/place".to_owned(), ..volume("/x", true) }];
    let end = rig.begin(&start).end().await;
    assert!(matches!(&end, End::Refused { reason } if reason.contains("/no/such/place")), "{end:?}");
    rig.finish().await;
}

#[tokio::test]
async fn an_end_is_told_again_as_it_was() {
    let rig = Rig::new().await;
    let start = rig.script("echo once; exit 5");
    let first = rig.begin(&start).end().await;
    assert_eq!(finished(first.clone()).code, Some(5));
    assert_eq!(rig.begin(&start).end().await, first);
    let dir = rig.begin(&start).dir;
    assert_eq!(std::fs::read_to_string(dir.spool()).unwrap(), "once\n");
    rig.finish().await;
}
