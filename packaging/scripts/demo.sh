#!/usr/bin/env bash
# `make demo`: the whole life of a CI machine on this box. Three jobs are queued, the scaler launches an instance, its
# agent runs them in containers, the machine goes away, and a look from the outside shows that nothing is left.
#
# However it ends (done, failed, Ctrl-C, SIGTERM at any moment), `leave` drains, stops the scaler, compares the box with
# how it was before, and stops a dockerd that was started here.
set -euo pipefail
cd "$(dirname "$0")/../.."

readonly IDLE_TIMEOUT_SECONDS=5
readonly READY_TIMEOUT_SECONDS=30
readonly JOBS_TIMEOUT_SECONDS=180
readonly DRAIN_TIMEOUT_SECONDS=120
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

work=$(mktemp -d "${TMPDIR:-/tmp}/pilotlight-demo.XXXXXX")
state=$work/state
bin=${CARGO_TARGET_DIR:-$PWD/target}/debug
scaler_pid=""
awaited_pid=""
declare -A submit_pid=()

say() { printf '%s\n' "$*"; }
head_line() { printf '\n== %s\n' "$*"; }
indent() { sed -u "s/^/$1/"; }
fail() {
  say "demo: $*" >&2
  exit 1
}
pilotlight() { "$bin/pilotlight" "$@"; }

# Runs a long command so that a signal to this script acts at once: bash runs no trap while a foreground child lives.
await() {
  setsid "$@" &
  awaited_pid=$!
  wait "$awaited_pid"
  awaited_pid=""
}

# ---------------------------------------------------------------------------------------------- the outside view

# One line each: kind, id, name, the instance in its label.
docker_things() {
  local label='{{.Label "pilotlight.instance"}}'
  docker ps --all --no-trunc --format "container {{.ID}} {{.Names}} $label"
  docker network ls --no-trunc --format "network {{.ID}} {{.Name}} $label"
  docker volume ls --format "volume {{.Name}} {{.Name}} $label"
}

# One line each: pid, start time, command. Another Pilotlight on this box is told apart by its directory.
our_processes() {
  local dir comm
  for dir in /proc/[0-9]*; do
    { read -r comm <"$dir/comm"; } 2>/dev/null || continue
    if [[ $comm == pilotlight* ]] && grep -qsaF "$work" "$dir/cmdline" "$dir/environ"; then
      describe_process "$dir"
    elif [ -s "$work/instances" ] && grep -qsFf "$work/instances" "$dir/cgroup"; then
      describe_process "$dir"
    fi
  done
}

describe_process() {
  local started command
  started=$(sed 's/.*) //' "$1/stat" 2>/dev/null | cut -d' ' -f20) || return 0
  command=$(tr '\0' ' ' <"$1/cmdline" 2>/dev/null) || return 0
  printf '%s %s %s\n' "${1#/proc/}" "$started" "$command"
}

# Every instance this scaler ever had: what lies on disk, and what it says while it answers.
note_instances() {
  {
    cat "$work/instances"
    ls "$state/local"
    pilotlight instances --all --json | grep -oE '"id": *"[^"]+"' | cut -d'"' -f4
  } 2>/dev/null | grep . | sort -u >"$work/instances.new" || true
  mv "$work/instances.new" "$work/instances"
}

# What Docker has now and had not before. A thing that carries the label of another Pilotlight's instance is not ours.
new_things() {
  local kind id name instance
  docker_things | while read -r kind id name instance; do
    if grep -qF "$kind $id " "$work/before"; then continue; fi
    if [ -n "$instance" ] && ! grep -qxF "$instance" "$work/instances"; then continue; fi
    printf '%s %s %s\n' "$kind" "$name" "$instance"
  done
}

# Prints the closing line; fails when anything is left.
prove_nothing_left() {
  local things instances processes
  touch "$work/instances"
  if ! things=$(new_things); then
    say "demo: Docker did not tell what is left" >&2
    return 1
  fi
  instances=$(find "$state/local" -mindepth 1 -maxdepth 1 2>/dev/null)
  processes=$(our_processes)
  head_line "Seen from outside (docker ps -a, network ls, volume ls, /proc), compared with before"
  printf '%s instances, %s containers, %s processes left (and %s networks, %s volumes)\n' \
    "$(count . "$instances")" "$(count '^container ' "$things")" "$(count . "$processes")" \
    "$(count '^network ' "$things")" "$(count '^volume ' "$things")"
  if [ -n "$things$instances$processes" ]; then
    printf '%s\n' "$things" "$instances" "$processes" | grep . | indent '  left: ' >&2
    return 1
  fi
}

