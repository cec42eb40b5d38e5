//! What the scaler's HTTP handlers answer agents, in small (`http/agent.rs`).

use pilotlight_scaler::fleet::{
    Applied, Dirty, Event as FleetEvent, Order, RESULT_GRACE, Refusal,
    event::{Enrol, Synced},
    instance::AssignmentState,
};
use pilotlight_wire::{
    AssignmentId, InstanceId, JobId, Work,
    agent::{AssignmentEvent, Directive, Gpu, Inventory, JobRef, Policy, Seq, Start, SyncRequest},
};

use crate::{
    Event, Failure, Fault, SECOND, Sim,
    agent::{Call, Context, NONCE, Reply},
    scaler::ScalerEvent,
};

/// A sync that is held.
pub(crate) struct Held {
    pub(crate) context: Context,
    seq: Seq,
    number: u64,
}

impl Sim {
    /// A call arrives at the scaler.
    pub(crate) fn call_arrives(&mut self, from: InstanceId, context: Context, call: Call) -> Failure {
        if !self.scaler.up {
            self.answer(from, context, Reply::None);
            return Ok(());
        }
        if !matches!(call, Call::Enrol { .. }) {
            let enrolment = |id| Some(self.scaler.world.instance(id)?.enrolment.as_ref()?.nonce == NONCE);
            if self.scaler.world.instance(from).is_some() && enrolment(from) != Some(true) {
                self.answer(from, context, Reply::None);
                return Ok(());
            }
        }
        match call {
            Call::Enrol { nonce, proven, problems } => self.enrols(from, context, nonce, proven, problems),
            Call::Sync(request) => self.synced(from, context, request),
            Call::Event(assignment, event) => self.told(from, context, assignment, event),
            Call::Log(assignment, offset, bytes) => self.logged(from, context, assignment, offset, bytes),
        }
    }

    fn enrols(
        &mut self,
        from: InstanceId,
        context: Context,
        nonce: &str,
        proven: bool,
        problems: Vec<String>,
    ) -> Failure {
        let gpus = self.hosts.get(&from).map(|host| host.gpus.clone()).unwrap_or_default();
        let gpus = gpus.into_iter().map(|uuid| Gpu { uuid, model: String::new(), pci: String::new() }).collect();
        let enrol = Enrol {
            instance: from,
            nonce: nonce.to_owned(),
            agent_version: "1".to_owned(),
            agent_started_at: self.moment(from).wall,
            inventory: Inventory { gpus, ..Inventory::default() },
            problems,
            proven,
        };
        let Some(result) = self.apply(FleetEvent::Enrolled(Box::new(enrol)))? else {
            self.answer(from, context, Reply::None);
            return Ok(());
        };
        let policy = Policy {
            lease_seconds: self.lease_seconds(),
            result_grace_seconds: RESULT_GRACE.as_secs().unsigned_abs(),
            sample_seconds: 5,
            cpu_jobs: self.scaler.world.cpu_jobs(from).unwrap_or(0),
        };
        let reply = match result {
            Ok(_) => Reply::Enrolled(policy),
            Err(Refusal::InstanceGone) => Reply::Gone,
            Err(Refusal::OtherNonce) => Reply::Refused,
            Err(_) => Reply::None,
        };
        self.answer(from, context, reply);
        Ok(())
    }

    fn lease_seconds(&self) -> u64 {
        self.scaler.settings.lease.as_secs().unsigned_abs()
    }

    fn synced(&mut self, from: InstanceId, context: Context, request: SyncRequest) -> Failure {
        let seq = request.seq;
        if let Some(held) = self.scaler.held.get(&from) {
            if seq < held.seq {
                self.answer(from, context, Reply::Synced(Vec::new(), self.lease_seconds()));
                return Ok(());
            }
            let superseded = held.context;
            self.scaler.held.remove(&from);
            self.answer(from, superseded, Reply::Synced(Vec::new(), self.lease_seconds()));
        }
        let synced = Synced {
            instance: from,
            nonce: NONCE.to_owned(),
            seq,
            assignments: request.assignments,
            sample: request.sample,
        };
        let number = self.thought_of;
        // Entered before the world is asked, so that a change in between is not missed.
        self.scaler.held.insert(from, Held { context, seq, number });
        let result = self.apply(FleetEvent::Synced(Box::new(synced)))?;
        let Some(held) = self.scaler.held.get(&from).filter(|held| held.number == number) else { return Ok(()) };
        let context = held.context;
        match result {
            Some(Ok(Applied::Directives(orders))) if orders.is_empty() => {
                let hold = (25 * SECOND).min(self.lease_seconds() * SECOND / 4);
                let event = ScalerEvent::Held { epoch: self.scaler.epoch, instance: from, number, over: true };
                self.after(hold, Event::Scaler(event));
            }
            Some(Ok(Applied::Directives(orders))) => {
                self.scaler.held.remove(&from);
                self.direct(from, context, &orders);
            }
            Some(Err(Refusal::InstanceGone)) => {
                self.scaler.held.remove(&from);
                self.answer(from, context, Reply::Gone);
            }
            _ => {
                self.scaler.held.remove(&from);
                self.answer(from, context, Reply::None);
            }
        }
        Ok(())
    }

