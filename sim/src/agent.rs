//! The agent's shell in small (`dispatch.rs`, `outbox.rs`, `upload.rs`, `job/direct.rs`), and what the scaler's HTTP
//! handlers answer it (`http/agent.rs`). What decides is the agent's own [`Machine`].

use std::{collections::BTreeMap, time::Duration};

use pilotlight_agent::{
    assignment::{Found, Moment},
    job::Wish,
    machine::{Effect, Event as AgentEvent, LogEnd, Machine, Setup},
};
use pilotlight_wire::{
    AssignmentId, InstanceId,
    agent::{AssignmentEvent, Directive, HostSample, Policy, Seq, Start, SyncRequest},
};

use crate::{
    Event, Fault, HOUR, MINUTE, SECOND, Sim,
    host::{HostEvent, OnDisk},
    millis, short, wall,
};

pub(crate) const NONCE: &str = "its own";
/// How long a call waits for its answer.
const CALL_TIMEOUT: u64 = 30 * SECOND;
/// Between syncs that nobody asked for, and between host samples: more than in life, for the simulator's sake.
const GAP: u64 = 200;
const SAMPLE: u64 = 2 * MINUTE;
/// Syncs under way at most.
const MOST: u32 = 8;
/// How often a spool is looked at, and the most that one upload carries.
const SPOOL: u64 = MINUTE;
const CHUNK: u64 = 1 << 20;

/// A running agent.
pub(crate) struct Agent {
    machine: Machine,
    /// Whether it is taken in.
    session: bool,
    pub(crate) tasks: BTreeMap<AssignmentId, Task>,
    deliveries: BTreeMap<AssignmentId, Delivery>,
    sync_at: Option<u64>,
    last_sync: u64,
    syncing: u32,
    backoff: u64,
    tick_at: Option<u64>,
}

/// A job's task.
pub(crate) struct Task {
    pub(crate) start: Start,
    pub(crate) wish: Wish,
}

/// One assignment's outbox and upload.
struct Delivery {
    last: u64,
    telling: bool,
    end: LogEnd,
    size: u64,
    sending: bool,
    backoff: u64,
}

/// A call of an agent.
#[derive(Debug)]
pub(crate) enum Call {
    Enrol { nonce: &'static str, proven: bool, problems: Vec<String> },
    Sync(SyncRequest),
    Event(AssignmentId, AssignmentEvent),
    Log(AssignmentId, u64, u64),
}

/// What an answer belongs to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Context {
    life: u64,
    sent: Duration,
    of: Of,
}

#[derive(Clone, Copy, Debug)]
enum Of {
    Enrol,
    Sync(Seq),
    Event(AssignmentId, u64),
    Log(AssignmentId),
    Nobody,
}

/// What a call is answered.
#[derive(Debug)]
pub(crate) enum Reply {
    Enrolled(Policy),
    Synced(Vec<Directive>, u64),
    /// The number of the event that is expected next, or the size of the log.
    Expected(u64),
    Refused,
    Gone,
    None,
}

impl Sim {
    pub(crate) fn host_event(&mut self, id: InstanceId, event: HostEvent) {
        let Some(host) = self.hosts.get_mut(&id).filter(|host| host.alive) else { return };
        let lives = |of: u64| of == host.life && host.agent.is_some();
        match event {
            HostEvent::AgentUp { life } if life == host.life && host.agent.is_none() && !host.disk.done => {
                self.agent_up(id);
            }
            HostEvent::Enrol { life } if lives(life) => {
                let proven = host.disk.bearer;
                let problems =
                    if !proven && self.fails(Fault::Unhealthy, 1) { vec!["no Docker".to_owned()] } else { vec![] };
                self.send(id, Of::Enrol, Call::Enrol { nonce: NONCE, proven, problems });
            }
            HostEvent::Sync { life } if lives(life) => self.sync(id),
            HostEvent::Sample { life } if lives(life) => {
                let sample = HostSample {
                    at: wall(self.now),
                    cpu_percent: 0.0,
                    memory_used_bytes: 0,
                    disk_free_bytes: u64::MAX,
                    load1: 0.0,
                };
                self.after(SAMPLE, Event::Host(id, HostEvent::Sample { life }));
                self.handle(id, AgentEvent::Sampled(sample));
            }
            HostEvent::Tick { life } if lives(life) => self.handle(id, AgentEvent::Tick),
            HostEvent::Prepared { life, assignment } if lives(life) => self.prepared(id, assignment),
            HostEvent::Exits { assignment } => {
                let now = self.now;
                if let Some(container) = host.containers.get_mut(&assignment)
                    && container.exited.is_none()
                    && container.ends <= now
                {
                    container.exited = Some((now, container.code));
                    if let Some(truth) = self.truth.jobs.get_mut(&container.job) {
                        truth.completed = true;
                    }
                    self.settle(id, assignment);
                }
            }
            HostEvent::Killed { assignment } => self.kill_container(id, assignment),
            HostEvent::Deliver { life, assignment } if lives(life) => self.deliver(id, assignment),
            HostEvent::Upload { life, assignment } if lives(life) => self.upload(id, assignment),
            _ => {}
        }
    }

