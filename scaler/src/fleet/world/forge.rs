//! What forges say: what waits there, and how our runners' registrations stand.

use jiff::{SignedDuration, Timestamp};
use pilotlight_wire::{ForgeName, JobId, Task, Verdict, api::Phases};

use super::{World, later};
use crate::fleet::{
    Job,
    demand::{JobState, Refused},
    event::{Applied, Refusal},
    forge::{ForgeJob, Key, Reading, Registration, Runner, Wanted},
    instance::Call,
};

/// How long a label that a machine refused waits, times the refusals, and at most.
const REFUSAL_PAUSE: SignedDuration = SignedDuration::from_secs(15);
const LONGEST_PAUSE: SignedDuration = SignedDuration::from_mins(5);

impl World {
    pub(super) fn demand_read(&mut self, reading: Reading, now: Timestamp) {
        let Reading { forge, began_at, wanted, unserved, taken } = reading;
        for taken in taken {
            if self.jobs.get(&taken.runner).is_some_and(|job| job.forge == forge) {
                self.took(taken.runner, Some(taken.job), None, now);
            }
        }
        let demand = self.demand.entry(forge).or_default();
        // An answer that was overtaken says nothing any more.
        if demand.read_at.is_some_and(|newest| began_at < newest) {
            return;
        }
        demand.read_at = Some(began_at);
        demand.failing = None;
        demand.wanted = wanted;
        demand.unserved = unserved;
        demand.picks.retain(|(_, at)| *at >= began_at);
    }

    pub(super) fn demand_failed(&mut self, forge: ForgeName, message: String, now: Timestamp) {
        let demand = self.demand.entry(forge).or_default();
        let since = demand.failing.take().map_or(now, |(since, _)| since);
        demand.failing = Some((since, message));
    }

    pub(super) fn granted(&mut self, id: JobId, registration: i64, now: Timestamp) -> Result<Applied, Refusal> {
        let job = self.job_mut(id).ok_or(Refusal::UnknownJob)?;
        let (ended, timeout) = (job.ended().is_some(), job.timeout);
        let runner = job.runner.as_mut().ok_or(Refusal::UnknownJob)?;
        // One that came too late is there all the same.
        let late = ended || !matches!(runner.registration, Registration::Minting(_));
        runner.registration =
            if late { Registration::Ending(Call::due(now)) } else { Registration::Held { id: registration } };
        let (state, forge) = (job.state.clone(), job.forge.clone());
        self.demand.entry(forge).or_default().grants_failing = None;
        if late {
            return Ok(Applied::Done);
        }
        if let JobState::Placed { instance, assignment } = state
            && let Some(assignment) =
                self.instance_mut(instance).and_then(|instance| instance.assignments.get_mut(&assignment))
        {
            // Its time counts from when it could begin.
            assignment.deadline = later(now, timeout);
        }
        Ok(Applied::Done)
    }

    pub(super) fn grant_failed(&mut self, id: JobId, message: String, now: Timestamp) -> Result<Applied, Refusal> {
        let job = self.job_mut(id).ok_or(Refusal::UnknownJob)?;
        let (ended, forge) = (job.ended().is_some(), job.forge.clone());
        let runner = job.runner.as_mut().ok_or(Refusal::UnknownJob)?;
        if let Registration::Minting(call) = runner.registration {
            // Nobody may know whether it was made; its end asks the forge by its name.
            runner.registration =
                if ended { Registration::Ending(Call::due(now)) } else { Registration::Minting(call.failed(now)) };
        }
        let demand = self.demand.entry(forge).or_default();
        let since = demand.grants_failing.take().map_or(now, |(since, _)| since);
        demand.grants_failing = Some((since, message));
        Ok(Applied::Done)
    }

    pub(super) fn registration_over(&mut self, id: JobId) -> Result<Applied, Refusal> {
        let job = self.job_mut(id).ok_or(Refusal::UnknownJob)?;
        let forge = job.forge.clone();
        let runner = job.runner.as_mut().ok_or(Refusal::UnknownJob)?;
        if matches!(runner.registration, Registration::Ending(_)) {
            runner.registration = Registration::Over;
        }
        self.demand.entry(forge).or_default().grants_failing = None;
        Ok(Applied::Done)
    }

    pub(super) fn registration_failed(&mut self, id: JobId, message: &str, now: Timestamp) -> Result<Applied, Refusal> {
        let job = self.job_mut(id).ok_or(Refusal::UnknownJob)?;
        let forge = job.forge.clone();
        let runner = job.runner.as_mut().ok_or(Refusal::UnknownJob)?;
        if let Registration::Ending(call) = runner.registration {
            runner.registration = Registration::Ending(call.failed(now));
        }
        let demand = self.demand.entry(forge).or_default();
        demand.grants_failing.get_or_insert_with(|| (now, message.to_owned()));
        Ok(Applied::Done)
    }

