//! The fleet core: what there is, and what should be done. Pure: no async, no clock, no I/O.

mod placement;
mod pool;

pub use placement::{LocalPlacement, Placement, ProviderConfig};
pub use pool::{Label, Pool};