    pub(crate) fn moment(&self, id: InstanceId) -> Moment {
        let (boot, off) = self.hosts.get(&id).map_or((0, 0), |host| (host.boot(self.now), host.clock_off));
        Moment { boot: Duration::from_millis(boot), wall: wall(self.now.saturating_add_signed(off)) }
    }

    fn agent_up(&mut self, id: InstanceId) {
        let now = self.moment(id);
        let Some(host) = self.hosts.get_mut(&id) else { return };
        host.disk.run += 1;
        let found = host.disk.assignments.iter().map(|(id, on_disk)| Found {
            id: *id,
            record: on_disk.record.clone(),
            events: on_disk.events.clone(),
            acked: on_disk.acked,
        });
        let setup = Setup {
            run: host.disk.run,
            boot_id: host.id.to_string(),
            gpus: host.gpus.clone(),
            policy: host.disk.policy.clone(),
            found: found.collect(),
            disk_free: u64::MAX,
        };
        let (machine, effects) = Machine::new(setup, now);
        host.agent = Some(Agent {
            machine,
            session: false,
            tasks: BTreeMap::new(),
            deliveries: BTreeMap::new(),
            sync_at: None,
            last_sync: self.now,
            syncing: 0,
            backoff: GAP,
            tick_at: None,
        });
        let life = host.life;
        self.say(|_| format!("agent {} starts", short(&id)));
        self.after(100, Event::Host(id, HostEvent::Enrol { life }));
        self.carry_out(id, effects);
    }

    /// The agent dies; its jobs do not. Another starts after a while.
    pub(crate) fn kill_agent(&mut self, id: InstanceId) {
        let delay = self.between(100, 2 * MINUTE);
        let Some(host) = self.hosts.get_mut(&id) else { return };
        if host.agent.take().is_none() {
            return;
        }
        host.life += 1;
        let life = host.life;
        self.after(delay, Event::Host(id, HostEvent::AgentUp { life }));
    }

    pub(crate) fn handle(&mut self, id: InstanceId, event: AgentEvent) {
        let now = self.moment(id);
        let Some(agent) = self.hosts.get_mut(&id).and_then(|host| host.agent.as_mut()) else { return };
        let effects = agent.machine.handle(event, now);
        self.carry_out(id, effects);
    }

    /// Each to its end before the next.
    fn carry_out(&mut self, id: InstanceId, effects: Vec<Effect>) {
        for effect in effects {
            if self.fails(Fault::AgentKilledBetween, 1) {
                self.say(|_| format!("agent {} killed before {effect:?}", short(&id)));
                return self.kill_agent(id);
            }
            self.carry_out_one(id, effect);
        }
        let (now, moment) = (self.now, self.moment(id));
        let Some(host) = self.hosts.get_mut(&id) else { return };
        let (life, Some(agent)) = (host.life, &mut host.agent) else { return };
        if let Some(after) = agent.machine.wake_after(moment) {
            let at = now + millis(after).clamp(1, 1000 * HOUR);
            if agent.tick_at.is_none_or(|due| due <= now || at < due) {
                agent.tick_at = Some(at);
                self.after(at - now, Event::Host(id, HostEvent::Tick { life }));
            }
        }
    }

