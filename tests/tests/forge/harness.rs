//! The harness itself, against the real server: what it answers is what Gitea did.

use std::time::Duration;

use pilotlight_tests::gitea::{
    ADMIN, Conclusion, Gitea, Official, OfficialRunner, Outcome, PlayedRunner, Scope, Settings, Status, until,
};
use serde_json::Value;

use crate::HELLO;

#[test]
fn the_official_runner_by_hand_runs_a_job_to_success() {
    let gitea = Gitea::new().unwrap();
    let repo = gitea.repo();
    repo.workflow("hello.yml", HELLO).unwrap();
    let token = gitea.admin().registration_token(&Scope::Site).unwrap();
    let mut runner =
        OfficialRunner::start(&gitea, &token, &Official { ephemeral: true, ..Official::default() }).unwrap();

    let run = repo.dispatch("hello.yml").unwrap();

    assert_eq!(repo.completed(run).unwrap().conclusion, Some(Conclusion::Success));
    let job = repo.only_job(run).unwrap();
    assert_eq!(job.runner_name.as_deref(), Some("by-hand"));
    assert_eq!(job.labels, ["by-hand"]);
    assert!(job.steps.iter().all(|step| step.conclusion == Some(Conclusion::Success)), "{job:#?}");
    let log = repo.log(job.id).unwrap();
    assert!(log.contains("hello from linux") && log.contains("bye"), "{log}");
    // It was there for one job.
    assert!(runner.ended().unwrap().success());
    assert_eq!(gitea.admin().runners(&Scope::Site).unwrap(), []);
}

#[test]
fn a_played_runner_takes_a_job_and_ends_it_as_told() {
    let gitea = Gitea::new().unwrap();
    let repo = gitea.repo();
    repo.workflow("hello.yml", HELLO).unwrap();
    let org = gitea.org();
    let token = gitea.admin().registration_token(&org).unwrap();
    let runner = PlayedRunner::register(gitea.url(), &token, "played", &["by-hand"], true).unwrap();
    runner.declare(&["by-hand"], &["cancelling"]).unwrap();
    assert!(runner.fetch().unwrap().is_none(), "nothing is queued");
    let run = repo.dispatch("hello.yml").unwrap();
    let queued = repo.only_job(run).unwrap();
    assert_eq!(queued.status, Status::Queued);

    let task = runner.fetch().unwrap().unwrap();

    assert_eq!(repo.job(queued.id).unwrap().status, Status::InProgress);
    assert_eq!(task.context["run_id"], run.to_string());
    assert!(task.workflow.contains("echo bye"));
    assert_eq!(repo.tasks().unwrap()[0].id, task.id);
    assert_eq!(runner.heartbeat(task.id).unwrap(), None);
    assert_eq!(runner.log(task.id, 0, &["one", "two"]).unwrap(), 2);
    assert_eq!(runner.seal_log(task.id, 2, &["three"]).unwrap(), 3);
    runner.finish(task.id, Outcome::Failure).unwrap();
    let job = repo.until_job(queued.id, Status::Completed).unwrap();
    assert_eq!(job.conclusion, Some(Conclusion::Failure));
    assert!(repo.log(job.id).unwrap().lines().last().unwrap().ends_with("three"));
    assert_eq!(gitea.admin().runners(&org).unwrap(), []);
    let error = runner.heartbeat(task.id).unwrap_err().to_string();
    assert!(error.contains("unregistered runner"), "{error}");

    repo.rerun_failed(run).unwrap();
    let again = repo.only_job(run).unwrap();
    assert_eq!((again.status, again.run_attempt), (Status::Queued, 2));
    assert_ne!(again.id, job.id);
}

#[test]
fn a_cancelled_run_is_over_without_a_runner() {
    let gitea = Gitea::new().unwrap();
    let repo = gitea.repo();
    repo.workflow("hello.yml", HELLO).unwrap();
    let run = repo.dispatch("hello.yml").unwrap();

    gitea.cancel(&repo, run).unwrap();

    assert_eq!(repo.completed(run).unwrap().conclusion, Some(Conclusion::Cancelled));
    let job = repo.only_job(run).unwrap();
    assert_eq!((job.status, job.runner_id), (Status::Completed, None));
}

