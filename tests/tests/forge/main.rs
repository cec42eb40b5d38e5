//! A real forge: Gitea and its official runner. Names say what holds.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod client;
mod harness;

/// A job that prints two lines.
const HELLO: &str = "\
on: workflow_dispatch
jobs:
  hello:
    runs-on: by-hand
    steps:
      - run: echo hello from $RUNNER_OS
      - run: echo bye
";