    fn carry_out_one(&mut self, id: InstanceId, effect: Effect) {
        let now = self.now;
        let Some(host) = self.hosts.get_mut(&id) else { return };
        let (life, Some(agent)) = (host.life, &mut host.agent) else { return };
        match effect {
            Effect::Persist(assignment, record) => {
                let on_disk = OnDisk { record, events: Vec::new(), acked: 0, started: false, outcome: None };
                host.disk.assignments.insert(assignment, on_disk);
            }
            Effect::Emit(assignment, event) => {
                if let Some(delivery) = agent.deliveries.get_mut(&assignment) {
                    delivery.last = event.n;
                }
                if let Some(on_disk) = host.disk.assignments.get_mut(&assignment) {
                    on_disk.events.push(event);
                }
                self.after(1, Event::Host(id, HostEvent::Deliver { life, assignment }));
            }
            Effect::Run(start) => self.begin(id, *start),
            Effect::Wish(assignment, wish) => {
                if let Some(task) = agent.tasks.get_mut(&assignment) {
                    task.wish = wish;
                    self.end_early(id, assignment, wish);
                }
            }
            Effect::Deliver(assignment) => {
                if agent.session && !agent.deliveries.contains_key(&assignment) {
                    let last = host.disk.assignments.get(&assignment).map_or(0, |on_disk| on_disk.events.len() as u64);
                    let delivery =
                        Delivery { last, telling: false, end: LogEnd::Open, size: 0, sending: false, backoff: GAP };
                    agent.deliveries.insert(assignment, delivery);
                    self.after(1, Event::Host(id, HostEvent::Deliver { life, assignment }));
                    self.after(1, Event::Host(id, HostEvent::Upload { life, assignment }));
                }
            }
            Effect::Log(assignment, end) => {
                if let Some(delivery) = agent.deliveries.get_mut(&assignment) {
                    delivery.end = end;
                    self.after(1, Event::Host(id, HostEvent::Upload { life, assignment }));
                }
            }
            Effect::Forget(assignment) => {
                agent.deliveries.remove(&assignment);
                agent.tasks.remove(&assignment);
                host.disk.assignments.remove(&assignment);
            }
            Effect::Sync => self.sync_by(id, now),
            Effect::SyncSoon => self.sync_by(id, now + SECOND),
            Effect::Leave(leave) => {
                host.disk.done = true;
                host.agent = None;
                host.life += 1;
                if let Some(machine) = self.provider.machines.get_mut(&id) {
                    machine.stopped = Some(leave.as_str().to_owned());
                }
                self.say(|_| format!("agent {} leaves: {}", short(&id), leave.as_str()));
            }
        }
    }

    fn sync_by(&mut self, id: InstanceId, at: u64) {
        let Some(host) = self.hosts.get_mut(&id) else { return };
        let (life, Some(agent)) = (host.life, &mut host.agent) else { return };
        if agent.sync_at.is_none_or(|due| at < due) {
            agent.sync_at = Some(at);
            self.after(at.saturating_sub(self.now), Event::Host(id, HostEvent::Sync { life }));
        }
    }

    fn sync(&mut self, id: InstanceId) {
        let (now, moment) = (self.now, self.moment(id));
        let Some(agent) = self.hosts.get_mut(&id).and_then(|host| host.agent.as_mut()) else { return };
        if !agent.session || agent.syncing >= MOST || agent.sync_at.is_none_or(|at| at > now) {
            return;
        }
        let request = agent.machine.sync_request(moment);
        agent.sync_at = None;
        agent.last_sync = now;
        agent.syncing += 1;
        self.send(id, Of::Sync(request.seq), Call::Sync(request));
    }

