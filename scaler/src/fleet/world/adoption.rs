//! Machines that carry our mark and that the world does not know: a lost or old database (link 1).
//!
//! A machine whose agent speaks is taken in as it is, with every job that the agent lists; one whose agent stays
//! silent for as long as a boot may take, and a lease, is destroyed. Nothing else follows from not being known.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use pilotlight_wire::{
    AssignmentId, InstanceId, Name,
    agent::{AssignmentReport, Inventory, Stage},
    api::Phases,
};

use super::{LEASE_MARGIN, World, cpu_jobs, later};
use crate::{
    fleet::{
        Job, Placement, ProviderConfig,
        demand::JobState,
        instance::{Assignment, AssignmentState, Call, Enrolment, Instance, Phase},
        placement::LocalPlacement,
        reason::Cause,
    },
    provider::Tags,
};

/// How long a machine may boot whose pool the config does not know: the config's own default.
const BOOT_TIMEOUT: SignedDuration = SignedDuration::from_mins(20);

/// From assignment to deadline, where neither the agent nor the config says: the config's own default.
const DEFAULT_TIMEOUT: SignedDuration = SignedDuration::from_hours(6);

/// What a provider lists under our name and the world does not know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Orphan {
    /// Since when.
    pub since: Timestamp,
    /// What is written on it, as far as that can be read.
    pub tags: Option<Tags>,
}

impl World {
    /// What providers list under our name and nobody knows.
    pub fn orphans(&self) -> impl Iterator<Item = (&InstanceId, &Orphan)> {
        self.orphans.iter()
    }

    /// Jobs without GPUs that a machine may run at once, known or about to be adopted.
    #[must_use]
    pub fn cpu_jobs(&self, id: InstanceId) -> Option<u32> {
        match self.instances.get(&id) {
            Some(instance) => Some(instance.cpu_jobs),
            None => self.orphans.get(&id).map(|orphan| self.rebuilt(id, orphan, orphan.since).cpu_jobs),
        }
    }

    /// When a silent orphan is given up: as long after it was found as a boot and a lease may take.
    pub(in crate::fleet) fn orphan_bound(&self, orphan: &Orphan) -> Timestamp {
        let pool = orphan.tags.as_ref().and_then(|tags| self.settings.pools.get(&tags.pool));
        let boot_timeout = pool.map_or(BOOT_TIMEOUT, |pool| pool.boot_timeout);
        let found = orphan.since.max(self.started_at);
        let silent = later(later(later(found, boot_timeout), self.settings.lease), LEASE_MARGIN);
        silent.max(self.grace_until)
    }

    /// Takes in a machine whose agent has proved by its bearer that an earlier scaler took it in.
    pub(super) fn adopt(&mut self, id: InstanceId, nonce: String, busy: bool, now: Timestamp) -> bool {
        let Some(orphan) = self.orphans.remove(&id) else { return false };
        let mut instance = self.rebuilt(id, &orphan, now);
        instance.phase = Phase::Ready { idle_since: now };
        // Whether a machine for one job has had it is not known; it gets no other.
        instance.assigned_total = u32::from(instance.single_use || busy);
        instance.enrolment = Some(Enrolment {
            nonce,
            at: now,
            agent_started_at: instance.created_at,
            agent_version: "unknown".to_owned(),
            inventory: Inventory::default(),
        });
        self.dirty.instances.insert(id);
        self.instances.insert(id, instance);
        true
    }

    /// Takes in jobs that an agent lists and the world does not know.
    pub(super) fn adopt_assignments(
        &mut self,
        id: InstanceId,
        reports: &BTreeMap<AssignmentId, AssignmentReport>,
        now: Timestamp,
    ) {
        let Some(instance) = self.instances.get(&id) else { return };
        let unknown: Vec<&AssignmentReport> =
            reports.values().filter(|report| !instance.assignments.contains_key(&report.id)).collect();
        for report in unknown {
            self.adopt_assignment(id, report, now);
        }
    }

