//! Destroying, whatever state the instance is in.

use super::*;

#[tokio::test]
async fn an_agent_that_ignores_sigterm_is_killed() {
    let host = Host::new(&format!("trap '' TERM; touch \"$out/deaf\"; {LIVES}"));
    let scaler = host.scaler();
    let own = host.create(&scaler.provider).await;
    let pid = host.start(1).await;
    eventually("the trap is set", || host.path("deaf").exists()).await;
    scaler.provider.destroy(own).await.unwrap();
    assert!(!runs(pid));
    scaler.stop().await;
}

#[tokio::test]
async fn an_agent_that_locks_only_after_the_stop_is_stopped_too() {
    let host = Host::new(LIVES);
    let provider = host.provider();
    let instance = host.create(&provider).await;
    // The clean-up itself stands in for the scaler that was killed with an agent half started.
    let script = fs::read_to_string(host.path("agent")).unwrap();
    let late = r#"clean) "$0" run --dir "$dir" >/dev/null 2>&1 & until [ -e "$out/starts" ]; do sleep 0.01; done"#;
    host.write_agent(&script.replace("clean)", late));
    provider.destroy(instance).await.unwrap();
    assert!(!runs(host.start(1).await));
    assert_eq!(provider.list().await.unwrap(), []);
}

#[tokio::test]
async fn destroying_a_dying_agent_ends_the_starts() {
    let host = Host::new("exit 1");
    for _ in 0..5 {
        let scaler = host.scaler();
        let before = host.lines("starts").len();
        let instance = host.create(&scaler.provider).await;
        host.start(before + 1).await;
        scaler.provider.destroy(instance).await.unwrap();
        let starts = host.lines("starts").len();
        // Another instance that comes and goes gives a keeper that went on time to show itself.
        let other = host.create(&scaler.provider).await;
        finished(&scaler.provider, other).await;
        assert_eq!(host.lines("starts").len(), starts + 5);
        assert!(!host.folder(instance).exists());
        scaler.provider.destroy(other).await.unwrap();
        scaler.stop().await;
    }
}

#[tokio::test]
async fn a_failing_clean_up_keeps_the_instance_listed_and_stopped() {
    let host = Host::new(LIVES);
    let scaler = host.scaler();
    let instance = host.create(&scaler.provider).await;
    let pid = host.start(1).await;
    fs::write(host.path("docker-is-down"), "").unwrap();
    for _ in 0..2 {
        let error = scaler.provider.destroy(instance).await.unwrap_err();
        let text = Report(&error).to_string();
        assert!(text.contains("exit status: 1: cannot reach Docker"), "{text}");
        assert!(!runs(pid));
        assert_eq!(finished(&scaler.provider, instance).await, "being destroyed");
    }
    scaler.stop().await;

    let second = host.scaler();
    // Nor does the create call, repeated, bring it back.
    let mut repeated = bootstrap();
    repeated.instance = instance;
    second.provider.create(&repeated, &host.placement(), &tags()).await.unwrap();
    let other = host.create(&second.provider).await;
    host.start(2).await;
    assert_eq!(finished(&second.provider, instance).await, "being destroyed");
    fs::remove_file(host.path("docker-is-down")).unwrap();
    second.provider.destroy(instance).await.unwrap();
    assert_eq!(second.provider.list().await.unwrap(), [alive(other)]);
    assert_eq!(host.lines("starts").len(), 2);
    second.provider.destroy(other).await.unwrap();
    second.stop().await;
}

#[tokio::test]
async fn a_clean_up_that_hangs_is_given_up() {
    let host = Host::new(LIVES);
    let limits = Limits { clean: Duration::from_millis(100), ..Limits::default() };
    let provider = LocalProvider::with_limits(host.dir.path(), limits);
    let instance = host.create(&provider).await;
    host.write_agent("#!/bin/sh\nexec sleep 60\n");
    let text = Report(&provider.destroy(instance).await.unwrap_err()).to_string();
    assert!(text.contains("took longer"), "{text}");
    host.write_agent("#!/bin/sh\nyes complaint | head -c 1000000 >&2; echo last words >&2; exit 9\n");
    let text = Report(&provider.destroy(instance).await.unwrap_err()).to_string();
    assert!(text.ends_with("last words") && text.len() < 4096, "{} bytes", text.len());
    host.write_agent("#!/bin/sh\n");
    provider.destroy(instance).await.unwrap();
    assert_eq!(provider.list().await.unwrap(), []);
}

