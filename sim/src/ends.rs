//! What must be: at every plan, and at the end.

use jiff::SignedDuration;
use pilotlight_scaler::fleet::{Action, Cause, Instance, Plan, demand::JobState, instance::OVERTIME};
use pilotlight_wire::{InstanceId, JobId, Verdict};

use crate::{Event, Failure, MINUTE, Sim, short, truth::JobTruth};

impl Sim {
    /// No machine on which a job really runs is destroyed, but for a fault that its scaler cannot tell from its end.
    pub(crate) fn just(&self, plan: &Plan) -> Failure {
        for planned in &plan.actions {
            match &planned.action {
                Action::Terminate { instance, cause } => self.just_end(*instance, cause)?,
                Action::Reap(id) if self.runs_a_job(*id) && self.is_in_touch(*id) => {
                    return Err(format!("machine {} is reaped, and its agent is in touch", short(id)));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn just_end(&self, id: InstanceId, cause: &Cause) -> Failure {
        let Some(instance) = self.scaler.world.instance(id).filter(|_| self.runs_a_job(id)) else { return Ok(()) };
        let silent = self.silence(instance);
        let now = self.time();
        let just = match cause {
            // A job outlived its deadline: its agent ends it and says so, hence is out of touch. Another job may run beside
            // it, but nobody can tell that of a machine that does not answer (design 5).
            Cause::Overdue => {
                silent >= SignedDuration::from_mins(1)
                    && instance
                        .live_assignments()
                        .any(|(_, assignment)| now.duration_since(assignment.deadline) >= OVERTIME)
            }
            Cause::Lost => silent >= SignedDuration::from_mins(2),
            // Both are said by the machine or by its provider, and no job runs then that is known.
            Cause::Stopped { .. } | Cause::Vanished => true,
            // A database was lost, and the agent did not speak for as long as a boot takes.
            Cause::Orphaned | Cause::Reaped => self.scaler.strangers.contains(&id),
            Cause::HardEnd | Cause::Silent => silent >= SignedDuration::from_mins(2),
            _ => false,
        };
        if just {
            Ok(())
        } else {
            Err(format!("a running job is ended on {}: {cause}, silent for {silent:#}", short(&id)))
        }
    }

    /// How long the scaler has not heard a machine.
    fn silence(&self, instance: &Instance) -> SignedDuration {
        let heard = self.scaler.world.seen(instance.id).and_then(|seen| seen.heard_at);
        self.time().duration_since(heard.or(instance.ready_at()).unwrap_or(instance.created_at))
    }

    fn is_in_touch(&self, id: InstanceId) -> bool {
        let open = |host: &crate::host::Host| host.requests_cut <= self.now && host.answers_cut <= self.now;
        self.trouble == 0 && self.hosts.get(&id).is_some_and(open) && self.is_serving(id)
    }

    /// Whether a container runs there whose job is not to end.
    fn runs_a_job(&self, id: InstanceId) -> bool {
        let Some(host) = self.hosts.get(&id) else { return false };
        host.containers.iter().any(|(assignment, container)| {
            let wanted = self.truth.jobs.get(&container.job).is_some_and(|job| !job.cancelled);
            let placed =
                self.scaler.world.job(container.job).is_some_and(
                    |job| matches!(&job.state, JobState::Placed { assignment: on, .. } if on == assignment),
                );
            wanted && placed && host.runs(*assignment)
        })
    }

    /// Whether all is over, and if so whether it ended as it must.
    pub(crate) fn look(&mut self) -> Failure {
        let busy = self.scaler.world.instances().any(Instance::is_live)
            || self.scaler.world.jobs().next().is_some()
            || self.scaler.world.orphans().next().is_some()
            || !self.provider.machines.is_empty();
        if busy || !self.scaler.up {
            self.after(5 * MINUTE, Event::Look);
            return Ok(());
        }
        for (id, job) in &self.truth.jobs {
            self.ended_well(*id, job).map_err(|why| format!("job {}: {why}; {job:?}", short(id)))?;
        }
        self.over = true;
        Ok(())
    }

    fn ended_well(&self, id: JobId, truth: &JobTruth) -> Failure {
        if truth.starts > 1 {
            return Err(format!("it ran {} times", truth.starts));
        }
        if !truth.accepted || truth.forgotten {
            return Ok(());
        }
        let Some(ended) = &truth.settled else { return Err("it never ended".to_owned()) };
        let log = self.disk.logs.get(&id).copied().unwrap_or_default();
        if !log.closed {
            return Err("its log is open".to_owned());
        }
        let complete = log.size == truth.bytes || ended.log_gap || log.notice;
        match ended.verdict {
            Verdict::Success if truth.code != 0 || !truth.completed => Err("no success".to_owned()),
            Verdict::Failure if truth.code == 0 || !truth.completed => Err("no failure".to_owned()),
            Verdict::Success | Verdict::Failure if !complete => {
                Err(format!("its log has {} bytes and says nothing of the rest", log.size))
            }
            Verdict::Cancelled if !truth.cancelled => Err("nobody cancelled it".to_owned()),
            Verdict::Infrastructure | Verdict::Cancelled | Verdict::Timeout if ended.reason.is_none() => {
                Err("no reason is given".to_owned())
            }
            _ => Ok(()),
        }
    }

    /// What is not over though it should be.
    pub(crate) fn what_is_left(&self) -> String {
        let world = &self.scaler.world;
        let machines: Vec<String> =
            world.instances().filter(|i| i.is_live()).map(|i| format!("{} {:?}", short(&i.id), i.phase)).collect();
        let jobs: Vec<String> = world.jobs().map(|job| format!("{} {:?}", short(&job.id), job.state)).collect();
        let there: Vec<String> = self.provider.machines.keys().map(short).collect();
        format!("time did not end it: instances {machines:?}, jobs {jobs:?}, at the provider {there:?}")
    }
}