count() { grep -c "$1" <<<"$2" || true; }

# ---------------------------------------------------------------------------------------------- the scaler

# The example's config, on a free port, with a short idle timeout.
write_config() {
  local port=$((20000 + RANDOM % 10000))
  while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done
  sed -E -e "s/^(idle_timeout[[:space:]]*=[[:space:]]*).*/\1\"${IDLE_TIMEOUT_SECONDS}s\"/" \
    -e "s/^(listen[[:space:]]*=[[:space:]]*).*/\1\"127.0.0.1:$port\"/" \
    packaging/examples/local.toml >"$work/local.toml"
  export PILOTLIGHT_URL=http://127.0.0.1:$port PILOTLIGHT_STATE_DIR=$state PILOTLIGHT_CONFIG=$work/local.toml
}

# In a session of its own: Ctrl-C is for this script, which drains before it stops the scaler.
start_scaler() {
  local waited=0
  setsid "$bin/pilotlight" run --config "$work/local.toml" --state-dir "$state" >>"$work/scaler.log" 2>&1 </dev/null &
  scaler_pid=$!
  until pilotlight status --json >/dev/null 2>&1; do
    if ! kill -0 "$scaler_pid" 2>/dev/null || [ "$waited" -ge $((READY_TIMEOUT_SECONDS * 5)) ]; then
      say "demo: the scaler ended or did not answer: $(tail -n 5 "$work/scaler.log")" >&2
      return 1
    fi
    waited=$((waited + 1))
    sleep 0.2
  done
}

stop_scaler() {
  local waited=0
  [ -n "$scaler_pid" ] || return 0
  kill -TERM "$scaler_pid" 2>/dev/null || true
  while kill -0 "$scaler_pid" 2>/dev/null; do
    [ "$waited" -ne 150 ] || kill -KILL "$scaler_pid" 2>/dev/null || true
    waited=$((waited + 1))
    sleep 0.2
  done
  scaler_pid=""
}

has_instances() { [ -n "$(ls -A "$state/local" 2>/dev/null)" ]; }

# Cancels what runs and waits until no machine is left; a scaler that died is started again for it.
drain() {
  if [ -z "$scaler_pid" ] || ! kill -0 "$scaler_pid" 2>/dev/null; then
    has_instances || return 0
    start_scaler || return 1
  fi
  timeout --kill-after=5 "$DRAIN_TIMEOUT_SECONDS" "$bin/pilotlight" drain --all --now 2>&1
}

# Each cancels its job on the first signal and ends at once on the second.
end_submits() {
  local pid
  for pid in "${submit_pid[@]}"; do kill "-$1" "$pid" 2>/dev/null; done
}

leave() {
  local status=$?
  set +e
  # From here on nothing may interrupt: what follows is bounded in time.
  trap '' INT TERM HUP PIPE
  [ -z "$awaited_pid" ] || kill -TERM -- "-$awaited_pid" 2>/dev/null
  if [ "$status" -ne 0 ] && { [ "${#submit_pid[@]}" -gt 0 ] || has_instances; }; then
    head_line "Ending early, one moment: pilotlight drain --all --now"
    note_instances
    end_submits TERM
    drain || say "demo: draining failed: $(tail -n 5 "$work/scaler.log")" >&2
    end_submits TERM
  fi
  note_instances
  stop_scaler
  end_submits KILL
  wait
  if [ -e "$work/before" ]; then prove_nothing_left || status=1; fi
  packaging/scripts/docker.sh stop --pidfile "$work/dockerd.pid" || status=1
  case "$status" in
    0 | 129 | 130 | 141 | 143) rm -rf "$work" ;;
    *) say "demo: failed; the scaler's log and state are in $work" >&2 ;;
  esac
  exit "$status"
}

# ---------------------------------------------------------------------------------------------- the jobs

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

# ---------------------------------------------------------------------------------------------- the show

trap leave EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP
trap 'exit 141' PIPE

head_line "What is needed: Rust and Docker"
packaging/scripts/rust.sh
packaging/scripts/docker.sh ensure --pidfile "$work/dockerd.pid"
docker_things >"$work/before"

head_line "Building (the first time takes a few minutes)"
await cargo build --locked --workspace --bins

head_line "Starting the scaler"
write_config
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
