//! `drain`: no new work for machines, and they go away.

use std::collections::BTreeSet;

use pilotlight_wire::{
    InstanceId,
    api::{DrainRequest, DrainResponse, DrainTarget, InstanceView},
};
use reqwest::Method;
use tokio::time::sleep;

use super::{
    client::Client,
    exit::Failure,
    stream::{Notes, PACE, PATIENCE, Patience},
};
use crate::fleet::view::counted;

/// Asks for the drain.
pub(crate) async fn ask(client: &Client, target: DrainTarget, now: bool) -> Result<DrainResponse, Failure> {
    Ok(client.send(Method::POST, "drain", &DrainRequest { target, now }).await?)
}

/// Waits until machines are gone: these, or with `None` every one there is.
pub(crate) async fn wait(
    client: &Client,
    which: Option<&BTreeSet<InstanceId>>,
    notes: Notes<'_>,
) -> Result<(), Failure> {
    let mut patience = Patience::new(PATIENCE);
    let mut told = String::new();
    loop {
        match client.get::<Vec<InstanceView>>("instances").await {
            Ok(instances) => {
                patience.answered();
                let left: Vec<_> = instances
                    .iter()
                    .filter(|instance| instance.phase != "gone")
                    .filter(|instance| which.is_none_or(|which| which.contains(&instance.id)))
                    .collect();
                if left.is_empty() {
                    return Ok(());
                }
                let lines: Vec<_> = left
                    .iter()
                    .map(|instance| {
                        let jobs = counted(instance.assignments.len(), "job");
                        format!("{} {} with {jobs}", instance.id, instance.phase)
                    })
                    .collect();
                let line = format!("waiting for {}: {}", counted(left.len(), "instance"), lines.join(", "));
                if line != told {
                    notes(&line);
                    told = line;
                }
                sleep(PACE).await;
            }
            Err(error) => {
                patience.missed(error).await?;
            }
        }
    }
}
