//! What a person should look at.

use std::collections::BTreeMap;

use jiff::Timestamp;
use pilotlight_runtime::units::Span;
use pilotlight_wire::{LabelName, api::Alert};

use super::counted;
use crate::fleet::{Health, Phase, Plan, Waiting, World, world::BOOTS_ALERT};

/// A provider that cannot be read for this long is worth a look.
const LIST_ALERT: jiff::SignedDuration = jiff::SignedDuration::from_mins(1);

/// A step of the clock is worth a look for this long.
const CLOCK_ALERT: jiff::SignedDuration = jiff::SignedDuration::from_hours(24);

/// A destroy that has failed so often is worth a look.
const DESTROY_ALERT: u32 = 3;

/// A job that has waited this long because of something that is wrong is worth a look.
const WAITING_ALERT: jiff::SignedDuration = jiff::SignedDuration::from_mins(15);

impl World {
    /// What a person should look at.
    #[must_use]
    pub fn alerts(&self, plan: &Plan, now: Timestamp) -> Vec<Alert> {
        let mut alerts = Vec::new();
        let mut alert = |code: &str, since: Timestamp, message: String| {
            alerts.push(Alert { code: code.to_owned(), message, since });
        };
        if let Some(since) = self.paused {
            alert(
                "paused",
                since,
                "nothing is launched since `drain --all`; `pilotlight drain --resume` ends that".to_owned(),
            );
        }
        if let Some((since, by)) = self.clock_stepped
            && now.duration_since(since) < CLOCK_ALERT
        {
            let half = jiff::SignedDuration::from_millis(500);
            let far = Span(std::time::Duration::from_secs((by.abs() + half).as_secs().unsigned_abs()));
            let way = if by.is_negative() { "back" } else { "ahead" };
            alert(
                "clock_stepped",
                since,
                format!(
                    "the system's clock went {far} {way}; times never go back, and nothing was judged dead for one lease"
                ),
            );
        }
        if let Some((since, message)) = &self.list.failing
            && now.duration_since(*since) >= LIST_ALERT
        {
            alert("provider_unreadable", *since, format!("the provider's list cannot be read: {message}"));
        }
        for (placement, health) in &self.health {
            if let Health::Stopped { since, message } = health {
                alert(
                    "placement_stopped",
                    *since,
                    format!("placement {placement} is stopped: {message}; mend it and reload the config (SIGHUP)"),
                );
            }
        }
        for ((placement, image), breaker) in &self.breakers {
            if breaker.failures >= BOOTS_ALERT {
                let of = image.as_ref().map_or_else(String::new, |image| format!(" with image {image}"));
                alert(
                    "boots_failing",
                    breaker.since,
                    format!(
                        "{} machines in a row of placement {placement}{of} did not come up, last: {}",
                        breaker.failures, breaker.message
                    ),
                );
            }
        }
        for (forge, demand) in &self.demand {
            if let Some((since, message)) = &demand.failing
                && now.duration_since(*since) >= LIST_ALERT
            {
                alert("forge_unreadable", *since, format!("forge {forge} cannot be read: {message}"));
            }
            if let Some((since, message)) = &demand.grants_failing
                && now.duration_since(*since) >= LIST_ALERT
            {
                alert("runners_failing", *since, format!("forge {forge} registers or removes no runner: {message}"));
            }
        }
        if let Some((since, message)) = &self.reload_error {
            alert("reload_failed", *since, format!("the config file has errors and the old one is kept: {message}"));
        }
        for instance in self.instances.values() {
            if instance.is_live()
                && let Some(until) = instance.held_until.filter(|until| now < *until)
            {
                let id = instance.id;
                alert(
                    "held",
                    instance.created_at,
                    format!("instance {id} is held until {until:.0}; `pilotlight release {id}` ends that"),
                );
            }
            if let Phase::Terminating { destroy, .. } = &instance.phase
                && destroy.failures() >= DESTROY_ALERT
            {
                let message = self.destroy_error(instance.id).unwrap_or("no answer");
                alert(
                    "destroy_failing",
                    instance.changed_at,
                    format!("instance {} cannot be destroyed, {} tries: {message}", instance.id, destroy.failures()),
                );
            }
        }
        for (id, seen) in &self.seen {
            if let Some(since) = seen.intruder_at {
                alert("enrolled_twice", since, format!("a second agent tried to enrol as instance {id}"));
            }
        }
        for (id, orphan) in &self.orphans {
            alert(
                "orphan",
                orphan.since,
                format!(
                    "instance {id} is listed under our name and not known; it is adopted when its agent speaks and destroyed \
                     after {:.0} when not (`pilotlight reap --yes` does not wait)",
                    self.orphan_bound(orphan)
                ),
            );
        }
        for job in self.jobs.values().filter(|job| job.is_queued()) {
            if !self.settings.labels.contains_key(&job.label) {
                alert(
                    "label_removed",
                    job.queued_at,
                    format!("job {} waits for label {}, which is no longer in the config", job.id, job.label),
                );
            }
        }
        self.waiting_long(plan, now, &mut alert);
        alerts
    }

    /// Jobs that have waited for long because of something that is wrong, one alert per label. One that waits its turn is
    /// not.
    fn waiting_long(&self, plan: &Plan, now: Timestamp, alert: &mut impl FnMut(&str, Timestamp, String)) {
        let mut labels: BTreeMap<&LabelName, (u32, Timestamp, &Waiting)> = BTreeMap::new();
        for (id, waiting) in &plan.waiting {
            let wrong = match waiting {
                Waiting::Cooling { .. }
                | Waiting::Probing { .. }
                | Waiting::PlacementStopped { .. }
                | Waiting::ProviderUnknown(_)
                | Waiting::Refused { .. }
                | Waiting::TooLarge => true,
                Waiting::Boot(_)
                | Waiting::Launch(_)
                | Waiting::Unheard(_)
                | Waiting::PoolFull { .. }
                | Waiting::PlacementFull(_)
                | Waiting::BehindLargeJob
                // These have alerts of their own.
                | Waiting::Paused
                | Waiting::LabelRemoved => false,
            };
            let Some(job) = self.jobs.get(id).filter(|_| wrong) else { continue };
            if now.duration_since(job.queued_at) >= WAITING_ALERT {
                let (count, since, _) = labels.entry(&job.label).or_insert((0, job.queued_at, waiting));
                *count += 1;
                *since = job.queued_at.min(*since);
            }
        }
        for (label, (count, since, waiting)) in labels {
            let jobs = counted(usize::try_from(count).unwrap_or(usize::MAX), "job");
            alert("jobs_waiting", since, format!("{jobs} of label {label} cannot be served: {waiting}"));
        }
    }
}
