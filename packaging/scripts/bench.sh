#!/usr/bin/env bash
# `make bench`: what a user waits for, on a release build, on this box with its real Docker. A job is measured in pairs
# with a bare `docker run` that does the same, in turn, so that both see the same noise; the median counts.
set -euo pipefail
cd "$(dirname "$0")/../.."

# shellcheck source=packaging/scripts/box.sh
. packaging/scripts/box.sh

readonly PAIRS=${PAIRS:-15}
readonly LOG_BYTES=$((100 * 1024 * 1024))
readonly IMAGE=pilotlight-bench:empty

job() { await "$bin/pilotlight" submit --label cpu-small --image pilotlight/host -- "$@"; }

# The nearest that plain Docker has to `pilotlight/host`: an empty image with the host's programs mounted.
bare() {
  local dir mounts=()
  for dir in /usr /bin /lib /lib64; do [ ! -e "$dir" ] || mounts+=(--volume "$dir:$dir:ro"); done
  await docker run --rm --init --log-driver none "${mounts[@]}" "$IMAGE" "$@"
}

# Sets `elapsed` to the wall time of a command in milliseconds. No subshell: `leave` must know what is awaited.
timed() {
  local began=$EPOCHREALTIME ended
  "$@" 2>"$work/command.err" >"$work/command.out" || fail "$*: $(cat "$work/command.err")"
  ended=$EPOCHREALTIME
  elapsed=$(((${ended/./} - ${began/./}) / 1000))
}

median() { sort -n "$1" | awk '{ value[NR] = $1 } END { print value[int((NR + 1) / 2)] }'; }

# resident WORD: memory of our process whose command line has it.
resident() {
  local pid
  pid=$(our_processes | grep -m 1 -F -- "$1" | cut -d' ' -f1)
  awk '/^VmRSS:/ { printf "%.1f MB", $2 / 1000 }' "/proc/$pid/status"
}

row() { printf '%-52s %16s   %s\n' "$@"; }

begin_box bench release
head_line "Building for release (the first time takes many minutes)"
await cargo build --locked --release --workspace --bins
write_config 10m
start_scaler
docker image inspect "$IMAGE" >/dev/null 2>&1 || tar --create --files-from /dev/null | docker import - "$IMAGE" >/dev/null

head_line "Measuring"
timed job true
cold=$elapsed
for ((pair = 0; pair < PAIRS; pair++)); do
  timed bare true
  echo "$elapsed" >>"$work/bare"
  timed job true
  echo "$elapsed" >>"$work/job"
done
timed job bash -c "yes $(printf '%.0sx' {1..99}) | head -c $LOG_BYTES"
log_speed=$((LOG_BYTES / 1000 / (elapsed > 0 ? elapsed : 1)))
log_received=$(wc -c <"$work/command.out")

row "what" "measured" "budget"
row "first job, no machine: submit to exit" "$cold ms" ""
row "warm machine: job that does nothing, submit to exit" "$(median "$work/job") ms" ""
row "  the same by docker run" "$(median "$work/bare") ms" "the job at most 100 ms and 1.3 times above"
row "log, 100 MiB of 100-byte lines, to the client" "$log_speed MB/s" "at least 50 MB/s"
row "scaler, resident" "$(resident ' run --config')" "32 MB with 200 instances"
row "agent, resident" "$(resident "pilotlight-agent run")" "15 MB idle"
for program_file in pilotlight pilotlight-agent; do
  row "$program_file, stripped" "$(($(stat --format %s "$bin/$program_file") / 1000000)) MB" "20 MB"
done
docker image rm "$IMAGE" >/dev/null
[ "$log_received" = "$LOG_BYTES" ] || fail "the log has $log_received bytes instead of $LOG_BYTES"

head_line "Planning"
await cargo bench --quiet --locked -p pilotlight-scaler --bench fleet
