//! Jobs on their machine, in small (`job/direct.rs`): containers need no agent to run, and what was started is never
//! started again.

use pilotlight_agent::{
    job::{End, Progress, Wish},
    machine::Event as AgentEvent,
};
use pilotlight_wire::{AssignmentId, InstanceId, Verdict, agent::Start};

use crate::{
    Event, Fault, MINUTE, SECOND, Sim,
    agent::Task,
    host::{Container, HostEvent},
    short, wall,
};

/// The third killer comes ten minutes after the deadline.
const OVERTIME: u64 = 10 * MINUTE;

impl Sim {
    /// Looks at what there is of a job, and begins or goes on.
    pub(crate) fn begin(&mut self, id: InstanceId, start: Start) {
        let Some(host) = self.hosts.get_mut(&id) else { return };
        let (life, Some(agent)) = (host.life, &mut host.agent) else { return };
        let assignment = start.assignment;
        agent.tasks.insert(assignment, Task { start, wish: Wish::Run });
        let Some(on_disk) = host.disk.assignments.get(&assignment) else { return };
        match host.containers.get(&assignment) {
            _ if on_disk.outcome.is_some() => self.settle(id, assignment),
            Some(container) => {
                let (running, started_at) = (container.exited.is_none(), wall(container.started));
                if running {
                    let progress = Progress::Started { image_ready_at: started_at, started_at, image_id: None };
                    self.handle(id, AgentEvent::Progress(assignment, progress));
                } else {
                    self.settle(id, assignment);
                }
            }
            None if on_disk.started => {
                self.finish(id, assignment, Verdict::Infrastructure, None, "its container is gone", 0, true);
            }
            None => {
                let delay = self.between(500, 40 * SECOND);
                self.after(delay, Event::Host(id, HostEvent::Prepared { life, assignment }));
            }
        }
    }

    pub(crate) fn prepared(&mut self, id: InstanceId, assignment: AssignmentId) {
        let now = self.now;
        let refused = self.fails(Fault::Refused, 2);
        let Some(host) = self.hosts.get_mut(&id) else { return };
        let Some(task) = host.agent.as_ref().and_then(|agent| agent.tasks.get(&assignment)) else { return };
        let start = task.start.clone();
        let Some(on_disk) = host.disk.assignments.get_mut(&assignment).filter(|on_disk| !on_disk.started) else {
            return;
        };
        if task.wish != Wish::Run {
            return;
        }
        if refused {
            on_disk.outcome = Some((End::Refused { reason: "Docker's disk is full".to_owned() }, 0));
            return self.settle(id, assignment);
        }
        on_disk.started = true;
        let Some(truth) = self.truth.jobs.get_mut(&start.job.id) else { return };
        truth.starts += 1;
        let ends = now + truth.runs_for;
        let container =
            Container { job: start.job.id, started: now, ends, bytes: truth.bytes, code: truth.code, exited: None };
        host.containers.insert(assignment, container);
        self.say(|_| format!("job {} starts on {}", short(&start.job.id), short(&id)));
        self.after(ends - now, Event::Host(id, HostEvent::Exits { assignment }));
        let late = start.remaining_seconds.saturating_mul(SECOND) + OVERTIME;
        self.after(late, Event::Host(id, HostEvent::Killed { assignment }));
        let started_at = wall(now);
        self.handle(
            id,
            AgentEvent::Progress(
                assignment,
                Progress::Started { image_ready_at: started_at, started_at, image_id: None },
            ),
        );
    }

    pub(crate) fn end_early(&mut self, id: InstanceId, assignment: AssignmentId, wish: Wish) {
        let grace = if wish == Wish::Terminate { 100 } else { self.between(100, 10 * SECOND) };
        let runs = self.hosts.get(&id).is_some_and(|host| host.runs(assignment));
        let started = self
            .hosts
            .get(&id)
            .and_then(|host| host.disk.assignments.get(&assignment))
            .is_some_and(|on_disk| on_disk.started || on_disk.outcome.is_some());
        if runs {
            self.after(grace, Event::Host(id, HostEvent::Killed { assignment }));
        } else if !started {
            let (verdict, reason) = early(wish);
            self.finish(id, assignment, verdict, None, reason, 0, false);
        }
    }

    /// A container is killed, or removed by somebody.
    pub(crate) fn kill_container(&mut self, id: InstanceId, assignment: AssignmentId) {
        let now = self.now;
        let Some(host) = self.hosts.get_mut(&id).filter(|host| host.alive) else { return };
        if let Some(container) = host.containers.get_mut(&assignment)
            && container.exited.is_none()
        {
            container.exited = Some((now, 137));
            self.settle(id, assignment);
        }
    }

    /// What has ended is written down and told, if an agent is there to see it.
    pub(crate) fn settle(&mut self, id: InstanceId, assignment: AssignmentId) {
        let now = self.now;
        let Some(host) = self.hosts.get(&id) else { return };
        let Some(task) = host.agent.as_ref().and_then(|agent| agent.tasks.get(&assignment)) else { return };
        let Some(on_disk) = host.disk.assignments.get(&assignment) else { return };
        if let Some((end, bytes)) = on_disk.outcome.clone() {
            return self.handle(id, AgentEvent::Ended(assignment, end, bytes));
        }
        let Some(container) = host.containers.get(&assignment) else { return };
        let Some((_, code)) = container.exited else { return };
        let bytes = container.written(now);
        match (code, task.wish) {
            (0, _) => self.finish(id, assignment, Verdict::Success, Some(0), "", bytes, false),
            (137, wish @ (Wish::Cancel | Wish::Timeout | Wish::Terminate)) => {
                let (verdict, reason) = early(wish);
                self.finish(id, assignment, verdict, Some(137), reason, bytes, false);
            }
            (137, Wish::Run) => {
                self.finish(id, assignment, Verdict::Infrastructure, Some(137), "killed by somebody", bytes, false);
            }
            (code, _) => self.finish(id, assignment, Verdict::Failure, Some(code), "", bytes, false),
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of an end")]
    fn finish(
        &mut self,
        id: InstanceId,
        assignment: AssignmentId,
        verdict: Verdict,
        exit_code: Option<i32>,
        reason: &str,
        bytes: u64,
        log_gap: bool,
    ) {
        let end = End::Finished {
            verdict,
            exit_code,
            reason: (!reason.is_empty()).then(|| reason.to_owned()),
            log_gap,
            usage: None,
            finished_at: wall(self.now),
        };
        if let Some(on_disk) = self.hosts.get_mut(&id).and_then(|host| host.disk.assignments.get_mut(&assignment)) {
            on_disk.outcome = Some((end, bytes));
            self.settle(id, assignment);
        }
    }
}

/// How a job ends that is ended from above.
fn early(wish: Wish) -> (Verdict, &'static str) {
    match wish {
        Wish::Run | Wish::Cancel => (Verdict::Cancelled, "cancelled"),
        Wish::Timeout => (Verdict::Timeout, "its deadline passed"),
        Wish::Terminate => (Verdict::Infrastructure, "its machine was terminated"),
    }
}
