//! Golden scripts for the planner: events in, plan with reasons out. `tests/plans/*.txt` are meant to be read.
//!
//! A script sets up placements, pools and labels, then tells what happens and when. Lines that begin with `>` are what
//! the planner did; the test writes them anew and compares (`UPDATE_PLANS=1` keeps what it wrote). Machines are called
//! i1, i2, … in the order of their launch, jobs by the name they are submitted with. Agents that have enrolled sync
//! all the time unless the script says `silent`; the provider's list is read at every step unless it `list-fails`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use jiff::{SignedDuration, Timestamp};
use pilotlight_runtime::units::Span;
use pilotlight_scaler::{
    fleet::{
        Action, Event, Instance, Job, Label, LocalPlacement, Phase, Placement, Plan, Pool, ProviderConfig, Settings,
        Waiting, World,
        demand::JobState,
        event::{CreateFailure, Enrol, Submission, Synced},
        plan, view,
    },
    provider::Listed,
};
use pilotlight_wire::{
    GpuId, InstanceId, JobId, Verdict,
    agent::{AssignmentEvent, AssignmentEventKind, AssignmentReport, Finished, Gpu, Inventory, Seq, Stage},
    api::DrainTarget,
};
use uuid::Uuid;

/// Runs a script and returns it with the planner's lines as they are now.
///
/// # Errors
/// When a line is not understood, with its number.
pub fn run(script: &str) -> Result<String> {
    let mut stage = Script::new();
    for (number, line) in script.lines().enumerate() {
        if line.starts_with('>') {
            continue;
        }
        stage.out.push_str(line);
        stage.out.push('\n');
        let words = line.split('#').next().unwrap_or_default();
        let words: Vec<&str> = words.split_whitespace().collect();
        if !words.is_empty() {
            stage.line(&words).with_context(|| format!("line {}: {line}", number + 1))?;
        }
    }
    Ok(stage.out)
}

/// The nonce of every agent: a second agent is another test's business.
const NONCE: &str = "nonce";

struct Script {
    settings: Settings,
    world: Option<World>,
    start: Timestamp,
    now: Timestamp,
    out: String,
    instances: Vec<InstanceId>,
    jobs: BTreeMap<String, JobId>,
    listed: BTreeSet<InstanceId>,
    silent: BTreeSet<InstanceId>,
    list_fails: bool,
    restarts: u64,
    said: BTreeMap<JobId, String>,
    ended: BTreeSet<JobId>,
    gone: BTreeSet<InstanceId>,
}

impl Script {
    fn new() -> Self {
        let start: Timestamp = Timestamp::from_second(1_767_225_600).unwrap_or(Timestamp::UNIX_EPOCH);
        Self {
            settings: Settings { lease: SignedDuration::from_mins(10), ..Settings::default() },
            world: None,
            start,
            now: start,
            out: String::new(),
            instances: Vec::new(),
            jobs: BTreeMap::new(),
            listed: BTreeSet::new(),
            silent: BTreeSet::new(),
            list_fails: false,
            restarts: 0,
            said: BTreeMap::new(),
            ended: BTreeSet::new(),
            gone: BTreeSet::new(),
        }
    }

    fn line(&mut self, words: &[&str]) -> Result<()> {
        match words[0] {
            "placement" => self.placement(&words[1..]),
            "pool" => self.pool(&words[1..]),
            "label" => self.label(&words[1..]),
            time => {
                let at: Span = time.parse()?;
                ensure!(words.len() > 1, "a time and an event are wanted");
                self.advance_to(self.start.saturating_add(at.0)?)?;
                self.event(&words[1..])?;
                self.step();
                Ok(())
            }
        }
    }

    fn placement(&mut self, words: &[&str]) -> Result<()> {
        let (name, options) = options(words)?;
        let placement = Placement {
            name: name.parse()?,
            gpus: number(&options, "gpus", 0)?,
            max_instances: options.get("max").map(|max| max.parse()).transpose()?,
            price_per_hour: None,
            provider: ProviderConfig::Local(LocalPlacement {
                gpu_ids: (0..64).map(|n| GpuId(format!("{name}-{n}"))).collect(),
                agent: None,
                host_image: false,
            }),
        };
        self.settings.placements.insert(placement.name.clone(), placement);
        Ok(())
    }

