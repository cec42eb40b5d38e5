//! The whole link side against a scripted scaler and scripted containers, under paused time.

use std::cell::OnceCell;

use super::*;

mod fake;
mod world;

use fake::{FOREIGN, Fault, ROUTES, Route, policy};
use world::{World, append, id, start};

#[tokio::test(start_paused = true)]
async fn a_job_from_start_to_forgotten() {
    let world = World::new().await;
    let begun = Instant::now();
    world
        .beside(async {
            world.fake.wait("a held sync", |scaler| scaler.seq.is_some()).await;
            world.fake.with(|scaler| scaler.wanted.insert(id(1), start(1)));
            world.started(1).await;
            let bytes: Vec<u8> = (0..3 << 20).map(|n: u32| n.to_le_bytes()[n as usize % 3]).collect();
            append(world.dir.path(), id(1), &bytes);
            world.docker.exit(1);
            world.delivered(1, &[&b"begin\n"[..], &bytes].concat()).await;
        })
        .await;
    assert!(begun.elapsed() < Duration::from_secs(2), "no step waits for a timer: {:?}", begun.elapsed());
    assert_eq!(world.docker.created(), 1);
}

#[tokio::test(start_paused = true)]
async fn enrolment_survives_lost_replies_and_foreign_answers() {
    let world = World::new().await;
    world
        .fake
        .with(|scaler| scaler.faults.insert(Route::Enrol, [&[Fault::Lost; 2][..], &FOREIGN[1..]].concat().into()));
    world.beside(world.fake.wait("a sync", |scaler| scaler.seq.is_some())).await;
    let nonce = world.fake.with(|scaler| scaler.nonce.clone());
    world.beside(world.fake.wait("a sync of the next run", |scaler| scaler.seq.is_some_and(|seq| seq.run == 2))).await;
    assert_eq!(world.fake.with(|scaler| scaler.nonce.clone()), nonce);
}

#[tokio::test(start_paused = true)]
async fn a_refused_or_gone_enrolment_ends_the_agent() {
    let world = World::new().await;
    world.fake.with(|scaler| scaler.nonce = Some("another machine's".to_owned()));
    assert_eq!(world.agent().await, Exit::Left(Leave::Lapsed));
    let world = World::new().await;
    world.fake.with(|scaler| scaler.always = Some(Fault::Gone));
    assert_eq!(world.agent().await, Exit::Left(Leave::Terminated));
}

#[tokio::test(start_paused = true)]
async fn superseded_syncs_renew_the_lease() {
    let world = World::new().await;
    // Held for 25 s, superseded by a sample every 5 s, for an hour with a lease of 60 s.
    world.beside(world.fake.wait("samples", |scaler| scaler.samples > 720)).await;
    let syncs = world.fake.with(|scaler| scaler.seq.map(|seq| seq.n));
    assert!(syncs < Some(1500), "{syncs:?} syncs in an hour");
}

