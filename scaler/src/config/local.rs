//! Placements; today all are on the scaler's own box.

use std::path::Path;

use pilotlight_runtime::Report;
use pilotlight_wire::GpuId;
use toml::{Spanned, de::DeValue};

use super::{
    document::{Document, Section, did_you_mean, integer},
    gpus::{self, Takings, Wish},
    tables::{self, Form, Tables},
};
use crate::fleet::{LocalPlacement, Placement, ProviderConfig};

/// The kinds of provider that exist.
const KINDS: [&str; 1] = ["local"];
const NOT_GPUS: &str = "\"all\", a number of GPUs per instance, or a list of UUIDs such as [\"GPU-…\"]";

/// Reads all placements and shares this box's GPUs out among them. The second value is those GPUs.
pub(super) fn placements(
    document: &Document<'_>,
    root: &mut Section<'_, '_>,
    gpu_root: &Path,
) -> (Tables<Placement>, Vec<GpuId>) {
    let mut tables = Tables { valid: Vec::new(), names: Vec::new() };
    let mut drafts = Vec::new();
    for (given, section) in root.tables("placement", "[placement.NAME.local]") {
        let name = tables::name(document, &given, &section);
        let draft = kind(document, &section).map(|(start, local)| draft(start, local));
        if let (Some(name), Some(draft)) = (name, draft) {
            drafts.push((name, section, draft));
        }
        tables.names.push(given.into_inner());
    }

    let here = gpus::of_box(gpu_root);
    let box_gpus = here.as_ref().map_or_else(|_| Vec::new(), Clone::clone);
    let mut takings = Takings::new(&box_gpus);
    drafts.sort_by_key(|(_, section, draft)| (draft.wish.get_ref().order(), section.start()));
    for (name, section, draft) in drafts {
        let at = draft.wish.span().start;
        let key = format!("{}.local.gpus", section.own_path());
        let share = match (&here, draft.wish.get_ref()) {
            (Err(error), Wish::All | Wish::Each(1..)) => {
                Err(format!("the GPUs of this box are not known: {}", Report(error)))
            }
            (_, wish) => takings.take(name.as_str(), wish, draft.max_instances),
        };
        let share = match share {
            Ok(share) => share,
            Err(message) => {
                document.error(at, key, message);
                continue;
            }
        };
        for id in &share.unseen {
            document.warn(at, &key, format!("{id} is not among the {} GPUs of this box", box_gpus.len()));
        }
        let local = LocalPlacement { gpu_ids: share.ids, agent: draft.agent, host_image: draft.host_image };
        let placement = Placement {
            name,
            gpus: share.per_instance,
            max_instances: Some(draft.max_instances),
            price_per_hour: draft.price_per_hour,
            provider: ProviderConfig::Local(local),
        };
        tables.valid.push(Form::new(placement, &section, Vec::new()));
    }
    (tables, box_gpus)
}

/// The one table in a placement that says who makes its machines.
fn kind<'d, 't>(document: &'d Document<'t>, placement: &Section<'d, 't>) -> Option<(usize, Section<'d, 't>)> {
    let kinds = placement.children("[placement.NAME.local]");
    if placement.is_empty() {
        let message = format!("says not who makes its machines: write [{}.local]", placement.own_path());
        document.error(placement.start(), placement.own_path(), message);
    }
    let mut chosen = None;
    for (kind, section) in kinds {
        let at = kind.span().start;
        let name = kind.get_ref().as_str();
        if !KINDS.contains(&name) {
            let near = did_you_mean(name, &KINDS);
            let known = KINDS.join(", ");
            let message =
                format!("{name:?} is not a kind of provider that is built yet{near}; known kinds are: {known}");
            document.error(at, section.own_path(), message);
        } else if chosen.is_some() {
            document.error(at, section.own_path(), "a placement has one kind");
        } else {
            chosen = Some((at, section));
        }
    }
    chosen
}

/// A local placement before GPUs are shared out.
struct Draft {
    wish: Spanned<Wish>,
    max_instances: u32,
    price_per_hour: Option<f64>,
    agent: Option<std::path::PathBuf>,
    host_image: bool,
}

fn draft(start: usize, mut section: Section<'_, '_>) -> Draft {
    let wish = section.leaf("gpus", NOT_GPUS, wish).unwrap_or_else(|| {
        // A bad value was reported; it must not draw errors of its own about GPUs that it did not ask for.
        let wish = if section.has("gpus") { Wish::Each(0) } else { Wish::All };
        Spanned::new(start..start, wish)
    });
    let max_instances = section.count("max_instances", 1, 1024).map_or(1, Spanned::into_inner);
    let price = section.leaf("price_per_hour", "a price per machine and hour, such as 63.30", price);
    let agent = section.absolute_path("agent");
    if let Some(agent) = agent.as_ref().filter(|agent| !agent.get_ref().is_file()) {
        section.warn("agent", agent, format!("{:?} is not there: no machine will start", agent.get_ref()));
    }
    let host_image = section.bool("host_image").is_none_or(Spanned::into_inner);
    section.finish();
    Draft {
        wish,
        max_instances,
        price_per_hour: price.map(Spanned::into_inner),
        agent: agent.map(Spanned::into_inner),
        host_image,
    }
}

fn wish(value: &DeValue<'_>) -> Option<Wish> {
    match value {
        DeValue::String(text) if text == "all" => Some(Wish::All),
        DeValue::Array(list) => list
            .iter()
            .map(|element| {
                let text = element.get_ref().as_str()?;
                text.starts_with("GPU-").then(|| GpuId(text.to_owned()))
            })
            .collect::<Option<_>>()
            .map(Wish::These),
        value => integer(value)?.try_into().ok().map(Wish::Each),
    }
}

fn price(value: &DeValue<'_>) -> Option<f64> {
    let text = match value {
        DeValue::Integer(number) => number.as_str(),
        DeValue::Float(number) => number.as_str(),
        _ => return None,
    };
    text.replace('_', "").parse().ok().filter(|price: &f64| price.is_finite() && *price >= 0.0)
}