    fn pool(&mut self, words: &[&str]) -> Result<()> {
        let (name, options) = options(words)?;
        let on = options.get("on").context("`on` is wanted")?;
        let pool = Pool {
            name: name.parse()?,
            placements: on.split(',').map(str::parse).collect::<Result<_, _>>()?,
            max_instances: number(&options, "max", 1)?,
            min_idle: number(&options, "min-idle", 0)?,
            idle_timeout: span(&options, "idle", "10m")?,
            boot_timeout: span(&options, "boot", "20m")?,
            max_lifetime: span(&options, "lifetime", "24h")?,
            lost_after: span(&options, "lost", "1h")?,
            reuse: !options.contains_key("once"),
            cpu_jobs: options.get("cpu-jobs").map(|jobs| jobs.parse()).transpose()?,
            volumes: Vec::new(),
        };
        self.settings.pools.insert(pool.name.clone(), pool);
        Ok(())
    }

    fn label(&mut self, words: &[&str]) -> Result<()> {
        let (name, options) = options(words)?;
        let label = Label {
            name: name.parse()?,
            pool: options.get("pool").context("`pool` is wanted")?.parse()?,
            gpus: number(&options, "gpus", 0)?,
            timeout: span(&options, "timeout", "6h")?,
            priority: options.get("priority").map_or(Ok(0), |text| text.parse())?,
        };
        self.settings.labels.insert(label.name.clone(), label);
        Ok(())
    }

    fn world(&mut self) -> &mut World {
        let (settings, now) = (self.settings.clone(), self.now);
        self.world.get_or_insert_with(|| World::new(settings, 1, now, [], []))
    }

    /// Lets time pass, waking the planner when it asked to be woken.
    fn advance_to(&mut self, at: Timestamp) -> Result<()> {
        ensure!(at >= self.now, "time goes forward only");
        self.world();
        for _ in 0..10_000 {
            self.observe();
            let planned = self.pass();
            let soon = planned.list_soon.then(|| self.now + SignedDuration::from_millis(200));
            let wake = [planned.wake_at, soon].into_iter().flatten().min();
            match wake {
                Some(wake) if wake < at => self.now = self.now.max(wake) + SignedDuration::from_millis(1),
                _ => {
                    self.now = at;
                    return Ok(());
                }
            }
        }
        bail!("the planner wakes for ever");
    }

    /// What agents and the provider say at this moment.
    fn observe(&mut self) {
        let (now, listed, silent, fails) = (self.now, self.listed.clone(), self.silent.clone(), self.list_fails);
        let seq = Seq { run: self.restarts, n: 0 };
        let world = self.world();
        let event = if fails {
            Event::ListFailed { message: "the provider answers 500".to_owned() }
        } else {
            let listed =
                listed.into_iter().map(|instance| Listed { instance, alive: true, note: None, tags: None }).collect();
            Event::ListRead { began_at: now, listed }
        };
        let _done = world.apply(event, now);
        let syncs: Vec<Synced> = world
            .instances()
            .filter(|instance| instance.enrolment.is_some() && instance.is_live() && !silent.contains(&instance.id))
            .map(|instance| Synced {
                instance: instance.id,
                nonce: NONCE.to_owned(),
                seq,
                assignments: reports(instance),
                sample: None,
            })
            .collect();
        for synced in syncs {
            let _orders = world.apply(Event::Synced(Box::new(synced)), now);
        }
    }

    fn step(&mut self) {
        self.observe();
        self.pass();
    }

    fn pass(&mut self) -> Plan {
        let now = self.now;
        let world = self.world();
        let planned = plan(world, now);
        world.record(&planned, now);
        self.tell_ends();
        for one in &planned.actions {
            if let Action::Launch(instance) = &one.action {
                self.instances.push(instance.id);
            }
            let line = view::action_line(&one.action, &one.reason);
            // Logs close by themselves here; what they hold is another test's business.
            if let Action::CloseLog { job, .. } = one.action {
                let world = self.world();
                let _done = world.apply(Event::LogClosed(job), now);
                continue;
            }
            self.say(&line.text);
        }
        self.tell_changes(&planned);
        let world = self.world();
        let dirty = world.take_dirty();
        world.forget_settled(&dirty);
        planned
    }