#[tokio::test(start_paused = true)]
async fn foreign_answers_end_no_job_and_lose_nothing() {
    for fault in FOREIGN {
        let world = World::new().await;
        world.fake.with(|scaler| scaler.wanted.insert(id(1), start(1)));
        world
            .beside(async {
                world.started(1).await;
                world.fake.with(|scaler| scaler.always = Some(fault));
                tokio::time::sleep(Duration::from_secs(1800)).await;
                let before = world.fake.with(|scaler| {
                    scaler.always = None;
                    scaler.seq
                });
                world.fake.wait("the lease again", |scaler| scaler.seq > before).await;
                world.fake.with(|scaler| {
                    scaler.faults.insert(Route::Events, vec![fault; 7].into());
                    scaler.faults.insert(Route::Log, vec![fault; 7].into());
                });
                append(world.dir.path(), id(1), b"while nobody listened\n");
                world.docker.exit(1);
                world.delivered(1, b"begin\nwhile nobody listened\n").await;
            })
            .await;
        assert_eq!(world.docker.wishes(1), [], "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_silent_scaler_ends_an_agent_without_a_job() {
    let world = World::new().await;
    let exit = world
        .to_its_end(async {
            world.fake.wait("a sync", |scaler| scaler.seq.is_some()).await;
            world.fake.with(|scaler| scaler.always = Some(Fault::Status(503)));
        })
        .await;
    assert_eq!(exit, Exit::Left(Leave::Lapsed));
    // Started again by hand, it has a lease from the start, not for ever.
    let begun = Instant::now();
    assert_eq!(world.agent().await, Exit::Left(Leave::Lapsed));
    assert_eq!(begun.elapsed().as_secs(), policy().lease_seconds);
}

#[tokio::test(start_paused = true)]
async fn a_silent_scaler_ends_an_agent_with_a_job_only_after_the_grace() {
    let world = World::new().await;
    world.fake.with(|scaler| scaler.wanted.insert(id(1), start(1)));
    let ended = OnceCell::new();
    let exit = world
        .to_its_end(async {
            world.started(1).await;
            world.fake.with(|scaler| scaler.always = Some(Fault::Status(503)));
            tokio::time::sleep(Duration::from_secs(7200)).await;
            world.docker.exit(1);
            ended.set(Instant::now()).unwrap();
        })
        .await;
    assert_eq!(exit, Exit::Left(Leave::Lapsed));
    assert_eq!(ended.get().unwrap().elapsed().as_secs(), policy().result_grace_seconds);
    assert_eq!(world.docker.wishes(1), []);
}

#[tokio::test(start_paused = true)]
async fn gone_on_any_route_ends_jobs() {
    for route in ROUTES {
        if route == Route::Enrol {
            continue;
        }
        let world = World::new().await;
        world.fake.with(|scaler| scaler.wanted.insert(id(1), start(1)));
        let exit = world
            .to_its_end(async {
                world.started(1).await;
                world.fake.with(|scaler| scaler.faults.insert(route, [Fault::Gone].into()));
                append(world.dir.path(), id(1), b"more");
                if route == Route::Events {
                    world.docker.exit(1);
                }
            })
            .await;
        assert_eq!(exit, Exit::Left(Leave::Terminated), "{route:?}");
        assert!(route == Route::Events || world.docker.wishes(1) == [Wish::Terminate], "{route:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn terminate_ends_jobs_and_sends_what_they_left() {
    let world = World::new().await;
    world.fake.with(|scaler| scaler.wanted.insert(id(1), start(1)));
    let exit = world
        .to_its_end(async {
            world.started(1).await;
            world.fake.with(|scaler| scaler.terminate = true);
        })
        .await;
    assert_eq!(exit, Exit::Left(Leave::Terminated));
    assert_eq!(world.docker.wishes(1), [Wish::Terminate]);
    world.fake.with(|scaler| {
        assert!(scaler.finished(id(1)));
        assert_eq!(scaler.logs[&id(1)], b"begin\n");
    });
}

#[tokio::test(start_paused = true)]
async fn a_stopped_agent_leaves_its_job_alone_and_the_next_takes_it_up() {
    let world = World::new().await;
    world.fake.with(|scaler| scaler.wanted.insert(id(1), start(1)));
    let exit = world
        .to_its_end(async {
            world.started(1).await;
            world.stop.cancel();
        })
        .await;
    assert_eq!(exit, Exit::Stopped);
    assert_eq!(world.docker.wishes(1), []);
    append(world.dir.path(), id(1), b"alone\n");
    world.docker.exit(1);
    let world = World { stop: CancellationToken::new(), ..world };
    world.beside(world.delivered(1, b"begin\nalone\n")).await;
    assert_eq!(world.docker.created(), 1);
}

#[tokio::test(start_paused = true)]
async fn cancels_and_deadlines() {
    let world = World::new().await;
    world.fake.with(|scaler| {
        scaler.cancels.insert(id(3));
        scaler.wanted.insert(id(1), start(1));
        scaler.wanted.insert(id(2), Start { remaining_seconds: 100, ..start(2) });
    });
    world
        .beside(async {
            world.delivered(3, b"").await;
            world.fake.with(|scaler| scaler.wanted.insert(id(3), start(3)));
            world.started(1).await;
            world.fake.with(|scaler| scaler.cancels.insert(id(1)));
            world.delivered(1, b"begin\n").await;
            world.delivered(2, b"begin\n").await;
        })
        .await;
    assert_eq!(world.docker.wishes(1), [Wish::Cancel]);
    assert_eq!(world.docker.wishes(2), [Wish::Timeout]);
    assert_eq!(world.docker.created(), 2, "the cancelled one never ran");
}

#[tokio::test(start_paused = true)]
async fn a_scaler_that_lost_events_or_log_is_told_again() {
    let world = World::new().await;
    world.fake.with(|scaler| scaler.wanted.insert(id(1), start(1)));
    world
        .beside(async {
            world.started(1).await;
            append(world.dir.path(), id(1), b"one\n");
            world.fake.wait("the log", |scaler| scaler.logs.get(&id(1)).is_some_and(|log| log.len() == 10)).await;
            world.fake.with(|scaler| {
                scaler.events.get_mut(&id(1)).unwrap().clear();
                scaler.logs.get_mut(&id(1)).unwrap().truncate(3);
            });
            append(world.dir.path(), id(1), b"two\n");
            world.docker.exit(1);
            world.delivered(1, b"begin\none\ntwo\n").await;
        })
        .await;
    world.fake.with(|scaler| assert_eq!(scaler.events[&id(1)].len(), 2));
}

#[tokio::test(start_paused = true)]
async fn log_bytes_lost_between_the_upload_and_the_last_ack_are_sent_again() {
    let world = World::new().await;
    world.fake.with(|scaler| scaler.wanted.insert(id(1), start(1)));
    world
        .beside(async {
            world.started(1).await;
            world.fake.with(|scaler| scaler.faults.insert(Route::Events, vec![Fault::Status(503); 8].into()));
            world.docker.exit(1);
            world.fake.wait("the log", |scaler| scaler.logs.get(&id(1)).is_some_and(|log| log.len() == 6)).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
            world.fake.with(|scaler| scaler.logs.get_mut(&id(1)).unwrap().clear());
            world.delivered(1, b"begin\n").await;
        })
        .await;
}

/// Plays one job to its end while the agent is killed after its `kill`-th request, or that request's answer is lost.
/// Returns how many requests it took.
async fn with_a_break_at(request: usize, kill: bool) -> usize {
    let world = World::new().await;
    world.fake.with(|scaler| {
        scaler.wanted.insert(id(1), start(1));
        scaler.lose = (!kill).then_some(request);
    });
    let script = async {
        world.started(1).await;
        append(world.dir.path(), id(1), b"middle\n");
        world.fake.wait("the log", |scaler| scaler.logs.get(&id(1)).is_some_and(|log| log.len() >= 13)).await;
        append(world.dir.path(), id(1), b"end\n");
        world.docker.exit(1);
        world.delivered(1, b"begin\nmiddle\nend\n").await;
    };
    let mut script = pin!(script);
    if kill {
        let killed = world.beside(async {
            tokio::select! {
                () = &mut script => false,
                () = world.fake.wait("the request", |scaler| scaler.requests >= request) => true,
            }
        });
        if killed.await {
            world.beside(script).await;
        }
    } else {
        world.beside(script).await;
    }
    assert_eq!(world.docker.created(), 1, "break at {request}");
    assert_eq!(world.docker.wishes(1), [], "break at {request}");
    world.fake.with(|scaler| {
        assert_eq!(scaler.events[&id(1)].len(), 2, "break at {request}");
        scaler.requests
    })
}

#[tokio::test(start_paused = true)]
async fn killed_or_unheard_at_every_step_a_job_runs_once_and_nothing_is_lost_or_doubled() {
    for kill in [true, false] {
        let requests = with_a_break_at(usize::MAX, kill).await;
        assert!(requests >= 7, "enrolment, syncs, two events, the log: {requests}");
        for request in 1..=requests + 1 {
            with_a_break_at(request, kill).await;
        }
    }
}
