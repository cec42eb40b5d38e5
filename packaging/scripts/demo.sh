#!/usr/bin/env bash
# `make demo`: the whole life of a CI machine on this box. Three jobs are queued, the scaler launches an instance, its
# agent runs them in containers, the machine goes away, and a look from the outside shows that nothing is left.
set -euo pipefail
cd "$(dirname "$0")/../.."

# shellcheck source=packaging/scripts/box.sh
. packaging/scripts/box.sh

readonly IDLE_TIMEOUT_SECONDS=5
readonly JOBS_TIMEOUT_SECONDS=180
# A prime search that takes ten seconds on any machine, since it looks at the clock.
# shellcheck disable=SC2016  # the job's shell expands it, not this one
readonly PRIMES='n=1 found=0 last=0 shown=0
while (( SECONDS < 10 )); do
  (( n += 2 ))
  for (( d = 3; d * d <= n; d += 2 )); do (( n % d )) || continue 2; done
  (( found += 1, last = n ))
  (( SECONDS == shown )) || { shown=$SECONDS; echo "$shown s: $found primes, the last is $last"; }
done
echo "done: $found primes"'

submit() {
  local name=$1
  shift
  setsid "$bin/pilotlight" submit --label cpu-small --image pilotlight/host --name "$name" -- "$@" \
    > >(indent "  $name | ") 2>"$work/$name.err" </dev/null &
  submit_pid[$name]=$!
}

# From JSON on stdin: how many of each value a key has, such as "1 queued, 2 running".
tally() {
  { grep -oE "\"$1\": *\"[a-z_]+\"" || true; } | cut -d'"' -f4 | sort | uniq -c |
    awk '{ printf "%s%s %s", sep, $1, $2; sep = ", " } END { if (!NR) printf "none" }'
}

# One line per change, on a terminal and elsewhere: instances by phase, jobs by state.
show_changes() {
  local now instances jobs
  note_instances
  instances=$(pilotlight instances --json) && jobs=$(pilotlight jobs --all --json) || return 0
  now="instances: $(tally phase <<<"$instances")   jobs: $(tally state <<<"$jobs")"
  if [ "$now" != "${shown:-}" ]; then
    shown=$now
    printf '%4d s  %s\n' $((SECONDS - began)) "$now"
  fi
}

jobs_are_accepted() {
  local jobs
  jobs=$(pilotlight jobs --all --json) && [ "$(count '"state"' "${jobs//,/$'\n'}")" = "${#submit_pid[@]}" ]
}

jobs_are_over() {
  local pid
  for pid in "${submit_pid[@]}"; do
    if kill -0 "$pid" 2>/dev/null; then return 1; fi
  done
}

watch_until() {
  local limit=$((SECONDS + $2))
  until "$1"; do
    kill -0 "$scaler_pid" 2>/dev/null || fail "the scaler ended: $(tail -n 5 "$work/scaler.log")"
    [ "$SECONDS" -lt "$limit" ] || fail "not within $2 s: $1"
    show_changes
    sleep 0.3
  done
  show_changes
}

no_instances() {
  local instances
  instances=$(pilotlight instances --json) && [ "$(tally phase <<<"$instances")" = none ]
}

# Waits for a job, prints what submit said (its phases and usage) and checks the exit code.
conclude() {
  local name=$1 expected=$2 status=0
  wait "${submit_pid[$name]}" || status=$?
  unset "submit_pid[$name]"
  head_line "Job $name: exit code $status, expected $expected"
  indent '  ' <"$work/$name.err"
  [ "$status" = "$expected" ] || wrong="$wrong $name"
}

begin_box demo debug

head_line "Building (the first time takes a few minutes)"
await cargo build --locked --workspace --bins

head_line "Starting the scaler"
write_config "${IDLE_TIMEOUT_SECONDS}s"
say "config: packaging/examples/local.toml, here with idle_timeout = \"${IDLE_TIMEOUT_SECONDS}s\"; $PILOTLIGHT_URL"
start_scaler
pilotlight status | indent '  '

head_line "Three jobs are submitted; no machine exists yet"
began=$SECONDS
wrong=""
# shellcheck disable=SC2016  # the job's shell expands it, not this one
submit hello bash -c 'echo "hello from a container"; uname -sr; echo "processors: $(nproc)"'
submit fails bash -c 'echo "this job ends with exit code 7, on purpose"; exit 7'
submit primes bash -c "$PRIMES"
watch_until jobs_are_accepted "$READY_TIMEOUT_SECONDS"
say "pilotlight plan:"
pilotlight plan | indent '  '
watch_until jobs_are_over "$JOBS_TIMEOUT_SECONDS"

conclude hello 0
conclude fails 7
conclude primes 0
head_line "pilotlight jobs --all"
pilotlight jobs --all

head_line "Nothing to do: the machine goes away $IDLE_TIMEOUT_SECONDS s after its last job"
watch_until no_instances $((IDLE_TIMEOUT_SECONDS + 60))
pilotlight instances --all

[ -z "$wrong" ] || fail "not the expected exit code:$wrong"
