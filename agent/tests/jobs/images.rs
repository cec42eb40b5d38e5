//! Images from a registry: made ready with progress, used as their authors meant them, and whose fault it is if not.

use bollard::query_parameters::*;
use pilotlight_agent::job::Wish;
use pilotlight_wire::{DirectJob, Verdict};
use tokio::time::Instant;

use crate::{
    registry::Registry,
    rig::{Rig, finished, image},
};

#[tokio::test]
async fn an_image_is_pulled_with_progress_and_used_as_it_says() {
    let (rig, registry) = (Rig::new().await, Registry::new().await);
    let name = registry.image("good:1");
    let mut job = rig.begin(&rig.start(image(&name)));
    job.detail("% of ").await;
    assert_eq!(job.details[0], format!("pulling {name}"));
    job.started().await;
    let spool = job.dir.spool();
    assert_eq!(finished(job.end().await).verdict, Verdict::Success);
    assert_eq!(std::fs::read_to_string(spool).unwrap(), "hello 1234 /w\n");

    // The second time it is there. Its own variables are its own, but for the GPUs.
    let command = vec!["echo $GREETING $NVIDIA_VISIBLE_DEVICES".to_owned()];
    let (text, end) = rig.output(&rig.start(DirectJob { command, ..image(&name) })).await;
    assert_eq!((text.as_str(), end.code), ("hello void\n", Some(0)));
    // Nothing of the host is in it.
    let command = vec!["test ! -e /usr/bin/env".to_owned()];
    assert_eq!(rig.run(&rig.start(DirectJob { command, ..image(&name) })).await.code, Some(0));

    let volumes = rig.docker.list_volumes(None::<ListVolumesOptions>).await.unwrap().volumes.unwrap_or_default();
    let all = ListContainersOptions { all: true, ..ListContainersOptions::default() };
    let used = rig.docker.list_containers(Some(all)).await.unwrap();
    let used: Vec<_> =
        used.iter().flat_map(|one| one.mounts.iter().flatten()).filter_map(|one| one.name.clone()).collect();
    let left: Vec<_> = volumes.into_iter().map(|one| one.name).filter(|name| !used.contains(name)).collect();
    assert_eq!(left, Vec::<String>::new(), "anonymous volumes go with their container");
    let force = RemoveImageOptions { force: true, ..RemoveImageOptions::default() };
    rig.docker.remove_image(&name, Some(force), None).await.unwrap();
    rig.finish().await;
}

#[tokio::test]
async fn an_image_that_cannot_be_used_is_the_jobs_fault() {
    let (rig, registry) = (Rig::new().await, Registry::new().await);
    for (name, word) in [
        ("nosuch", "manifest unknown"),
        ("nosuch:2", "manifest unknown"),
        ("private", ""),
        ("foreign", "no matching manifest"),
    ] {
        let end = rig.run(&rig.start(image(&registry.image(name)))).await;
        assert_eq!((end.verdict, end.code), (Verdict::Failure, None), "{name}: {}", end.reason);
        assert!(end.reason.contains(word) && end.reason.contains(name), "{name}: {}", end.reason);
    }
    rig.finish().await;
}

#[tokio::test]
async fn a_registry_out_of_reach_is_tried_again_and_is_not_the_jobs_fault() {
    let (rig, registry) = (Rig::new().await, Registry::new().await);
    for name in [registry.image("broken"), "127.0.0.1:1/closed".to_owned()] {
        let mut job = rig.begin(&rig.start(image(&name)));
        job.detail("trying again").await;
        let end = finished(job.end().await);
        assert_eq!((end.verdict, end.code), (Verdict::Infrastructure, None), "{}", end.reason);
    }
    rig.finish().await;
}

#[tokio::test]
async fn a_pull_is_given_up_when_the_job_is_cancelled() {
    let (rig, registry) = (Rig::new().await, Registry::new().await);
    let mut job = rig.begin(&rig.start(image(&registry.image("stalled"))));
    job.detail("% of ").await;
    let began = Instant::now();
    job.wish(Wish::Cancel);
    let end = finished(job.end().await);
    assert_eq!((end.verdict, end.code, end.usage), (Verdict::Cancelled, None, None));
    assert!(began.elapsed().as_secs() < 5, "{:?}", began.elapsed());
    rig.finish().await;
}
