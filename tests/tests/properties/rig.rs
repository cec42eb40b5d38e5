//! A world with a provider and agents that do what random operations say.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use pilotlight_scaler::{
    fleet::{
        Event, Instance, Job, Plan, Settings, World,
        event::{CreateFailure, Enrol, Submission, Synced},
        instance::{Assignment, AssignmentState},
        plan,
    },
    provider::{Listed, Tags},
};
use pilotlight_sim::checks::{Checks, proved_gone};
use pilotlight_wire::{
    AssignmentId, InstanceId, JobId,
    agent::{AssignmentEvent, AssignmentEventKind, AssignmentReport, Gpu, Inventory, JobRef, Seq, Stage},
};
use uuid::Uuid;

use crate::settings::{LABELS, Shape, settings};

const NONCE: &str = "n";

pub(crate) struct Rig {
    pub(crate) world: World,
    pub(crate) now: Timestamp,
    pub(crate) jobs: Vec<JobId>,
    /// The provider's truth.
    pub(crate) listed: BTreeSet<InstanceId>,
    pub(crate) tags: BTreeMap<InstanceId, Tags>,
    /// What agents have whose scaler forgot them.
    pub(crate) forgotten: BTreeMap<InstanceId, Vec<AssignmentReport>>,
    pub(crate) shape: Shape,
    pub(crate) variant: u32,
    pub(crate) checks: Checks,
    seed: u64,
}

impl Rig {
    pub(crate) fn new(shape: Shape) -> Self {
        let now = "2026-01-01T00:00:00Z".parse().unwrap();
        let mut rig = Self {
            world: World::new(settings(shape, 0), 1, now, [], []),
            now,
            jobs: Vec::new(),
            listed: BTreeSet::new(),
            tags: BTreeMap::new(),
            forgotten: BTreeMap::new(),
            shape,
            variant: 0,
            checks: Checks::new(now),
            seed: 1,
        };
        rig.list();
        rig.pass();
        rig
    }

    pub(crate) fn with_seed(seed: u64, shape: Shape) -> Self {
        let mut rig = Self::new(shape);
        rig.seed = seed;
        rig.restart();
        rig.list();
        rig
    }

    pub(crate) fn settings(&self) -> Settings {
        settings(self.shape, self.variant)
    }

    pub(crate) fn advance(&mut self, by: SignedDuration) {
        self.now = self.now.saturating_add(by).unwrap();
    }

    pub(crate) fn apply(&mut self, event: Event) {
        let _refused_events_leave_the_world_as_it_was = self.world.apply(event, self.now);
    }

    /// A list that tells the truth.
    pub(crate) fn list(&mut self) {
        self.list_of(&self.listed.clone(), None);
    }

    pub(crate) fn list_of(&mut self, listed: &BTreeSet<InstanceId>, stopped: Option<InstanceId>) {
        self.advance(SignedDuration::from_millis(1));
        self.list_begun(self.now, listed, stopped);
    }

    pub(crate) fn list_begun(
        &mut self,
        began_at: Timestamp,
        listed: &BTreeSet<InstanceId>,
        stopped: Option<InstanceId>,
    ) {
        self.checks.omissions(&self.world, began_at, listed);
        let one = |&instance: &InstanceId| Listed {
            instance,
            alive: stopped != Some(instance),
            note: Some("stopped".to_owned()),
            tags: self.tags.get(&instance).cloned(),
        };
        let listed = listed.iter().map(one).collect();
        self.apply(Event::ListRead { began_at, listed });
        self.checks.vanished(&self.world, &self.listed);
    }

    pub(crate) fn nth(&self, n: usize, of: impl Fn(&Instance) -> bool) -> Option<InstanceId> {
        let found: Vec<InstanceId> = self.world.instances().filter(|i| of(i)).map(|i| i.id).collect();
        (!found.is_empty()).then(|| found[n % found.len()])
    }

    pub(crate) fn nth_assignment(&self, n: usize) -> Option<(InstanceId, AssignmentId, u64, JobId)> {
        let found: Vec<_> = self
            .world
            .instances()
            .flat_map(|i| i.live_assignments().map(move |(id, a)| (i.id, *id, a.last_event, a.job)))
            .collect();
        (!found.is_empty()).then(|| found[n % found.len()])
    }

    pub(crate) fn event(&mut self, n: usize, event: AssignmentEventKind) {
        if let Some((instance, assignment, last, _)) = self.nth_assignment(n) {
            let event = AssignmentEvent { n: last + 1, at: self.now, event };
            self.apply(Event::AssignmentEvent { instance, assignment, event });
        }
    }

