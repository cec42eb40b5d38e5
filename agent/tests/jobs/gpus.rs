//! Which GPUs a job has. They are entries of a CDI spec: `/dev/null` and a variable.

use std::{fs, path::PathBuf};

use pilotlight_wire::{GpuId, Verdict};

use crate::rig::{Rig, finished, spec};

struct Spec(PathBuf);

impl Drop for Spec {
    fn drop(&mut self) {
        let _gone = fs::remove_file(&self.0);
    }
}

#[tokio::test]
async fn a_job_has_its_gpus_by_uuid_and_says_nothing_about_it() {
    let gpu = format!("GPU-jobs-{}", std::process::id());
    let rig = Rig::new().await;
    let dir = rig.context.engine.facts().cdi_dirs.first().cloned().expect("Docker has CDI switched on");
    fs::create_dir_all(&dir).unwrap();
    let file = Spec(dir.join(format!("{gpu}.json")));
    let edits = r#"{"env":["FAKE=1"],"deviceNodes":[{"path":"/dev/fake","hostPath":"/dev/null"}]}"#;
    let text = format!(
        r#"{{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[{{"name":"{gpu}","containerEdits":{edits}}}]}}"#
    );
    fs::write(&file.0, text).unwrap();

    let show = "echo $FAKE $NVIDIA_VISIBLE_DEVICES; test -c /dev/fake";
    let mut with = rig.script(show);
    with.gpus = vec![GpuId(gpu)];
    spec(&mut with).env.insert("NVIDIA_VISIBLE_DEVICES".to_owned(), "all".to_owned());
    let mut job = rig.begin(&with);
    job.started().await;
    assert!(job.details.iter().any(|line| line.contains("NVIDIA_VISIBLE_DEVICES")), "{:?}", job.details);
    let spool = job.dir.spool();
    assert_eq!(finished(job.end().await).verdict, Verdict::Success);
    assert_eq!(fs::read_to_string(spool).unwrap(), "1 void\n");

    let (text, end) = rig.output(&rig.script(show)).await;
    assert_eq!((text.as_str(), end.code), ("void\n", Some(1)));
    rig.finish().await;
}

#[tokio::test]
async fn a_machine_that_cannot_give_the_gpu_refuses() {
    let rig = Rig::new().await;
    let mut start = rig.script("true");
    start.gpus = vec![GpuId("GPU-nosuch".to_owned())];
    let end = rig.begin(&start).end().await;
    let pilotlight_agent::job::End::Refused { reason } = end else { panic!("{end:?}") };
    assert!(reason.contains("device driver"), "{reason}");
    rig.finish().await;
}