    /// The outbox: one event at a time.
    fn deliver(&mut self, id: InstanceId, assignment: AssignmentId) {
        let Some(host) = self.hosts.get_mut(&id) else { return };
        let Some(delivery) = host.agent.as_mut().and_then(|agent| agent.deliveries.get_mut(&assignment)) else {
            return;
        };
        let Some(on_disk) = host.disk.assignments.get(&assignment) else { return };
        if delivery.telling || on_disk.acked >= delivery.last {
            return;
        }
        let Some(event) = usize::try_from(on_disk.acked).ok().and_then(|n| on_disk.events.get(n)).cloned() else {
            return;
        };
        delivery.telling = true;
        self.send(id, Of::Event(assignment, event.n), Call::Event(assignment, event));
    }

    /// The upload, as `Upload::run`.
    fn upload(&mut self, id: InstanceId, assignment: AssignmentId) {
        let now = self.now;
        let Some(host) = self.hosts.get_mut(&id) else { return };
        let life = host.life;
        let Some(delivery) = host.agent.as_mut().and_then(|agent| agent.deliveries.get_mut(&assignment)) else {
            return;
        };
        if delivery.sending {
            return;
        }
        let spool = host.containers.get(&assignment).map_or(0, |container| container.written(now));
        let (size, end) = (delivery.size, delivery.end);
        let there = match end {
            LogEnd::Open => spool,
            LogEnd::At(bytes) | LogEnd::Confirm(bytes) => bytes,
        };
        let chunk = there.saturating_sub(size).min(CHUNK);
        match end {
            LogEnd::Confirm(0) => self.handle(id, AgentEvent::LogComplete(assignment)),
            LogEnd::Open if chunk == 0 => self.after(SPOOL, Event::Host(id, HostEvent::Upload { life, assignment })),
            LogEnd::At(_) if chunk == 0 => {}
            LogEnd::Open | LogEnd::At(_) | LogEnd::Confirm(_) => {
                delivery.sending = true;
                self.send(id, Of::Log(assignment), Call::Log(assignment, size, chunk));
            }
        }
    }

    /// Sends a call over a network that may lose it.
    fn send(&mut self, id: InstanceId, of: Of, call: Call) {
        let sent = self.moment(id).boot;
        let Some(host) = self.hosts.get(&id) else { return };
        let (life, cut) = (host.life, self.now < host.requests_cut);
        let context = Context { life, sent, of };
        let latency = self.between(1, 300);
        if cut {
            self.tally.count(Fault::RequestsCut);
        }
        if cut || self.fails(Fault::RequestLost, 1) {
            return self.after(CALL_TIMEOUT, Event::Answer(id, context, Box::new(Reply::None)));
        }
        self.after(latency, Event::Call(id, context, Box::new(call)));
    }

    /// Sends an answer over a network that may lose it.
    pub(crate) fn answer(&mut self, to: InstanceId, context: Context, reply: Reply) {
        let latency = self.between(1, 300);
        let cut = self.hosts.get(&to).is_some_and(|host| self.now < host.answers_cut);
        if cut {
            self.tally.count(Fault::AnswersCut);
        }
        if cut || self.fails(Fault::AnswerLost, 1) {
            return self.after(CALL_TIMEOUT, Event::Answer(to, context, Box::new(Reply::None)));
        }
        self.after(latency, Event::Answer(to, context, Box::new(reply)));
    }

    /// Somebody with the machine's secret and another nonce.
    pub(crate) fn intrude(&mut self, id: InstanceId) {
        let context = Context { life: u64::MAX, sent: Duration::ZERO, of: Of::Nobody };
        let call = Call::Enrol { nonce: "another", proven: false, problems: Vec::new() };
        self.after(1, Event::Call(id, context, Box::new(call)));
    }

    /// The agent's enrolment arrives once more, as one does that a proxy repeats.
    pub(crate) fn enrol_again(&mut self, id: InstanceId) {
        let context = Context { life: u64::MAX, sent: Duration::ZERO, of: Of::Nobody };
        let call = Call::Enrol { nonce: NONCE, proven: false, problems: Vec::new() };
        self.after(1, Event::Call(id, context, Box::new(call)));
    }

