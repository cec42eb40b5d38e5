//! The fleet core: what there is, and what should be done. Pure: no async, no clock, no I/O.
//!
//! [`World::apply`] takes in what happened, [`plan`] says what should be done, [`World::record`] writes that down before
//! it is done. Time is an argument; ids are minted from a seeded generator. The same events give the same plans.

mod asks;
pub mod demand;
pub mod event;
pub mod forge;
mod ids;
pub mod instance;
pub mod mutant;
mod packing;
mod placement;
mod plan;
mod pool;
pub mod reason;
pub mod view;
mod world;

pub use demand::Job;
pub use event::{Applied, Event, Order, Refusal};
pub use forge::Forge;
pub use instance::{Instance, Phase};
pub use placement::{LocalPlacement, Placement, ProviderConfig};
pub use plan::{Action, Plan, Planned, plan};
pub use pool::{Label, Pool};
pub use reason::{Cause, Reason, Waiting};
pub use world::{Breaker, Dirty, Health, ListState, Orphan, RESULT_GRACE, Seen, Settings, World};