    /// Jobs that are over and machines that are gone.
    fn tell_ends(&mut self) {
        let world = self.world.as_ref();
        let mut lines = Vec::new();
        for job in world.into_iter().flat_map(World::jobs) {
            if let Some(ended) = job.ended()
                && self.ended.insert(job.id)
            {
                let reason = ended.reason.as_deref().map(|reason| format!(": {reason}")).unwrap_or_default();
                lines.push(format!("{} is over, {}{reason}", job.id, ended.verdict));
            }
        }
        for instance in world.into_iter().flat_map(World::instances) {
            if matches!(instance.phase, Phase::Gone { .. }) && self.gone.insert(instance.id) {
                lines.push(format!("instance {} is gone", instance.id));
            }
        }
        for line in lines {
            self.say(&line);
        }
    }

    fn tell_changes(&mut self, planned: &Plan) {
        let mut lines = Vec::new();
        for (job, waiting) in &planned.waiting {
            let text = format!("{job} waits: {waiting}");
            // A time that moves on is no news.
            let key = match waiting {
                Waiting::Cooling { placement, .. } => placement.to_string(),
                Waiting::Launch(instance) | Waiting::Boot(instance) => instance.to_string(),
                _ => text.clone(),
            };
            if self.said.insert(*job, key.clone()) != Some(key) {
                lines.push(text);
            }
        }
        for line in lines {
            self.say(&line);
        }
    }

    fn say(&mut self, text: &str) {
        let mut text = text.to_owned();
        for (n, id) in self.instances.iter().enumerate() {
            text = text.replace(&id.to_string(), &format!("i{}", n + 1));
        }
        for (name, id) in &self.jobs {
            text = text.replace(&id.to_string(), name);
        }
        text = text.replace("job job ", "job ");
        let since = self.now.duration_since(self.start).unsigned_abs();
        let since = Span(std::time::Duration::from_secs(since.as_secs()));
        let since = if since.0.is_zero() { "0s".to_owned() } else { since.to_string() };
        let _infallible = writeln!(self.out, "> {since:>8}  {text}");
    }

    fn instance(&self, word: &str) -> Result<InstanceId> {
        let n: usize = word.strip_prefix('i').and_then(|n| n.parse().ok()).context("i1, i2, … is wanted")?;
        self.instances.get(n.wrapping_sub(1)).copied().ok_or_else(|| anyhow!("{word} was not launched"))
    }

    fn job(&self, word: &str) -> Result<JobId> {
        self.jobs.get(word).copied().ok_or_else(|| anyhow!("{word} was not submitted"))
    }

    fn apply(&mut self, event: Event) {
        let now = self.now;
        if let Err(refusal) = self.world().apply(event, now) {
            self.say(&format!("refused: {refusal}"));
        }
    }

    fn event(&mut self, words: &[&str]) -> Result<()> {
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
                    body_hash: String::new(),
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
            "destroy-fails" => {
                let instance = self.instance(on()?)?;
                self.apply(Event::DestroyFailed { instance, message: words[2..].join(" ") });
            }
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
            "restart" => self.restart()?,
            "look" => {}
            other => bail!("no event {other}"),
        }
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

fn reports(instance: &Instance) -> Vec<AssignmentReport> {
    let one = |id: &pilotlight_wire::AssignmentId| AssignmentReport {
        id: *id,
        job: None,
        gpus: Vec::new(),
        deadline: None,
        stage: Stage::Running,
        detail: None,
    };
    instance.live_assignments().map(|(id, _)| one(id)).collect()
}

fn options<'a>(words: &[&'a str]) -> Result<(&'a str, BTreeMap<&'a str, &'a str>)> {
    let (name, rest) = words.split_first().context("a name is wanted")?;
    let pair = |word: &'a str| word.split_once('=').unwrap_or((word, ""));
    Ok((name, rest.iter().map(|word| pair(word)).collect()))
}

fn number(options: &BTreeMap<&str, &str>, key: &str, default: u32) -> Result<u32> {
    Ok(options.get(key).map_or(Ok(default), |text| text.parse())?)
}

fn span(options: &BTreeMap<&str, &str>, key: &str, default: &str) -> Result<SignedDuration> {
    let span: Span = options.get(key).unwrap_or(&default).parse()?;
    Ok(SignedDuration::try_from(span.0)?)
}
