# Sourced by demo.sh and bench.sh: a scaler of our own on this box, and the proof that nothing of it is left.
#
# The sourcing script calls `begin_box` first. However it ends (done, failed, Ctrl-C, SIGTERM at any moment), `leave` drains, stops the scaler,
# compares the box with how it was before, and stops a dockerd that was started here.
# shellcheck shell=bash

readonly READY_TIMEOUT_SECONDS=30
readonly DRAIN_TIMEOUT_SECONDS=120

scaler_pid=""
awaited_pid=""
declare -A submit_pid=()

say() { printf '%s\n' "$*"; }
head_line() { printf '\n== %s\n' "$*"; }
indent() { sed -u "s/^/$1/"; }
fail() {
  say "$program: $*" >&2
  exit 1
}
pilotlight() { "$bin/pilotlight" "$@"; }

# begin_box NAME PROFILE: sees to what is needed and remembers how the box was.
begin_box() {
  program=$1
  bin=${CARGO_TARGET_DIR:-$PWD/target}/$2
  work=$(mktemp -d "${TMPDIR:-/tmp}/pilotlight-$program.XXXXXX")
  state=$work/state
  trap leave EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  trap 'exit 129' HUP
  trap 'exit 141' PIPE
  head_line "What is needed: Rust and Docker"
  packaging/scripts/rust.sh
  packaging/scripts/docker.sh ensure --pidfile "$work/dockerd.pid"
  docker_things >"$work/before"
}

# Runs a long command so that a signal to this script acts at once: bash runs no trap while a foreground child lives.
await() {
  local status=0
  setsid "$@" &
  awaited_pid=$!
  wait "$awaited_pid" || status=$?
  awaited_pid=""
  return "$status"
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
    say "$program: Docker did not tell what is left" >&2
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

# write_config IDLE_TIMEOUT: the example's config, on a free port.
write_config() {
  local port=$((20000 + RANDOM % 10000))
  while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done
  sed -E -e "s/^(idle_timeout[[:space:]]*=[[:space:]]*).*/\1\"$1\"/" \
    -e "s/^(listen[[:space:]]*=[[:space:]]*).*/\1\"127.0.0.1:$port\"/" \
    packaging/examples/local.toml >"$work/local.toml"
  # A token in the environment is for another scaler; this one's lies in its state directory.
  unset PILOTLIGHT_TOKEN
  export PILOTLIGHT_URL=http://127.0.0.1:$port PILOTLIGHT_STATE_DIR=$state PILOTLIGHT_CONFIG=$work/local.toml
}

# In a session of its own: Ctrl-C is for this script, which drains before it stops the scaler.
start_scaler() {
  local waited=0
  setsid "$bin/pilotlight" run --config "$work/local.toml" --state-dir "$state" >>"$work/scaler.log" 2>&1 </dev/null &
  scaler_pid=$!
  until pilotlight status --json >/dev/null 2>&1; do
    if ! kill -0 "$scaler_pid" 2>/dev/null || [ "$waited" -ge $((READY_TIMEOUT_SECONDS * 5)) ]; then
      say "$program: the scaler ended or did not answer: $(tail -n 5 "$work/scaler.log")" >&2
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
  if [ "${#submit_pid[@]}" -gt 0 ] || has_instances; then
    head_line "Ending, one moment: pilotlight drain --all --now"
    note_instances
    end_submits TERM
    drain || say "$program: draining failed: $(tail -n 5 "$work/scaler.log")" >&2
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
    *) say "$program: failed; the scaler's log and state are in $work" >&2 ;;
  esac
  exit "$status"
}
