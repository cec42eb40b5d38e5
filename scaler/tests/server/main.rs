//! The scaler whole, in this process, with an agent played by the test: the rules of the link, one by one.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod access;
mod admin;
mod adoption;
mod cases;
mod ends;
mod forge;
mod link;
mod queue;
mod refused;
mod reload;
mod rig;
