//! The scaler's client against the real server: that a registration, its end and the end of a dead machine's job are what
//! Gitea understands by them.

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use jiff::{SignedDuration, Timestamp};
use pilotlight_runtime::clock::Clock;
use pilotlight_scaler::{
    config::{GiteaForge, Scope as Served},
    fleet::forge::ForgeJob,
    forge::{
        Gitea as Client,
        gitea::{Judged, Leftover, Order, judge},
    },
};
use pilotlight_tests::gitea::{ADMIN, Api, Conclusion, Gitea, PlayedRunner, Status};
use pilotlight_wire::{JobId, RunnerGrant, Task};
use tempfile::TempDir;

/// Two steps, and the label that the tests register.
const WORKFLOW: &str = "\
on: workflow_dispatch
jobs:
  train:
    runs-on: gpu-x1
    steps:
      - run: echo one
      - run: echo two
";

/// A client that serves the organisation, with a token.
fn client(gitea: &Gitea, api: &Api, dir: &Path) -> Client {
    let token_file = dir.join("token");
    fs::write(&token_file, api.secret()).unwrap();
    fs::set_permissions(&token_file, fs::Permissions::from_mode(0o600)).unwrap();
    let config = GiteaForge {
        name: "acme".parse().unwrap(),
        url: gitea.url().to_owned(),
        scope: Served::Organisation("acme".to_owned()),
        token_file,
        webhook_secret_file: None,
        labels: None,
        repositories: None,
        poll: SignedDuration::from_secs(1),
        rerun_lost: true,
    };
    Client::new(config, "0123456789abcdef").unwrap()
}

/// The token that docs/config.md asks for, and no more.
fn rig() -> (Gitea, TempDir, Client) {
    let gitea = Gitea::new().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let token = gitea.token(ADMIN, &["write:organization", "write:repository"]).unwrap();
    let client = client(&gitea, &token, dir.path());
    gitea.repo().workflow("train.yml", WORKFLOW).unwrap();
    (gitea, dir, client)
}

fn now() -> Timestamp {
    Clock::system(Timestamp::MIN).now()
}

fn order(job: JobId) -> Order {
    Order {
        job,
        label: "gpu-x1".parse().unwrap(),
        repository: None,
        image: "runner".to_owned(),
        price_per_hour: None,
        preface: Vec::new(),
        again: false,
    }
}

fn leftover(job: JobId, grant: Option<&RunnerGrant>, of: ForgeJob, task: Option<Task>) -> Leftover {
    Leftover {
        job,
        of,
        repository: None,
        task,
        grant: grant.cloned(),
        cancelled: false,
        reason: "its machine is gone: no longer in the provider's list".to_owned(),
        began_at: now(),
        ended_at: now(),
        rerun: true,
    }
}

fn of(run: u64, job: u64) -> ForgeJob {
    ForgeJob {
        id: i64::try_from(job).unwrap(),
        run: i64::try_from(run).unwrap(),
        attempt: 1,
        repository: "acme/app".to_owned(),
        name: "train".to_owned(),
        url: String::new(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_machines_job_fails_with_the_reason_in_its_log_and_runs_again() {
    for task_known in [true, false] {
        let (gitea, _dir, client) = rig();
        let repo = gitea.repo();
        let run = repo.dispatch("train.yml").unwrap();
        let queued = client.api().jobs("/orgs/acme/actions", "queued").await.unwrap();
        let labels = ["gpu-x1".parse().unwrap()];
        let Judged::Wanted(wanted) = judge(&queued[0], client.config(), &labels, now()) else {
            panic!("{queued:?}");
        };
        assert_eq!((wanted.job.repository.as_str(), wanted.job.attempt), ("acme/app", 1));

        let row = JobId::random();
        let grant = client.grant(order(row)).await.unwrap();
        let runner = PlayedRunner::known(gitea.url(), &grant.uuid, grant.token.expose());
        let task = runner.fetch().unwrap().expect("the job is its");
        let job = repo.only_job(run).unwrap();
        assert_eq!(client.runner_of(job.runner_name.as_deref().unwrap()), Some(row));
        runner.log(task.id, 0, &["what it printed"]).unwrap();

        let known = Task {
            id: i64::try_from(task.id).unwrap(),
            repository: "acme/app".to_owned(),
            run: i64::try_from(run).unwrap(),
            job: "train".to_owned(),
            steps: 2,
        };
        client.end(leftover(row, Some(&grant), of(run, job.id), task_known.then_some(known))).await.unwrap();

        let ended = repo.job(job.id).unwrap();
        assert_eq!((ended.status, ended.conclusion), (Status::Completed, Some(Conclusion::Failure)));
        let log = repo.log(job.id).unwrap();
        assert!(log.contains("what it printed") && log.contains("Pilotlight: its machine is gone"), "{log}");
        assert_eq!(gitea.admin().runners(&gitea.org()).unwrap(), []);
        let again = client.api().jobs("/orgs/acme/actions", "queued").await.unwrap();
        assert_eq!((again.len(), again[0].run_attempt), (1, 2), "it runs again");
        // The call was made, and its answer lost: made again it does nothing.
        client.end(leftover(row, Some(&grant), of(run, job.id), None)).await.unwrap();
        assert_eq!(client.api().jobs("/orgs/acme/actions", "queued").await.unwrap().len(), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registration_that_was_not_used_is_removed_and_a_lost_one_replaced() {
    let (gitea, _dir, client) = rig();
    let row = JobId::random();
    let lost = client.grant(order(row)).await.unwrap();
    let grant = client.grant(Order { again: true, ..order(row) }).await.unwrap();
    let runners = gitea.admin().runners(&gitea.org()).unwrap();
    assert_eq!(runners.len(), 1);
    assert_ne!((lost.id, &lost.uuid), (grant.id, &grant.uuid));
    assert_eq!(runners[0].name, client.runner_name(row));
    assert!(runners[0].ephemeral);

    let nothing = Leftover { rerun: false, ..leftover(row, None, of(0, 0), None) };
    client.end(nothing.clone()).await.unwrap();
    assert_eq!(gitea.admin().runners(&gitea.org()).unwrap(), []);
    client.end(nothing).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_matrix_of_many_jobs_is_read_over_all_pages() {
    let (gitea, _dir, client) = rig();
    let numbers = (0..70).map(|n| n.to_string()).collect::<Vec<_>>().join(", ");
    let matrix =
        WORKFLOW.replace("    steps:", &format!("    strategy:\n      matrix:\n        n: [{numbers}]\n    steps:"));
    gitea.repo().workflow("matrix.yml", &matrix).unwrap();
    gitea.repo().dispatch("matrix.yml").unwrap();
    let jobs = client.api().jobs("/orgs/acme/actions", "queued").await.unwrap();
    assert_eq!(jobs.len(), 70);
    assert!(jobs.iter().all(|job| job.labels == ["gpu-x1"]), "{jobs:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_without_a_scope_says_what_it_lacks() {
    let (gitea, dir, _client) = rig();
    let token = gitea.token(ADMIN, &["read:organization"]).unwrap();
    let client = client(&gitea, &token, dir.path());
    client.api().jobs("/orgs/acme/actions", "queued").await.unwrap();
    let error = client.grant(order(JobId::random())).await.unwrap_err().line();
    assert!(error.contains("registration-token") && error.contains("scope"), "{error}");
}