    pub(crate) fn submit(&mut self, label: usize) {
        let id = JobId::from_uuid(Uuid::from_u128(self.jobs.len() as u128 + 1));
        self.jobs.push(id);
        self.apply(submission(id, LABELS[label]));
    }

    pub(crate) fn sync(&mut self, instance: InstanceId) {
        let assignments = match (self.world.instance(instance), self.forgotten.get(&instance)) {
            (Some(machine), _) => reports(&self.world, machine),
            (None, Some(kept)) => kept.clone(),
            (None, None) => return,
        };
        let seq = Seq { run: self.seed, n: 1 };
        let synced = Synced { instance, nonce: NONCE.to_owned(), seq, assignments, sample: None };
        self.apply(Event::Synced(Box::new(synced)));
    }

    pub(crate) fn enrol(&mut self, instance: InstanceId, healthy: bool) {
        let gpus = self
            .world
            .instance(instance)
            .map(|i| i.gpu_ids.iter().map(|id| Gpu { uuid: id.clone(), model: String::new(), pci: String::new() }))
            .into_iter()
            .flatten()
            .collect();
        self.apply(Event::Enrolled(Box::new(Enrol {
            instance,
            nonce: NONCE.to_owned(),
            agent_version: "1".to_owned(),
            agent_started_at: self.now,
            inventory: Inventory { gpus, ..Inventory::default() },
            problems: if healthy { Vec::new() } else { vec!["Docker does not answer".to_owned()] },
            proven: false,
        })));
    }

    pub(crate) fn create_fails(&mut self, instance: InstanceId, capacity: bool) {
        let class = if capacity {
            CreateFailure::Capacity
        } else {
            self.listed.insert(instance);
            CreateFailure::MayExist
        };
        self.apply(Event::CreateFailed { instance, class, message: "no".to_owned() });
    }

    /// What a new scaler makes of what the last one committed.
    pub(crate) fn restart(&mut self) {
        self.seed += 1;
        fn copy<T: serde::Serialize + serde::de::DeserializeOwned>(of: &T) -> T {
            serde_json::from_str(&serde_json::to_string(of).unwrap()).unwrap()
        }
        let instances: Vec<Instance> = self.world.instances().map(copy).collect();
        let jobs: Vec<Job> = self.world.jobs().map(copy).collect();
        self.world = World::new(self.settings(), self.seed, self.now, instances, jobs);
        self.checks.restart(self.now.saturating_add(self.settings().lease).unwrap());
    }

    /// A new scaler that knows nothing.
    pub(crate) fn lose_database(&mut self) {
        self.seed += 1;
        for instance in self.world.instances().filter(|i| i.is_live() && i.enrolment.is_some()) {
            self.forgotten.insert(instance.id, reports(&self.world, instance));
        }
        self.world = World::new(self.settings(), self.seed, self.now, [], []);
        self.checks.forget(self.now.saturating_add(self.settings().lease).unwrap());
        self.list();
    }

    /// One pass as the control task makes it, with the invariants checked on the way.
    pub(crate) fn pass(&mut self) -> Plan {
        let planned = plan(&self.world, self.now);
        self.checks.planned(&self.world, &planned, self.now);
        self.world.record(&planned, self.now);
        let again = plan(&self.world, self.now);
        assert!(again.actions.is_empty(), "planning again after recording: {:?}", again.actions);
        let dirty = self.world.take_dirty();
        proved_gone(&self.world, &self.listed);
        self.checks.recorded(&self.world, &planned);
        self.world.forget_settled(&dirty);
        for instance in self.world.instances() {
            self.tags.entry(instance.id).or_insert_with(|| Tags {
                pool: instance.pool.clone(),
                placement: instance.placement.name.clone(),
                created_at: instance.created_at,
                gpu_ids: instance.gpu_ids.clone(),
            });
        }
        planned
    }
}

pub(crate) fn submission(id: JobId, label: &str) -> Event {
    Event::Submitted(Box::new(Submission {
        id,
        label: label.parse().unwrap(),
        name: String::new(),
        body_hash: "hash".to_owned(),
        timeout: None,
        priority: None,
    }))
}

pub(crate) fn reports(world: &World, machine: &Instance) -> Vec<AssignmentReport> {
    let one = |(id, assignment): (&AssignmentId, &Assignment)| {
        let job = world.job(assignment.job).map(|job| JobRef {
            id: job.id,
            forge: job.forge.clone(),
            label: job.label.clone(),
            name: job.name.clone(),
        });
        AssignmentReport {
            id: *id,
            job,
            gpus: assignment.gpu_ids.clone(),
            remaining_seconds: None,
            stage: if assignment.state == AssignmentState::Running { Stage::Running } else { Stage::Accepted },
            detail: None,
        }
    };
    machine.live_assignments().map(one).collect()
}