#[test]
fn a_restart_keeps_all_data_and_a_session_does_not_outlive_it() {
    let mut gitea = Gitea::new().unwrap();
    let repo = gitea.repo();
    repo.workflow("hello.yml", HELLO).unwrap();
    let run = repo.dispatch("hello.yml").unwrap();
    let web = gitea.web(ADMIN).unwrap();

    gitea.restart_after(Duration::from_millis(200)).unwrap();
    assert_eq!(repo.only_job(run).unwrap().status, Status::Queued);
    assert!(web.cancel(&repo, run).is_err());
    gitea.kill().unwrap();
    assert!(repo.run(run).is_err());
    gitea.start().unwrap();

    assert_eq!(repo.run(run).unwrap().id, run);
}

#[test]
fn a_token_has_only_the_rights_that_it_was_given() {
    let gitea = Gitea::new().unwrap();
    let repo = gitea.repo();
    let org = gitea.org();
    gitea.add_user("ada").unwrap();
    let stranger = gitea.token("ada", &["all"]).unwrap();
    let reader = gitea.token(ADMIN, &["read:organization", "read:repository"]).unwrap();

    assert_eq!(reader.jobs(&org, &["queued"]).unwrap(), []);
    assert!(reader.registration_token(&org).unwrap_err().to_string().contains(": 403 "));
    assert!(stranger.runners(&org).unwrap_err().to_string().contains(": 403 "));
    assert!(repo.by(&reader).workflow("hello.yml", HELLO).unwrap_err().to_string().contains(": 403 "));
    assert_eq!(gitea.anonymous().ask("GET", "/admin/actions/jobs", None).unwrap().status, 401);
}

#[test]
fn a_job_whose_runner_is_silent_fails_by_the_timeout_that_is_set() {
    let settings = Settings::default().actions("ZOMBIE_TASK_TIMEOUT", "1s").cron("stop_zombie_tasks", "@every 1s");
    let gitea = Gitea::with(&settings).unwrap();
    let repo = gitea.repo();
    repo.workflow("hello.yml", HELLO).unwrap();
    let token = gitea.admin().registration_token(&repo.scope()).unwrap();
    let runner = PlayedRunner::register(gitea.url(), &token, "silent", &["by-hand"], true).unwrap();
    let run = repo.dispatch("hello.yml").unwrap();
    runner.fetch().unwrap().unwrap();

    assert_eq!(repo.completed(run).unwrap().conclusion, Some(Conclusion::Failure));
}

#[test]
fn a_server_for_containers_is_reached_by_the_address_that_it_names() {
    let gitea = Gitea::with(&Settings::default().for_containers()).unwrap();

    assert!(!gitea.url().contains("127.0.0.1"));
    let repo = gitea.repo();
    let url: Value = gitea.admin().get(&format!("/repos/{}", repo.full_name())).unwrap();
    assert_eq!(url["clone_url"], format!("{}/acme/app.git", gitea.url()));
}

#[test]
fn runners_are_listed_disabled_and_deleted() {
    let gitea = Gitea::new().unwrap();
    let repo = gitea.repo();
    let api = gitea.admin();
    let token = api.registration_token(&repo.scope()).unwrap();
    assert_eq!(api.registration_token(&repo.scope()).unwrap(), token, "the same until it is reset");
    let runner = PlayedRunner::register(gitea.url(), &token, "two", &["gpu", "cpu"], true).unwrap();

    let seen = api.runners(&repo.scope()).unwrap().pop().unwrap();
    assert_eq!((seen.id, seen.ephemeral, seen.disabled), (runner.id, true, false));
    assert_eq!(seen.label_names(), ["gpu", "cpu"]);
    assert_eq!(api.runners(&Scope::Site).unwrap().len(), 1, "the site's are all");
    api.disable_runner(&repo.scope(), runner.id, true).unwrap();
    until("it is disabled", || api.runners(&repo.scope()), |runners| runners.iter().all(|runner| runner.disabled))
        .unwrap();
    api.delete_runner(&repo.scope(), runner.id).unwrap();
    assert_eq!(api.runners(&repo.scope()).unwrap(), []);
}
