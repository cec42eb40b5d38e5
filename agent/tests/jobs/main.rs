//! Jobs in real containers, from image to nothing left. The agent around them is played by the test: a job's task that
//! is dropped is an agent that was killed. Docker must answer.

#![expect(clippy::unwrap_used, reason = "helpers of tests, too, may unwrap")]

mod again;
mod cuts;
mod docker;
mod ends;
mod gpus;
mod images;
mod leftovers;
mod output;
mod proxy;
mod registry;
mod rig;
mod wishes;