#[tokio::test]
async fn a_destroy_that_was_cut_off_at_the_end_only_removes() {
    let host = Host::new(LIVES);
    let provider = host.provider();
    let instance = host.create(&provider).await;
    fs::remove_file(host.folder(instance).join("bootstrap.json")).unwrap();
    let scaler = host.scaler();
    let other = host.create(&scaler.provider).await;
    host.start(1).await;
    assert_eq!(finished(&scaler.provider, instance).await, "being destroyed");
    scaler.provider.destroy(instance).await.unwrap();
    assert_eq!(host.lines("cleaned"), [""; 0]);
    assert_eq!(scaler.provider.list().await.unwrap(), [alive(other)]);
    scaler.provider.destroy(other).await.unwrap();
    assert_eq!(host.lines("starts").len(), 1);
    scaler.stop().await;
}

#[tokio::test]
async fn a_foreign_process_is_never_hit() {
    let host = Host::new(LIVES);
    let provider = host.provider();
    let mut innocent = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let stat = fs::read_to_string(format!("/proc/{}/stat", innocent.id())).unwrap();
    let start: u64 = stat.split(' ').nth(21).unwrap().parse().unwrap();

    // A lock that nobody holds says nothing, however right it looks.
    let instance = host.create(&provider).await;
    fs::write(host.folder(instance).join("agent.lock"), format!("{} {start}\n", innocent.id())).unwrap();
    provider.destroy(instance).await.unwrap();
    assert!(runs(innocent.id()));

    // A held lock whose text is the last holder's, whose number went to another process since.
    for text in [format!("{} {}\n", innocent.id(), start + 1), String::new(), "x y".to_owned(), "0 0".to_owned()] {
        let instance = host.create(&provider).await;
        let lock = host.folder(instance).join("agent.lock");
        fs::write(&lock, text).unwrap();
        let held = fs::File::open(&lock).unwrap();
        held.lock().unwrap();
        let text = Report(&provider.destroy(instance).await.unwrap_err()).to_string();
        assert!(text.contains("does not name"), "{text}");
        assert!(runs(innocent.id()));
        assert!(host.folder(instance).exists());
        held.unlock().unwrap();
        provider.destroy(instance).await.unwrap();
    }
    assert!(runs(innocent.id()));
    innocent.kill().unwrap();
    innocent.wait().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn all_at_once_ends_with_nothing() {
    let host = Host::new(LIVES);
    let scaler = host.scaler();
    let lives = (0..12).map(|n| {
        let (provider, bootstrap, placement) = (scaler.provider.clone(), bootstrap(), host.placement());
        tokio::spawn(async move {
            let twice = {
                let tags = tags();
                tokio::join!(
                    provider.create(&bootstrap, &placement, &tags),
                    provider.create(&bootstrap, &placement, &tags)
                )
            };
            twice.0.unwrap();
            twice.1.unwrap();
            assert!(provider.list().await.unwrap().contains(&alive(bootstrap.instance)));
            // Some are destroyed while their agents start.
            for _ in 0..n {
                tokio::task::yield_now().await;
            }
            let twice = tokio::join!(provider.destroy(bootstrap.instance), provider.destroy(bootstrap.instance));
            twice.0.unwrap();
            twice.1.unwrap();
            assert!(provider.list().await.unwrap().iter().all(|listed| listed.instance != bootstrap.instance));
        })
    });
    for life in futures_util::future::join_all(lives).await {
        life.unwrap();
    }
    assert_eq!(scaler.provider.list().await.unwrap(), []);
    assert_eq!(host.lines("cleaned").len(), 12);
    for pid in host.lines("starts") {
        assert!(!runs(pid.parse().unwrap()), "agent {pid} runs on");
    }
    assert_eq!(host.lines("second"), [""; 0]);
    assert_eq!(fs::read_dir(host.path("local")).unwrap().count(), 0);
    scaler.stop().await;
}