    fn adopt_assignment(&mut self, id: InstanceId, report: &AssignmentReport, now: Timestamp) {
        // One that never arrived is nobody's job.
        let (Some(reference), Some(instance)) = (&report.job, self.instances.get(&id)) else { return };
        let label = self.settings.labels.get(&reference.label);
        let left =
            report.remaining_seconds.map(|left| SignedDuration::from_secs(i64::try_from(left).unwrap_or(i64::MAX)));
        let deadline = later(now, left.unwrap_or(DEFAULT_TIMEOUT));
        let running = !matches!(report.stage, Stage::Accepted | Stage::Preparing);
        let pool = instance.pool.clone();
        let runner = self.adopted_runner(&reference.forge);
        let job = self.jobs.entry(reference.id).or_insert_with(|| Job {
            id: reference.id,
            forge: reference.forge.clone(),
            label: reference.label.clone(),
            pool,
            gpus: u32::try_from(report.gpus.len()).unwrap_or(u32::MAX),
            priority: label.map_or(0, |label| label.priority),
            timeout: label.map_or(DEFAULT_TIMEOUT, |label| label.timeout),
            name: reference.name.clone(),
            body_hash: String::new(),
            queued_at: now,
            state: JobState::Queued,
            refusal: None,
            phases: Phases { queued: Some(now), ..Phases::default() },
            instance: None,
            runner,
        });
        // A job that is over or on another machine is what the world says it is; its claim is still this machine's.
        if job.is_queued() {
            job.state = JobState::Placed { instance: id, assignment: report.id };
            job.instance = Some(id);
            job.phases.assigned = Some(now);
            job.phases.started = running.then_some(now);
        }
        self.dirty.jobs.insert(reference.id);
        let assignment = Assignment {
            job: reference.id,
            // What is over holds none any more; they may be another job's by now.
            gpu_ids: if report.stage == Stage::Finished { Vec::new() } else { report.gpus.clone() },
            assigned_at: now,
            deadline,
            cancel: false,
            withdrawn: false,
            last_event: 0,
            adopted: true,
            state: if running { AssignmentState::Running } else { AssignmentState::Assigned },
        };
        if let Some(instance) = self.instance_mut(id) {
            instance.assignments.insert(report.id, assignment);
            instance.assigned_total = instance.assigned_total.max(1);
        }
    }

    /// Ends what was adopted and is no longer listed: its agent had been told by an earlier scaler that its result was
    /// taken, and that was lost with the database.
    pub(super) fn end_forgotten(&mut self, id: InstanceId, now: Timestamp) {
        let (Some(instance), Some(seen)) = (self.instances.get(&id), self.seen.get(&id)) else { return };
        let forgotten: Vec<_> = instance
            .live_assignments()
            .filter(|(id, assignment)| assignment.adopted && !seen.reports.contains_key(id))
            .map(|(id, assignment)| (*id, assignment.job))
            .collect();
        for (assignment, job) in forgotten {
            self.result_lost(job, now);
            if let Some(machine) = self.instance_mut(id)
                && let Some(assignment) = machine.assignments.get_mut(&assignment)
            {
                assignment.state = AssignmentState::Ended { at: now, log_closed: true };
                super::agent::rest(machine, now);
            }
        }
    }

    /// An admin wants them gone.
    pub(super) fn reap_orphans(&mut self, now: Timestamp) -> Vec<InstanceId> {
        let all: Vec<InstanceId> = self.orphans.keys().copied().collect();
        for id in &all {
            self.condemn(*id, Cause::Reaped, now);
        }
        all
    }

    /// Makes an orphan a machine that is to be destroyed; from here on its end is proved like any other's.
    pub(in crate::fleet) fn condemn(&mut self, id: InstanceId, cause: Cause, now: Timestamp) {
        let Some(orphan) = self.orphans.remove(&id) else { return };
        let mut instance = self.rebuilt(id, &orphan, now);
        instance.phase = Phase::Terminating { cause, destroy: Call::due(now), absent: 0 };
        self.dirty.instances.insert(id);
        self.instances.insert(id, instance);
    }

    /// A machine as far as its tags tell. A pool or placement that the config no longer has keeps its name.
    fn rebuilt(&self, id: InstanceId, orphan: &Orphan, now: Timestamp) -> Instance {
        let tags = orphan.tags.clone();
        let gpu_ids = tags.as_ref().map(|tags| tags.gpu_ids.clone()).unwrap_or_default();
        let placement = match tags.as_ref().and_then(|tags| self.settings.placements.get(&tags.placement)) {
            Some(placement) => placement.clone(),
            None => Placement {
                name: tags.as_ref().map_or_else(Name::unknown, |tags| tags.placement.clone()),
                gpus: u32::try_from(gpu_ids.len()).unwrap_or(u32::MAX),
                max_instances: None,
                price_per_hour: None,
                provider: ProviderConfig::Local(LocalPlacement {
                    gpu_ids: gpu_ids.clone(),
                    agent: None,
                    host_image: false,
                }),
            },
        };
        let pool = tags.as_ref().and_then(|tags| self.settings.pools.get(&tags.pool));
        let created_at = tags.as_ref().map_or(orphan.since, |tags| tags.created_at.min(orphan.since));
        let lifetime = pool.map_or(SignedDuration::from_hours(24), |pool| pool.max_lifetime);
        Instance {
            id,
            pool: tags.map_or_else(Name::unknown, |tags| tags.pool),
            cpu_jobs: pool.map_or(0, |pool| cpu_jobs(&placement, pool.cpu_jobs)),
            placement,
            gpu_ids,
            phase: Phase::Booting,
            created_at,
            changed_at: now,
            boot_deadline: now,
            lifetime_end: later(created_at, lifetime),
            held_until: None,
            single_use: pool.is_some_and(|pool| !pool.reuse),
            assigned_total: 0,
            enrolment: None,
            assignments: BTreeMap::new(),
        }
    }
}