    /// An answer, or its absence, arrives at an agent.
    pub(crate) fn answer_arrives(&mut self, id: InstanceId, context: Context, reply: Reply) {
        let now = self.now;
        let Some(host) = self.hosts.get_mut(&id).filter(|host| host.alive && host.life == context.life) else { return };
        let (life, Some(agent)) = (host.life, &mut host.agent) else { return };
        match (context.of, reply) {
            (Of::Nobody, _) => {}
            (Of::Enrol, Reply::Enrolled(policy)) => {
                host.disk.bearer = true;
                host.disk.policy = Some(policy.clone());
                agent.session = true;
                self.after(SAMPLE, Event::Host(id, HostEvent::Sample { life }));
                self.handle(id, AgentEvent::Enrolled(policy));
            }
            (Of::Enrol, Reply::Refused) => self.handle(id, AgentEvent::EnrolRefused),
            (Of::Enrol, Reply::Gone) => self.handle(id, AgentEvent::Gone),
            (Of::Enrol, _) => self.after(5 * SECOND, Event::Host(id, HostEvent::Enrol { life })),
            (Of::Sync(seq), reply) => {
                agent.syncing -= 1;
                let newest = seq.n == agent.machine.last_sent();
                match reply {
                    Reply::Synced(directives, lease_seconds) => {
                        agent.backoff = GAP;
                        let at = agent.last_sync + GAP;
                        if newest {
                            self.sync_by(id, at.max(now));
                        }
                        let event = AgentEvent::Synced { n: seq.n, sent: context.sent, directives, lease_seconds };
                        self.handle(id, event);
                    }
                    Reply::Gone => self.handle(id, AgentEvent::Gone),
                    _ if newest => {
                        agent.backoff = (agent.backoff * 2).min(15 * SECOND);
                        let at = now + agent.backoff;
                        self.sync_by(id, at);
                    }
                    _ => {}
                }
                // One that had to wait for a place.
                self.sync(id);
            }
            (Of::Event(assignment, n), reply) => {
                let Some(delivery) = agent.deliveries.get_mut(&assignment) else { return };
                delivery.telling = false;
                match reply {
                    Reply::Expected(expected) if expected != n => {
                        delivery.backoff = GAP;
                        let acked = expected.saturating_sub(1).min(delivery.last);
                        if let Some(on_disk) = host.disk.assignments.get_mut(&assignment) {
                            on_disk.acked = acked;
                        }
                        if acked >= n {
                            self.handle(id, AgentEvent::Acked(assignment, acked, context.sent));
                        }
                        self.after(1, Event::Host(id, HostEvent::Deliver { life, assignment }));
                    }
                    Reply::Gone => self.handle(id, AgentEvent::Gone),
                    _ => {
                        delivery.backoff = (delivery.backoff * 2).min(15 * SECOND);
                        let pause = delivery.backoff;
                        self.after(pause, Event::Host(id, HostEvent::Deliver { life, assignment }));
                    }
                }
            }
            (Of::Log(assignment), reply) => {
                let Some(delivery) = agent.deliveries.get_mut(&assignment) else { return };
                delivery.sending = false;
                match reply {
                    Reply::Expected(size) => {
                        let moved = size != delivery.size;
                        delivery.size = size;
                        delivery.backoff = if moved { GAP } else { (delivery.backoff * 2).min(15 * SECOND) };
                        let pause = if moved { 1 } else { delivery.backoff };
                        if matches!(delivery.end, LogEnd::Confirm(bytes) if size >= bytes) {
                            return self.handle(id, AgentEvent::LogComplete(assignment));
                        }
                        self.after(pause, Event::Host(id, HostEvent::Upload { life, assignment }));
                    }
                    Reply::Gone => self.handle(id, AgentEvent::Gone),
                    _ => {
                        delivery.backoff = (delivery.backoff * 2).min(15 * SECOND);
                        let pause = delivery.backoff;
                        self.after(pause, Event::Host(id, HostEvent::Upload { life, assignment }));
                    }
                }
            }
        }
    }

    /// Whether an agent is there and taken in.
    pub(crate) fn is_serving(&self, id: InstanceId) -> bool {
        self.hosts.get(&id).and_then(|host| host.agent.as_ref()).is_some_and(|agent| agent.session)
    }
}
