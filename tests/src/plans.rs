//! Golden scripts for the planner: events in, plan with reasons out. `tests/plans/*.txt` are meant to be read.
//!
//! A script sets up placements, pools and labels, then tells what happens and when. Lines that begin with `>` are what
//! the planner did; the test writes them anew and compares (`UPDATE_PLANS=1` keeps what it wrote). Machines are called
//! i1, i2, … in the order of their launch, jobs by the name they are submitted with. Agents that have enrolled sync
//! all the time unless the script says `silent`; the provider's list is read at every step unless it `list-fails`.

mod events;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use jiff::{SignedDuration, Timestamp};
use pilotlight_runtime::units::Span;
use pilotlight_scaler::{
    fleet::{
        Action, Event, Forge, Instance, Label, LocalPlacement, Phase, Placement, Plan, Pool, ProviderConfig, Settings,
        Waiting, World,
        event::Synced,
        forge::{Reading, Wanted},
        plan, view,
    },
    provider::{Listed, Tags},
};
use pilotlight_wire::{
    ForgeName, GpuId, InstanceId, JobId,
    agent::{AssignmentReport, Seq, Stage},
};

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
    tags: BTreeMap<InstanceId, Tags>,
    /// Agents whose machine the scaler has forgotten, and what they say.
    forgotten: BTreeMap<InstanceId, Synced>,
    silent: BTreeSet<InstanceId>,
    list_fails: bool,
    /// What waits at the forges, by name.
    queued: BTreeMap<String, (ForgeName, Wanted)>,
    forges_fail: bool,
    runners: u32,
    restarts: u64,
    said: BTreeMap<JobId, String>,
    ended: BTreeSet<JobId>,
    gone: BTreeSet<InstanceId>,
    alerted: BTreeSet<String>,
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
            tags: BTreeMap::new(),
            forgotten: BTreeMap::new(),
            silent: BTreeSet::new(),
            list_fails: false,
            queued: BTreeMap::new(),
            forges_fail: false,
            runners: 0,
            restarts: 0,
            said: BTreeMap::new(),
            ended: BTreeSet::new(),
            gone: BTreeSet::new(),
            alerted: BTreeSet::new(),
        }
    }

    fn line(&mut self, words: &[&str]) -> Result<()> {
        match words[0] {
            "placement" => self.placement(&words[1..]),
            "pool" => self.pool(&words[1..]),
            "label" => self.label(&words[1..]),
            "forge" => self.forge(&words[1..]),
            "remove" => self.remove(&words[1..]),
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
            runner_image: None,
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

    fn forge(&mut self, words: &[&str]) -> Result<()> {
        let (name, options) = options(words)?;
        let (per_repository, rerun) = (options.contains_key("per-repository"), options.contains_key("rerun"));
        let forge = Forge { name: name.parse()?, per_repository, rerun };
        self.settings.forges.insert(forge.name.clone(), forge);
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
        let (tags, forgotten) = (self.tags.clone(), self.forgotten.clone());
        let seq = Seq { run: self.restarts, n: 0 };
        let demand: Vec<Event> = self.settings.forges.keys().map(|forge| self.read(forge)).collect();
        let world = self.world();
        let event = if fails {
            Event::ListFailed { message: "the provider answers 500".to_owned() }
        } else {
            let one = |instance| Listed { instance, alive: true, note: None, tags: tags.get(&instance).cloned() };
            let listed = listed.into_iter().map(one).collect();
            Event::ListRead { began_at: now, listed }
        };
        let _done = world.apply(event, now);
        for event in demand {
            let _done = world.apply(event, now);
        }
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
        let strays = forgotten.into_values().filter(|synced| !silent.contains(&synced.instance));
        let strays: Vec<Synced> = strays.filter(|synced| world.instance(synced.instance).is_none()).collect();
        for synced in syncs.into_iter().chain(strays) {
            let _orders = world.apply(Event::Synced(Box::new(synced)), now);
        }
    }

    /// What a forge's job list shows at this moment.
    fn read(&self, forge: &ForgeName) -> Event {
        if self.forges_fail {
            return Event::DemandFailed { forge: forge.clone(), message: "502 Bad Gateway".to_owned() };
        }
        let wanted = self.queued.values().filter(|(of, _)| of == forge).map(|(_, wanted)| wanted.clone()).collect();
        let (forge, began_at) = (forge.clone(), self.now);
        Event::DemandRead(Box::new(Reading { forge, began_at, wanted, unserved: Vec::new(), taken: Vec::new() }))
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
                self.tags.insert(instance.id, tags_of(instance));
            }
            if let Action::Grant { job, .. } = &one.action {
                self.runners += 1;
                self.jobs.insert(format!("r{}", self.runners), *job);
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
        self.tell_alerts(&planned);
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

    /// New alerts, and those that are over.
    fn tell_alerts(&mut self, planned: &Plan) {
        let now = self.now;
        let alerts = self.world().alerts(planned, now);
        let lines: Vec<String> = alerts
            .iter()
            .filter(|alert| !self.alerted.contains(&alert.code))
            .map(|alert| format!("alert {}: {}", alert.code, alert.message))
            .collect();
        self.alerted = alerts.into_iter().map(|alert| alert.code).collect();
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
}

fn tags_of(instance: &Instance) -> Tags {
    Tags {
        pool: instance.pool.clone(),
        placement: instance.placement.name.clone(),
        created_at: instance.created_at,
        gpu_ids: instance.gpu_ids.clone(),
    }
}

fn reports(instance: &Instance) -> Vec<AssignmentReport> {
    let one = |id: &pilotlight_wire::AssignmentId| AssignmentReport {
        id: *id,
        job: None,
        gpus: Vec::new(),
        remaining_seconds: None,
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
