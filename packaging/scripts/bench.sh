#!/usr/bin/env bash
# `make bench`: a release build beside its budgets (design 10), on this box with its real Docker.
#
#   make bench                      all of it
#   make bench ONLY="jobs log"      some of it: jobs, cold, log, sizes, plan, agents
#   PAIRS=50 make bench ONLY=jobs   more pairs
#
# A job is measured in pairs with a bare `docker run` that does the same, in turn, so that both see the same noise; the
# median counts.
set -euo pipefail
cd "$(dirname "$0")/../.."

# shellcheck source=packaging/scripts/box.sh
. packaging/scripts/box.sh

readonly PAIRS=${PAIRS:-20}
readonly COLD=${COLD:-10}
readonly LOGS=${LOGS:-3}
readonly LOG_BYTES=$((100 * 1024 * 1024))
readonly IMAGE=pilotlight-bench:empty
# How long a program is left alone before its memory counts as that of an idle one.
readonly IDLE_SECONDS=6
job_options=()
read -ra only <<<"${ONLY:-jobs cold log sizes plan agents}"

wanted() { [[ " ${only[*]} " == *" $1 "* ]]; }

job() { await "$bin/pilotlight" submit --label "$label" --image pilotlight/host "${job_options[@]}" -- "$@"; }

# The nearest that plain Docker has to `pilotlight/host`: an empty image with the host's programs mounted.
bare() {
  local dir mounts=()
  for dir in /usr /bin /lib /lib64; do [ ! -e "$dir" ] || mounts+=(--volume "$dir:$dir:ro"); done
  await docker run --rm --init --log-driver none "${mounts[@]}" "$IMAGE" "$@"
}

# Sets `elapsed` to the wall time of a command in microseconds. No subshell: `leave` must know what is awaited.
timed() {
  began=${EPOCHREALTIME/./}
  "$@" 2>"$work/command.err" >"$work/command.out" || fail "$*: $(cat "$work/command.err")"
  elapsed=$((${EPOCHREALTIME/./} - began))
}

# start_of NAME COMMAND: notes how long the command took to the first step of its program, and to its end. The program
# is date(1): it says when it began, by the same clock.
start_of() {
  timed "$2" date +%s%6N
  echo "$(($(cat "$work/command.out") - began))" >>"$work/$1.start"
  echo "$elapsed" >>"$work/$1.end"
}

median() { sort -n "$1" | awk '{ value[NR] = $1 } END { printf "%d", value[int((NR + 1) / 2)] }'; }
millis() { awk -v us="$1" 'BEGIN { printf "%.0f ms", us / 1000 }'; }
ratio() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.2f x", a / b }'; }

pid_of() { our_processes | grep -m 1 -F -- "$1" | cut -d' ' -f1; }
# memory PID KEY: in kB. `VmHWM` is the most since the last `forget_peak`.
memory() { awk -v key="$2:" '$1 == key { print $2 }' "/proc/$1/status"; }
forget_peak() { echo 5 >"/proc/$1/clear_refs"; }
mega() { awk -v kb="$1" 'BEGIN { printf "%.1f MB", kb / 1000 }'; }

row() { printf '%-58s %24s   %s\n' "$@"; }

# ---------------------------------------------------------------------------------------------- what is measured

measure_jobs() {
  label=cpu-small
  timed job true
  local pair
  for ((pair = 0; pair < PAIRS; pair++)); do
    # Who goes first changes: what one leaves to be cleaned up slows down the next.
    if ((pair % 2)); then start_of bare bare && start_of job job; else start_of job job && start_of bare bare; fi
  done
  local kind ours theirs
  for kind in start end; do
    ours=$(median "$work/job.$kind") theirs=$(median "$work/bare.$kind")
    row "warm machine, submit to $kind, $PAIRS pairs" "$(millis "$ours")" ""
    row "  the same by docker run" "$(millis "$theirs")" ""
    row "  above it" "$(millis $((ours - theirs))), $(ratio "$ours" "$theirs")" "$([ $kind = end ] || echo '100 ms and 1.3 x')"
  done
}

# The time between two phases of the last job, in microseconds.
phase() {
  "$bin/pilotlight" jobs --all --json | python3 -c '
import json, sys
from datetime import datetime
job = next(job for job in json.load(sys.stdin) if job["id"] == sys.argv[1])
a, b = (datetime.fromisoformat(job["phases"][phase][:26].rstrip("Z") + "+00:00") for phase in sys.argv[2:])
print(int((b - a).total_seconds() * 1e6))' "$(grep -oE '"job": *"[^"]+"' "$work/result" | cut -d'"' -f4)" "$1" "$2"
}