    /// A runner took a job: by its agent's word, which comes first, or by the forge's, which knows more.
    pub(super) fn took(&mut self, id: JobId, job: Option<ForgeJob>, task: Option<Task>, now: Timestamp) {
        let known = self.jobs.get(&id).and_then(|job| job.runner.as_ref());
        let Some(known) = known else { return };
        let first = !known.has_picked();
        if !first && task.is_none() && job.as_ref().is_none_or(|job| *job == known.job) {
            return;
        }
        let Some(row) = self.job_mut(id) else { return };
        let (forge, label) = (row.forge.clone(), row.label.clone());
        let Some(runner) = &mut row.runner else { return };
        runner.picked_at.get_or_insert(now);
        if let Some(job) = job {
            runner.job = job;
        } else if let Some(task) = &task {
            // The forge's own number of the job comes with the next reading.
            let same = runner.job.repository == task.repository && runner.job.run == task.run;
            if !(same && runner.job.name == task.job) {
                let (repository, name) = (task.repository.clone(), task.job.clone());
                runner.job = ForgeJob { id: 0, run: task.run, attempt: 0, repository, name, url: String::new() };
            }
        }
        runner.task = task.or(runner.task.take());
        let key = Key { label, repository: runner.repository.clone() };
        row.name = title(&runner.job);
        if first {
            self.demand.entry(forge).or_default().picks.push((key, now));
        }
    }

    /// A machine could not run a runner: the label waits a little, the demand stands.
    pub(super) fn runner_refused(&mut self, id: JobId, reason: &str, now: Timestamp) {
        let Some(job) = self.jobs.get(&id) else { return };
        let (forge, label) = (job.forge.clone(), job.label.clone());
        let demand = self.demand.entry(forge).or_default();
        let count = 1 + demand.refusals.iter().find(|(of, _)| *of == label).map_or(0, |(_, refused)| refused.count);
        let pause = (REFUSAL_PAUSE * i32::try_from(count).unwrap_or(i32::MAX)).min(LONGEST_PAUSE);
        let refused = Refused { count, reason: reason.to_owned(), until: later(now, pause) };
        demand.refusals.retain(|(of, _)| *of != label);
        demand.refusals.push((label, refused));
        let reason = format!("its machine refused it before it took a job: {reason}");
        self.end_job(id, super::jobs::never_ran(Verdict::Infrastructure, Some(reason), now), now);
    }

    /// A runner of a label runs: whatever ailed the machines has passed.
    pub(super) fn runner_started(&mut self, id: JobId) {
        let Some(job) = self.jobs.get(&id).filter(|job| job.runner.is_some()) else { return };
        let label = job.label.clone();
        if let Some(demand) = self.demand.get_mut(&job.forge) {
            demand.refusals.retain(|(of, _)| *of != label);
        }
    }

    /// The row of a runner that is to be registered for a job.
    pub(in crate::fleet) fn runner_row(
        &self,
        id: JobId,
        forge: &ForgeName,
        wanted: &Wanted,
        now: Timestamp,
    ) -> Option<Job> {
        let (forge, label) = (self.settings.forges.get(forge)?, self.settings.labels.get(&wanted.label)?);
        let queued_at = wanted.queued_at.min(now);
        Some(Job {
            id,
            forge: forge.name.clone(),
            label: label.name.clone(),
            pool: label.pool.clone(),
            gpus: label.gpus,
            priority: label.priority,
            timeout: label.timeout,
            name: title(&wanted.job),
            body_hash: "runner".to_owned(),
            queued_at,
            state: JobState::Queued,
            refusal: None,
            phases: Phases { queued: Some(queued_at), planned: Some(now), ..Phases::default() },
            instance: None,
            runner: Some(Box::new(Runner::minting(wanted, forge))),
        })
    }

    /// A runner that its agent lists and a lost database knew: its credentials are lost, but not its name.
    pub(super) fn adopted_runner(&self, forge: &ForgeName) -> Option<Box<Runner>> {
        self.settings.forges.contains_key(forge).then(|| {
            let nothing = String::new;
            let job = ForgeJob { id: 0, run: 0, attempt: 0, repository: nothing(), name: nothing(), url: nothing() };
            let registration = Registration::Held { id: 0 };
            Box::new(Runner { job, repository: None, task: None, picked_at: None, registration })
        })
    }
}

impl Job {
    /// What is over needs its registration no longer. One that is being made is ended once that is known.
    pub(super) fn end_registration(&mut self, now: Timestamp) {
        if let Some(runner) = &mut self.runner {
            match runner.registration {
                Registration::Minting(Call::Sent { .. }) | Registration::Ending(_) | Registration::Over => {}
                Registration::Minting(_) | Registration::Held { .. } => {
                    runner.registration = Registration::Ending(Call::due(now));
                }
            }
        }
    }
}

/// What a forge's job is called in lists.
pub(in crate::fleet) fn title(job: &ForgeJob) -> String {
    format!("{} {}", job.repository, job.name)
}