    /// Wakes held syncs of what a pass changed.
    pub(crate) fn wake_held(&mut self, dirty: &Dirty) {
        for id in &dirty.instances {
            let Some(number) = self.scaler.held.get(id).map(|held| held.number) else { continue };
            if !self.fails(Fault::WakeUpLost, 1) {
                let event = ScalerEvent::Held { epoch: self.scaler.epoch, instance: *id, number, over: false };
                self.after(0, Event::Scaler(event));
            }
        }
    }

    pub(crate) fn held_again(&mut self, id: InstanceId, number: u64, over: bool) -> Failure {
        if self.scaler.held.get(&id).is_none_or(|held| held.number != number) {
            return Ok(());
        }
        let result = self.apply(FleetEvent::SyncAnswered(id))?;
        let Some(context) = self.scaler.held.get(&id).filter(|held| held.number == number).map(|held| held.context)
        else {
            return Ok(());
        };
        match result {
            Some(Ok(Applied::Directives(orders))) if orders.is_empty() && !over => return Ok(()),
            Some(Ok(Applied::Directives(orders))) => self.direct(id, context, &orders),
            Some(Err(Refusal::InstanceGone)) => self.answer(id, context, Reply::Gone),
            _ => self.answer(id, context, Reply::None),
        }
        self.scaler.held.remove(&id);
        Ok(())
    }

    /// As `directive` in `http/agent.rs`.
    fn direct(&mut self, to: InstanceId, context: Context, orders: &[Order]) {
        let now = self.time();
        let start = |id: &AssignmentId| {
            let assignment = self.scaler.world.instance(to)?.assignments.get(id)?;
            let job = self.scaler.world.job(assignment.job)?;
            let spec = serde_json::from_str(r#"{"image":"x"}"#).ok()?;
            self.disk.payloads.contains(&job.id).then(|| {
                Directive::Start(Box::new(Start {
                    assignment: *id,
                    job: JobRef {
                        id: job.id,
                        forge: job.forge.clone(),
                        label: job.label.clone(),
                        name: job.name.clone(),
                    },
                    work: Work::Job(spec),
                    gpus: assignment.gpu_ids.clone(),
                    volumes: Vec::new(),
                    remaining_seconds: assignment.deadline.duration_since(now).as_secs().max(0).unsigned_abs(),
                    max_log_bytes: u64::MAX,
                    stop_grace_seconds: 10,
                }))
            })
        };
        let directives = orders
            .iter()
            .filter_map(|order| match order {
                Order::Start(id) => start(id),
                Order::Cancel(assignment) => Some(Directive::Cancel { assignment: *assignment }),
                Order::Withdraw(assignment) => Some(Directive::Withdraw { assignment: *assignment }),
                Order::Terminate => Some(Directive::Terminate { reason: String::new() }),
            })
            .collect();
        self.answer(to, context, Reply::Synced(directives, self.lease_seconds()));
    }

    fn told(
        &mut self,
        from: InstanceId,
        context: Context,
        assignment: AssignmentId,
        event: AssignmentEvent,
    ) -> Failure {
        let n = event.n;
        let result = self.apply(FleetEvent::AssignmentEvent { instance: from, assignment, event })?;
        let reply = match result {
            Some(Ok(_)) => Reply::Expected(n + 1),
            Some(Err(Refusal::EventGap { expected })) => Reply::Expected(expected),
            Some(Err(Refusal::InstanceGone)) => Reply::Gone,
            Some(Err(_)) | None => Reply::None,
        };
        if matches!(reply, Reply::Expected(_))
            && let Some(job) = self.job_of(from, assignment)
        {
            self.close_if_complete(job.0)?;
        }
        self.answer(from, context, reply);
        Ok(())
    }

    fn job_of(&self, id: InstanceId, assignment: AssignmentId) -> Option<(JobId, AssignmentState)> {
        let machine = self.scaler.world.instance(id)?;
        machine.assignments.get(&assignment).map(|assignment| (assignment.job, assignment.state))
    }

    fn logged(
        &mut self,
        from: InstanceId,
        context: Context,
        assignment: AssignmentId,
        offset: u64,
        bytes: u64,
    ) -> Failure {
        let gone = self.scaler.world.instance(from).is_some_and(|instance| !instance.is_live());
        let Some((job, state)) = self.job_of(from, assignment).filter(|_| !gone) else {
            self.answer(from, context, if gone { Reply::Gone } else { Reply::None });
            return Ok(());
        };
        let open = matches!(state, AssignmentState::Running | AssignmentState::Ended { log_closed: false, .. });
        let log = self.disk.logs.entry(job).or_default();
        if open && !log.closed && offset == log.size {
            log.size += bytes;
        }
        let size = log.size;
        if open {
            self.close_if_complete(job)?;
        }
        let reply = if self.scaler.up { Reply::Expected(size) } else { Reply::None };
        self.answer(from, context, reply);
        Ok(())
    }
}