# Each job has a machine of its own: the pool's machines take one job ever.
measure_cold() {
  label=once job_options=(--result-file "$work/result")
  local n
  for ((n = 0; n < COLD; n++)); do
    timed job true
    echo "$elapsed" >>"$work/cold"
    phase launched enrolled >>"$work/launched"
    phase booted enrolled >>"$work/booted"
  done
  job_options=()
  row "first job, no machine, submit to exit, $COLD times" "$(millis "$(median "$work/cold")")" ""
  row "  launch call to enrolled (local provider, nothing boots)" "$(millis "$(median "$work/launched")")" "3 s"
  row "  agent looked at its box, to enrolled" "$(millis "$(median "$work/booted")")" "200 ms"
}

# log_of NAME LINE: several times, and how much the two programs grew.
log_of() {
  local n speed scaler agent idle_scaler idle_agent
  scaler=$(pid_of ' run --config') agent=$(pid_of 'pilotlight-agent run')
  idle_scaler=$(memory "$scaler" VmRSS) idle_agent=$(memory "$agent" VmRSS)
  forget_peak "$scaler" && forget_peak "$agent"
  for ((n = 0; n < LOGS; n++)); do
    timed job bash -c "yes $2 | head -c $LOG_BYTES"
    speed=$((LOG_BYTES * 10 / (elapsed > 0 ? elapsed : 1)))
    echo "$speed" >>"$work/log.$1"
    [ "$(wc -c <"$work/command.out")" = "$LOG_BYTES" ] || fail "a log has $(wc -c <"$work/command.out") bytes instead of $LOG_BYTES"
    timed bare bash -c "yes $2 | head -c $LOG_BYTES"
    echo $((LOG_BYTES * 10 / (elapsed > 0 ? elapsed : 1))) >>"$work/bare-log.$1"
  done
  row "log, 100 MiB of $1-byte lines, to the client, $LOGS times" "$(($(median "$work/log.$1") / 10)) MB/s" "$3"
  row "  the same by docker run, in turn" "$(($(median "$work/bare-log.$1") / 10)) MB/s" ""
  row "  scaler, at most above idle" "$(mega $(($(memory "$scaler" VmHWM) - idle_scaler)))" "40 MB"
  row "  agent, at most above idle" "$(mega $(($(memory "$agent" VmHWM) - idle_agent)))" "40 MB"
}

measure_log() {
  label=cpu-small
  timed job true
  sleep "$IDLE_SECONDS"
  row "agent, resident, idle" "$(mega "$(memory "$(pid_of 'pilotlight-agent run')" VmRSS)")" "15 MB"
  row "scaler, resident, idle, 1 machine" "$(mega "$(memory "$(pid_of ' run --config')" VmRSS)")" ""
  log_of 100 "$(printf '%.0sx' {1..99})" "50 MB/s"
  log_of 17 "$(printf '%.0sx' {1..16})" ""
  sleep "$IDLE_SECONDS"
  row "agent, resident, after these logs" "$(mega "$(memory "$(pid_of 'pilotlight-agent run')" VmRSS)")" ""
  row "scaler, resident, after these logs" "$(mega "$(memory "$(pid_of ' run --config')" VmRSS)")" ""
}

measure_sizes() {
  local program_file
  for program_file in pilotlight pilotlight-agent; do
    row "$program_file, stripped" "$(($(stat --format %s "$bin/$program_file") / 1000000)) MB" "20 MB"
  done
}

begin_box bench release
head_line "Building for release (the first time takes many minutes)"
await cargo build --locked --release --workspace --bins
head_line "Measuring; load average $(cut -d' ' -f1-3 /proc/loadavg), $(nproc) cores"
if wanted sizes; then measure_sizes; fi
if wanted jobs || wanted cold || wanted log; then
  write_config 10m
  cat >>"$work/local.toml" <<'EOF'

[label.once]
pool = "once"
gpus = 0
timeout = "1h"

[pool.once]
placements = ["once"]
max_instances = 4
cpu_jobs = 1
reuse = false

[placement.once.local]
gpus = 0
max_instances = 4
EOF
  start_scaler
  docker image inspect "$IMAGE" >/dev/null 2>&1 || tar --create --files-from /dev/null | docker import - "$IMAGE" >/dev/null
  for part in jobs cold log; do
    if wanted $part; then "measure_$part"; fi
  done
  docker image rm "$IMAGE" >/dev/null
fi
if wanted plan; then
  head_line "Planning"
  await cargo bench --quiet --locked -p pilotlight-scaler --bench fleet
fi
if wanted agents; then
  head_line "A thousand played agents, the real scaler on one core"
  await cargo bench --quiet --locked -p pilotlight-benches --bench agents
fi
