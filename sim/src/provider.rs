//! A provider that fails in every way in which they do.

use std::collections::{BTreeMap, BTreeSet};

use pilotlight_scaler::{
    fleet::{Event as FleetEvent, Instance, event::CreateFailure},
    provider::{Listed, Tags},
};
use pilotlight_wire::{GpuId, InstanceId};

use crate::{Event, Failure, Fault, MINUTE, SECOND, Sim, host::Host, scaler::ScalerEvent, short};

/// What the provider has.
#[derive(Debug, Default)]
pub(crate) struct Provider {
    pub(crate) machines: BTreeMap<InstanceId, Machine>,
    /// Machines made in all.
    pub(crate) made: usize,
    /// Until when the list cannot be read.
    pub(crate) list_fails_until: u64,
    /// An older list, and when it was true.
    stale: (u64, Vec<Listed>),
}

#[derive(Clone, Debug)]
pub(crate) struct Machine {
    tags: Tags,
    /// Why it has stopped for good.
    pub(crate) stopped: Option<String>,
    /// Whether a destroy is under way.
    leaving: bool,
}

/// What happens at the provider.
#[derive(Debug)]
pub(crate) enum CloudEvent {
    /// A create call takes effect.
    Create { epoch: u64, instance: Box<Instance> },
    /// A machine that was said not to be made appears.
    Appears { instance: Box<Instance> },
    /// A destroy call takes effect.
    Destroy { epoch: u64, instance: InstanceId },
    /// A machine is no longer there.
    Vanishes(InstanceId),
}

impl Sim {
    pub(crate) fn cloud(&mut self, event: CloudEvent) -> Failure {
        match event {
            CloudEvent::Create { epoch, instance } => self.create(epoch, *instance),
            // Made by now, by another call.
            CloudEvent::Appears { instance } if self.provider.machines.contains_key(&instance.id) => {}
            CloudEvent::Appears { instance } => {
                self.say(|_| format!("machine {} appears late", short(&instance.id)));
                self.make(&instance);
            }
            CloudEvent::Destroy { epoch, instance } => self.destroy(epoch, instance),
            CloudEvent::Vanishes(id) => self.vanish(id),
        }
        Ok(())
    }

    /// Tells a scaler what came of a call, if it still lives.
    fn tell(&mut self, epoch: u64, event: FleetEvent) {
        let delay = self.between(1, 2 * SECOND);
        self.after(delay, Event::Scaler(ScalerEvent::Told { epoch, event: Box::new(event) }));
    }

    fn create(&mut self, epoch: u64, instance: Instance) {
        let id = instance.id;
        if epoch != self.scaler.epoch {
            self.struck(Fault::OutlivesScaler, "create");
        }
        let failed =
            |class, message: &str| FleetEvent::CreateFailed { instance: id, class, message: message.to_owned() };
        if self.provider.machines.contains_key(&id) {
            return self.tell(epoch, FleetEvent::Created(id));
        }
        if self.fails(Fault::NoCapacity, 2) {
            return self.tell(epoch, failed(CreateFailure::Capacity, "no machine of this kind"));
        }
        if self.fails(Fault::CreateInvalid, 1) {
            return self.tell(epoch, failed(CreateFailure::Invalid, "bad image"));
        }
        if self.fails(Fault::AppearsLate, 1) {
            let class = if self.one_in(2) { CreateFailure::Capacity } else { CreateFailure::MayExist };
            let delay = self.between(5 * SECOND, MINUTE);
            self.after(delay, Event::Cloud(CloudEvent::Appears { instance: Box::new(instance) }));
            return self.tell(epoch, failed(class, "internal error"));
        }
        self.make(&instance);
        if self.fails(Fault::CreateReplyLost, 2) {
            self.tell(epoch, failed(CreateFailure::MayExist, "timeout"));
        } else {
            self.tell(epoch, FleetEvent::Created(id));
        }
    }

    fn make(&mut self, instance: &Instance) {
        let id = instance.id;
        let tags = Tags {
            pool: instance.pool.clone(),
            placement: instance.placement.name.clone(),
            created_at: instance.created_at,
            gpu_ids: instance.gpu_ids.clone(),
        };
        self.provider.machines.insert(id, Machine { tags, stopped: None, leaving: false });
        self.provider.made += 1;
        let gpus: BTreeSet<GpuId> = instance.gpu_ids.iter().cloned().collect();
        let mut delay = self.between(5 * SECOND, 2 * MINUTE);
        if self.fails(Fault::BootHangs, 1) {
            delay = u64::MAX;
        } else if self.fails(Fault::SlowBoot, 2) {
            delay *= 20;
        }
        self.hosts.insert(id, Host::new(id, gpus, self.now));
        self.say(|_| format!("machine {} of {} made", short(&id), instance.pool));
        if delay < u64::MAX {
            self.after(delay, Event::Host(id, crate::host::HostEvent::AgentUp { life: 0 }));
        }
    }

    fn destroy(&mut self, epoch: u64, id: InstanceId) {
        if epoch != self.scaler.epoch {
            self.struck(Fault::OutlivesScaler, "destroy");
        }
        if self.fails(Fault::DestroyFails, 4) {
            return self.tell(epoch, FleetEvent::DestroyFailed { instance: id, message: "try again later".to_owned() });
        }
        if !self.fails(Fault::DestroyIgnored, 1)
            && let Some(machine) = self.provider.machines.get_mut(&id)
            && !std::mem::replace(&mut machine.leaving, true)
        {
            let delay = self.between(0, 20 * SECOND);
            self.after(delay, Event::Cloud(CloudEvent::Vanishes(id)));
        }
        self.tell(epoch, FleetEvent::DestroyAccepted(id));
    }

    pub(crate) fn vanish(&mut self, id: InstanceId) {
        self.say(|_| format!("machine {} is gone", short(&id)));
        self.provider.machines.remove(&id);
        self.hosts.remove(&id);
    }

    /// What a list call sees; `None` when it fails.
    pub(crate) fn list(&mut self) -> Option<Vec<Listed>> {
        let long = self.now < self.provider.list_fails_until;
        if long || self.fails(Fault::ListFails, 1) {
            if long {
                self.tally.count(Fault::ListFails);
            }
            return None;
        }
        let (since, old) = &self.provider.stale;
        if self.now - since < MINUTE {
            let old = old.clone();
            if self.fails(Fault::ListStale, 1) {
                return Some(old);
            }
        }
        let one = |(id, machine): (&InstanceId, &Machine)| Listed {
            instance: *id,
            alive: machine.stopped.is_none(),
            note: machine.stopped.clone(),
            tags: Some(machine.tags.clone()),
        };
        let listed: Vec<Listed> = self.provider.machines.iter().map(one).collect();
        if self.now - self.provider.stale.0 >= 30 * SECOND {
            self.provider.stale = (self.now, listed.clone());
        }
        Some(listed)
    }
}
