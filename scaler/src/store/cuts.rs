//! Where the crash tests cut a commit off: every kind of news in a job's life, just before it is durable and just after.

use pilotlight_runtime::failpoint;

use super::Commit;
use crate::fleet::Instance;

/// All is written, nothing is durable.
pub(super) fn before(commit: &Commit) {
    failpoint!("scaler.submit.before-commit", !commit.payloads.is_empty());
    failpoint!("scaler.created.before-commit", in_phase(commit, "booting"));
    failpoint!("scaler.enrolled.before-commit", any(commit, |instance| instance.enrolment.is_some()));
    failpoint!("scaler.assigned.before-commit", any(commit, |instance| !instance.assignments.is_empty()));
    failpoint!("scaler.finished.before-commit", commit.jobs.iter().any(|job| job.ended().is_some()));
    failpoint!("scaler.settled.before-commit", commit.jobs.iter().any(crate::fleet::Job::is_settled));
    failpoint!("scaler.terminating.before-commit", in_phase(commit, "terminating"));
    failpoint!("scaler.gone.before-commit", in_phase(commit, "gone"));
}

/// All is durable, nothing is replied or done.
pub(super) fn after(commit: &Commit) {
    failpoint!("scaler.submit.after-commit", !commit.payloads.is_empty());
    failpoint!("scaler.created.after-commit", in_phase(commit, "booting"));
    failpoint!("scaler.enrolled.after-commit", any(commit, |instance| instance.enrolment.is_some()));
    failpoint!("scaler.assigned.after-commit", any(commit, |instance| !instance.assignments.is_empty()));
    failpoint!("scaler.finished.after-commit", commit.jobs.iter().any(|job| job.ended().is_some()));
    failpoint!("scaler.settled.after-commit", commit.jobs.iter().any(crate::fleet::Job::is_settled));
    failpoint!("scaler.terminating.after-commit", in_phase(commit, "terminating"));
    failpoint!("scaler.gone.after-commit", in_phase(commit, "gone"));
}

fn any(commit: &Commit, look: impl Fn(&Instance) -> bool) -> bool {
    commit.instances.iter().filter_map(|(_, instance)| instance.as_ref()).any(look)
}

fn in_phase(commit: &Commit, word: &str) -> bool {
    any(commit, |instance| instance.phase.word() == word)
}
