//! What can happen in a script.

use anyhow::{Context, Result, bail};
use jiff::SignedDuration;
use pilotlight_runtime::units::Span;
use pilotlight_scaler::fleet::{
    Event, Instance, Job, World,
    demand::JobState,
    event::{CreateFailure, Enrol, Submission, Synced},
    forge::{ForgeJob, Wanted},
    instance::Assignment,
};
use pilotlight_wire::{
    AssignmentId, JobId, Task, Verdict,
    agent::{AssignmentEvent, AssignmentEventKind, AssignmentReport, Finished, Gpu, Inventory, JobRef, Seq, Stage},
    api::DrainTarget,
};
use uuid::Uuid;

use super::{NONCE, Script};

impl Script {
    pub(super) fn apply(&mut self, event: Event) {
        let now = self.now;
        if let Err(refusal) = self.world().apply(event, now) {
            self.say(&format!("refused: {refusal}"));
        }
    }

    pub(super) fn event(&mut self, words: &[&str]) -> Result<()> {
        let second = words.get(1).copied();
        let on = || second.context("what it is about is wanted");
        match words[0] {
            "submit" => {
                let (name, label) = (on()?, words.get(2).context("a label is wanted")?);
                let id = JobId::from_uuid(Uuid::from_u128(self.jobs.len() as u128 + 1));
                self.jobs.insert(name.to_owned(), id);
                self.apply(Event::Submitted(Box::new(Submission {
                    id,
                    label: label.parse()?,
                    name: name.to_owned(),
                    body_hash: "hash".to_owned(),
                    timeout: None,
                    priority: None,
                })));
            }
            "cancel" => self.apply(Event::JobCancelled(self.job(on()?)?)),
            "created" => {
                let id = self.instance(on()?)?;
                self.listed.insert(id);
                self.apply(Event::Created(id));
            }
            "create-fails" => {
                let instance = self.instance(on()?)?;
                let class = match *words.get(2).context("capacity, invalid or unclear is wanted")? {
                    "capacity" => CreateFailure::Capacity,
                    "invalid" => CreateFailure::Invalid,
                    "unclear" => CreateFailure::MayExist,
                    other => bail!("{other}: capacity, invalid or unclear is wanted"),
                };
                self.apply(Event::CreateFailed { instance, class, message: words[3..].join(" ") });
            }
            "appears" => drop(self.listed.insert(self.instance(on()?)?)),
            "vanishes" => drop(self.listed.remove(&self.instance(on()?)?)),
            "enrols" => self.enrol(on()?, &words[2..])?,
            "silent" => drop(self.silent.insert(self.instance(on()?)?)),
            "speaks" => drop(self.silent.remove(&self.instance(on()?)?)),
            "starts" => {
                self.assignment_event(on()?, AssignmentEventKind::Started { image_ready_at: self.now, image_id: None })?
            }
            "finishes" => {
                let exit_code: i32 = words.get(2).map_or(Ok(0), |code| code.parse())?;
                let verdict = if exit_code == 0 { Verdict::Success } else { Verdict::Failure };
                let finished = Finished {
                    verdict,
                    exit_code: Some(exit_code),
                    reason: None,
                    log_bytes: 0,
                    log_gap: false,
                    usage: None,
                };
                let job = self.job(on()?)?;
                self.assignment_event(on()?, AssignmentEventKind::Finished(finished))?;
                self.apply(Event::LogClosed(job));
            }
            "refuses" => {
                let reason = words[2..].join(" ");
                self.assignment_event(on()?, AssignmentEventKind::Refused { reason })?;
            }
            "destroyed" => {
                let id = self.instance(on()?)?;
                self.listed.remove(&id);
                self.apply(Event::DestroyAccepted(id));
            }
            // Accepted, and the list shows it for a while.
            "destroying" => self.apply(Event::DestroyAccepted(self.instance(on()?)?)),
            "destroy-fails" => {
                let instance = self.instance(on()?)?;
                self.apply(Event::DestroyFailed { instance, message: words[2..].join(" ") });
            }
            "asks" => self.asks(on()?, &words[2..])?,
            "leaves" => drop(self.queued.remove(on()?)),
            "granted" => {
                let job = self.job(on()?)?;
                self.apply(Event::Granted { job, id: 1 });
            }
            "grant-fails" => {
                let (job, message) = (self.job(on()?)?, words[2..].join(" "));
                self.apply(Event::GrantFailed { job, message });
            }
            "takes" => {
                let name = words.get(2).context("the name of a job is wanted")?;
                let (_, wanted) = self.queued.remove(*name).with_context(|| format!("{name} does not wait"))?;
                let (repository, job) = (wanted.job.repository, wanted.job.name);
                let task = Task { id: 1, repository, run: wanted.job.run, job, steps: 2 };
                self.assignment_event(on()?, AssignmentEventKind::Picked(task))?;
            }
            "deregistered" => self.apply(Event::RegistrationOver(self.job(on()?)?)),
            "deregister-fails" => {
                let (job, message) = (self.job(on()?)?, words[2..].join(" "));
                self.apply(Event::RegistrationFailed { job, message });
            }
            "forges-fail" => self.forges_fail = true,
            "forges-work" => self.forges_fail = false,
            "list-fails" => self.list_fails = true,
            "list-works" => self.list_fails = false,
            "drain" => {
                let target = match on()? {
                    "all" => DrainTarget::All,
                    one => DrainTarget::Instance(self.instance(one)?),
                };
                self.apply(Event::Drain { target, now: words.contains(&"now") });
            }
            "resume" => self.apply(Event::Resumed),
            "hold" => {
                let span: Span = words.get(2).context("how long is wanted")?.parse()?;
                let (instance, duration) = (self.instance(on()?)?, SignedDuration::try_from(span.0)?);
                self.apply(Event::Held { instance, duration });
            }
            "release" => self.apply(Event::Released(self.instance(on()?)?)),
            "reload" => self.apply(Event::Reloaded(Box::new(self.settings.clone()))),
            "reap" => self.apply(Event::ReapOrphans),
            "lose-database" => self.lose_database()?,
            "restart" => self.restart()?,
            "look" => {}
            other => bail!("no event {other}"),
        }
        Ok(())
    }

