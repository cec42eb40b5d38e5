//! What people do, and what befalls machines and networks.

use jiff::SignedDuration;
use pilotlight_scaler::fleet::{Event as FleetEvent, event::Submission};
use pilotlight_wire::{InstanceId, JobId, api::DrainTarget};
use rand::RngExt;
use uuid::Uuid;

use crate::{
    Event, Failure, Fault, HOUR, MINUTE, SECOND, Sim, provider::CloudEvent, settings::LABELS, short, truth::JobTruth,
};

impl Sim {
    /// Clients submit some jobs, and come again.
    pub(crate) fn submit(&mut self) -> Failure {
        if self.is_calm || self.truth.jobs.len() >= self.truth.wanted {
            return Ok(());
        }
        let burst = if self.truth.wanted > 500 { 50 } else { 4 };
        for _ in 0..self.between(1, burst) {
            let id = JobId::from_uuid(Uuid::from_u128(self.truth.jobs.len() as u128 + 1));
            let longest = [MINUTE, 20 * MINUTE, 4 * HOUR][self.rng.random_range(0..3)];
            let job = JobTruth {
                label: LABELS[self.rng.random_range(0..LABELS.len())],
                runs_for: self.between(SECOND, longest),
                bytes: self.between(0, 3_000_000),
                code: if self.one_in(5) { 1 } else { 0 },
                starts: 0,
                completed: false,
                cancelled: false,
                accepted: false,
                forgotten: false,
                settled: None,
            };
            self.truth.jobs.insert(id, job);
            self.submit_one(id)?;
        }
        let pause = self.calm_at / (self.truth.wanted as u64 / (burst / 2).max(1) + 1);
        let delay = self.between(SECOND, pause.max(2 * SECOND));
        self.after(delay, Event::Submit);
        Ok(())
    }

    fn submit_one(&mut self, id: JobId) -> Failure {
        let Some(truth) = self.truth.jobs.get(&id).filter(|_| self.scaler.up) else { return Ok(()) };
        let Ok(label) = truth.label.parse() else { return Ok(()) };
        // The payload is committed with the job; a scaler that dies before takes both along.
        let new = !self.disk.jobs.contains_key(&id);
        if new {
            self.disk.payloads.insert(id);
        }
        self.say(|sim| format!("client submits {} ({})", short(&id), sim.truth.jobs[&id].label));
        let submission =
            Submission { id, label, name: String::new(), body_hash: "hash".to_owned(), timeout: None, priority: None };
        let result = self.apply(FleetEvent::Submitted(Box::new(submission)))?;
        // Whatever the client heard: what is committed is accepted.
        let stored = self.disk.jobs.contains_key(&id);
        if !stored {
            self.disk.payloads.remove(&id);
        }
        if let Some(truth) = self.truth.jobs.get_mut(&id) {
            truth.accepted |= stored;
        }
        match result {
            Some(Ok(_)) if !stored => Err(format!("job {id} was accepted and not stored")),
            _ => Ok(()),
        }
    }

    fn some_host(&mut self) -> Option<InstanceId> {
        let all: Vec<InstanceId> = self.hosts.iter().filter(|(_, host)| host.alive).map(|(id, _)| *id).collect();
        (!all.is_empty()).then(|| all[self.rng.random_range(0..all.len())])
    }

    fn some_job(&mut self) -> Option<JobId> {
        let open = self.truth.jobs.iter().filter(|(_, job)| job.accepted && job.settled.is_none());
        let all: Vec<JobId> = open.map(|(id, _)| *id).collect();
        (!all.is_empty()).then(|| all[self.rng.random_range(0..all.len())])
    }

    /// Something happens, and something else after a while.
    pub(crate) fn chaos(&mut self) -> Failure {
        if self.is_calm {
            return Ok(());
        }
        let next = self.between(SECOND, 2 * self.chaos_every);
        self.after(next, Event::Chaos);
        match self.rng.random_range(0..24) {
            0..=3 => self.cut_network(),
            4 | 5 => {
                if let Some(id) = self.some_host().filter(|id| self.hosts[id].agent.is_some()) {
                    self.struck(Fault::AgentKilled, &short(&id));
                    self.kill_agent(id);
                }
            }
            6 => self.machine_dies(),
            7 => {
                if let Some(id) = self.some_host() {
                    self.struck(Fault::DeletedByHand, &short(&id));
                    self.after(0, Event::Cloud(CloudEvent::Vanishes(id)));
                }
            }
            8 => {
                if let Some(id) = self.some_host().filter(|id| self.is_serving(*id)) {
                    if self.one_in(2) {
                        self.struck(Fault::Intruder, &short(&id));
                        self.intrude(id);
                    } else {
                        self.struck(Fault::EnrolledAgain, &short(&id));
                        self.enrol_again(id);
                    }
                }
            }
            9 => self.container_removed(),
            10 => {
                let off =
                    i64::try_from(self.between(0, 48 * HOUR)).unwrap_or(0) - i64::try_from(24 * HOUR).unwrap_or(0);
                if let Some(id) = self.some_host() {
                    self.struck(Fault::WrongClock, &short(&id));
                    if let Some(host) = self.hosts.get_mut(&id) {
                        host.clock_off = off;
                    }
                }
            }
            11 => {
                let until = self.now + self.between(MINUTE, 30 * MINUTE);
                self.provider.list_fails_until = until;
            }
            12 | 13 => {
                let away = self.between(0, 2 * MINUTE);
                self.kill_scaler(away, false);
            }
            14 => {
                let away = self.between(10 * MINUTE, 3 * HOUR);
                self.struck(Fault::LongStop, "");
                self.kill_scaler(away, false);
            }
            15 if self.one_in(3) => {
                let away = self.between(SECOND, 5 * MINUTE);
                self.kill_scaler(away, true);
            }
            16 if self.scaler.up => {
                let far = SignedDuration::from_secs(i64::try_from(self.between(61, 12 * 3600)).unwrap_or(61));
                let by = if self.one_in(2) { far } else { -far };
                return self.step_clock(by);
            }
            17..=19 => return self.client(),
            20..=23 => return self.admin(),
            _ => {}
        }
        Ok(())
    }

