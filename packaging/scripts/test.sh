#!/usr/bin/env bash
# All checks, in the order in which they fail fastest. Run by `make test`, which has installed the tools before.
set -euo pipefail
cd "$(dirname "$0")/../.."

work=$(mktemp -d)
leave() {
  local status=$?
  packaging/scripts/docker.sh stop --pidfile "$work/dockerd.pid" || status=1
  rm -rf "$work"
  exit "$status"
}
trap leave EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

step() {
  printf '\n== %s\n' "$*" >&2
  "$@"
}

profile=default
[ "${CI:-}" != true ] || profile=ci
export PATH="$CARGO_TARGET_DIR/tools/bin:$PATH"

step make --no-print-directory lint
step packaging/scripts/tools.sh ensure
step tests/peers/build.sh
step packaging/scripts/docker.sh ensure --pidfile "$work/dockerd.pid"
# The same for all three, so that everything is built once. With failpoints, the programs can be killed at every step of
# a job's life (runtime/src/failpoint.rs).
cargo=(--locked --workspace --features failpoints)
# The scenarios start the programs themselves.
step cargo build "${cargo[@]}" --bins
step cargo test "${cargo[@]}" --doc --quiet
# Last, so that its summary is the end of the output.
step cargo nextest run "${cargo[@]}" --profile "$profile"