    /// A job is queued at a forge.
    fn asks(&mut self, name: &str, words: &[&str]) -> Result<()> {
        let (label, options) = super::options(words)?;
        let forge = self.settings.forges.keys().next().context("a forge is wanted first")?.clone();
        let id = i64::try_from(self.jobs.len())? + 1;
        let repository = (*options.get("repo").unwrap_or(&"acme/train")).to_owned();
        let job = ForgeJob { id, run: id, attempt: 1, repository, name: name.to_owned(), url: String::new() };
        let wanted = Wanted { job, label: label.parse()?, queued_at: self.now };
        self.jobs.insert(name.to_owned(), wanted.id(&forge));
        self.queued.insert(name.to_owned(), (forge, wanted));
        Ok(())
    }

    fn enrol(&mut self, word: &str, problems: &[&str]) -> Result<()> {
        let id = self.instance(word)?;
        let now = self.now;
        let gpus = self.world().instance(id).map(|i| i.gpu_ids.clone()).unwrap_or_default();
        let gpus = gpus.into_iter().map(|uuid| Gpu { uuid, model: String::new(), pci: String::new() }).collect();
        self.apply(Event::Enrolled(Box::new(Enrol {
            instance: id,
            nonce: NONCE.to_owned(),
            proven: false,
            agent_version: "1".to_owned(),
            agent_started_at: now,
            inventory: Inventory { gpus, ..Inventory::default() },
            problems: if problems.is_empty() { Vec::new() } else { vec![problems.join(" ")] },
        })));
        Ok(())
    }

    fn assignment_event(&mut self, job: &str, event: AssignmentEventKind) -> Result<()> {
        let (id, at) = (self.job(job)?, self.now);
        let world = self.world();
        let JobState::Placed { instance, assignment } = world.job(id).context("the job is over")?.state else {
            bail!("{job} is on no machine");
        };
        let last = world.instance(instance).and_then(|i| i.assignments.get(&assignment)).map_or(0, |a| a.last_event);
        self.apply(Event::AssignmentEvent { instance, assignment, event: AssignmentEvent { n: last + 1, at, event } });
        Ok(())
    }

    /// Takes a table out of the config; `reload` makes it so.
    pub(super) fn remove(&mut self, words: &[&str]) -> Result<()> {
        let [kind, name] = words else { bail!("a kind and a name are wanted") };
        match *kind {
            "pool" => drop(self.settings.pools.remove(&name.parse()?)),
            "label" => drop(self.settings.labels.remove(&name.parse()?)),
            "placement" => drop(self.settings.placements.remove(&name.parse()?)),
            other => bail!("{other}: pool, label or placement is wanted"),
        }
        Ok(())
    }

    /// A new scaler with nothing but the config and the key.
    fn lose_database(&mut self) -> Result<()> {
        self.restarts += 1;
        let (settings, seed, now) = (self.settings.clone(), self.restarts + 1, self.now);
        let old = self.world.take().context("nothing has happened yet")?;
        for instance in old.instances().filter(|instance| instance.enrolment.is_some() && instance.is_live()) {
            let report = |(id, assignment): (&AssignmentId, &Assignment)| {
                let job = old.job(assignment.job)?;
                let reference =
                    JobRef { id: job.id, forge: job.forge.clone(), label: job.label.clone(), name: job.name.clone() };
                Some(AssignmentReport {
                    id: *id,
                    job: Some(reference),
                    gpus: assignment.gpu_ids.clone(),
                    remaining_seconds: Some(assignment.deadline.duration_since(now).as_secs().max(0).unsigned_abs()),
                    stage: Stage::Running,
                    detail: None,
                })
            };
            let assignments = instance.live_assignments().filter_map(report).collect();
            let seq = Seq { run: self.restarts, n: 0 };
            let synced = Synced { instance: instance.id, nonce: NONCE.to_owned(), seq, assignments, sample: None };
            self.forgotten.insert(instance.id, synced);
        }
        self.world = Some(World::new(settings, seed, now, [], []));
        Ok(())
    }

    /// A new scaler, from what the last one committed.
    fn restart(&mut self) -> Result<()> {
        self.restarts += 1;
        let (settings, seed, now) = (self.settings.clone(), self.restarts + 1, self.now);
        let world = self.world();
        let stored: Vec<String> = world.instances().map(serde_json::to_string).collect::<Result<_, _>>()?;
        let instances: Vec<Instance> = stored.iter().map(|doc| serde_json::from_str(doc)).collect::<Result<_, _>>()?;
        let stored: Vec<String> = world.jobs().map(serde_json::to_string).collect::<Result<_, _>>()?;
        let jobs: Vec<Job> = stored.iter().map(|doc| serde_json::from_str(doc)).collect::<Result<_, _>>()?;
        self.world = Some(World::new(settings, seed, now, instances, jobs));
        Ok(())
    }
}