    fn cut_network(&mut self) {
        let longest = [MINUTE, 20 * MINUTE, 4 * HOUR][self.rng.random_range(0..3)];
        let until = self.now + self.between(SECOND, longest);
        let (requests, answers) = [(true, true), (true, false), (false, true)][self.rng.random_range(0..3)];
        let Some(id) = self.some_host() else { return };
        if let Some(host) = self.hosts.get_mut(&id) {
            if requests {
                host.requests_cut = until;
            }
            if answers {
                host.answers_cut = until;
            }
        }
        let seconds = (until - self.now) / SECOND;
        self.say(|sim| format!("FAULT network of {} cut for {seconds} s ({requests}, {answers})", sim.named(id)));
    }

    fn machine_dies(&mut self) {
        let Some(id) = self.some_host() else { return };
        self.struck(Fault::MachineDies, &short(&id));
        if let Some(host) = self.hosts.get_mut(&id) {
            host.alive = false;
            host.agent = None;
            host.life += 1;
        }
        // Its provider notices, or not.
        if self.one_in(2)
            && let Some(machine) = self.provider.machines.get_mut(&id)
        {
            machine.stopped = Some("hardware failure".to_owned());
        }
    }

    fn container_removed(&mut self) {
        let Some(id) = self.some_host() else { return };
        let running = |host: &crate::host::Host| {
            host.containers.iter().find(|(_, container)| container.exited.is_none()).map(|(id, _)| *id)
        };
        let Some(assignment) = self.hosts.get(&id).and_then(running) else { return };
        self.struck(Fault::ContainerRemoved, &short(&id));
        self.kill_container(id, assignment);
    }

    fn client(&mut self) -> Failure {
        let Some(id) = self.some_job().filter(|_| self.scaler.up) else { return Ok(()) };
        if self.one_in(3) {
            self.struck(Fault::SubmittedAgain, &short(&id));
            return if self.truth.jobs[&id].forgotten { Ok(()) } else { self.submit_one(id) };
        }
        self.struck(Fault::Cancelled, &short(&id));
        if let Some(truth) = self.truth.jobs.get_mut(&id) {
            truth.cancelled = true;
        }
        self.apply(FleetEvent::JobCancelled(id)).map(drop)
    }

    fn admin(&mut self) -> Failure {
        if !self.scaler.up {
            return Ok(());
        }
        let some = self.some_host();
        let event = match (self.rng.random_range(0..8), some) {
            (0, Some(id)) => {
                self.struck(Fault::Drained, &short(&id));
                FleetEvent::Drain { target: DrainTarget::Instance(id), now: false }
            }
            (1, Some(id)) => {
                self.struck(Fault::DrainedNow, &short(&id));
                let ends = self.scaler.world.instance(id).into_iter().flat_map(|instance| instance.live_assignments());
                for job in ends.map(|(_, assignment)| assignment.job).collect::<Vec<_>>() {
                    if let Some(truth) = self.truth.jobs.get_mut(&job) {
                        truth.cancelled = true;
                    }
                }
                FleetEvent::Drain { target: DrainTarget::Instance(id), now: true }
            }
            (2, _) => {
                self.struck(Fault::Drained, "all");
                let later = self.between(MINUTE, HOUR);
                self.after(
                    later,
                    Event::Scaler(crate::scaler::ScalerEvent::Told {
                        epoch: self.scaler.epoch,
                        event: Box::new(FleetEvent::Resumed),
                    }),
                );
                FleetEvent::Drain { target: DrainTarget::All, now: false }
            }
            (3, Some(id)) => {
                self.struck(Fault::Held, &short(&id));
                let longest = if self.one_in(10) { 24 * 60 } else { 3 * 60 };
                let minutes = i64::try_from(self.between(1, longest)).unwrap_or(1);
                FleetEvent::Held { instance: id, duration: SignedDuration::from_mins(minutes) }
            }
            (4, Some(id)) => FleetEvent::Released(id),
            (5 | 6, _) => {
                let variant = self.rng.random_range(0..4);
                self.struck(Fault::Reloaded, &format!("variant {variant}"));
                self.scaler.settings = self.shape.settings(variant, true);
                FleetEvent::Reloaded(Box::new(self.scaler.settings.clone()))
            }
            (7, _) => {
                self.struck(Fault::Reaped, "");
                FleetEvent::ReapOrphans
            }
            _ => return Ok(()),
        };
        self.apply(event).map(drop)
    }

    /// All faults end. What is broken stays broken; everybody answers again.
    pub(crate) fn calm(&mut self) -> Failure {
        self.say(|_| "all faults end".to_owned());
        self.is_calm = true;
        self.trouble = 0;
        self.provider.list_fails_until = 0;
        for host in self.hosts.values_mut() {
            (host.requests_cut, host.answers_cut) = (0, 0);
        }
        self.scaler.settings = self.shape.settings(0, false);
        if self.scaler.up {
            let settings = Box::new(self.scaler.settings.clone());
            self.apply(FleetEvent::Reloaded(settings))?;
            self.apply(FleetEvent::Resumed)?;
        } else {
            self.after(0, Event::Scaler(crate::scaler::ScalerEvent::Up { lost: false }));
        }
        self.after(MINUTE, Event::Look);
        Ok(())
    }
}
