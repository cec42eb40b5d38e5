#!/usr/bin/env bash
# Sees to Docker for `make demo` and `make test`: is there one, install one, start one, stop the one we started.
#
#   docker.sh check                   exit 0 and one line when a Docker answers, else 1 and what is missing
#   docker.sh install [--yes]         with the system's package manager, after saying what it will do
#   docker.sh start  --pidfile FILE   start dockerd unless one answers; FILE exists only when we started it
#   docker.sh ensure --pidfile FILE   all of the above, as far as needed
#   docker.sh stop   --pidfile FILE   stop the dockerd of FILE, and no other
#
# A Docker that is there is used as it is: no file of its configuration is touched.
set -euo pipefail

# Any Docker from here on runs jobs; handing out GPUs by UUID wants CDI, which came with 25.
readonly OLDEST=20.10
readonly SUITE_WITH_CDI=trixie
readonly START_TIMEOUT_SECONDS=60
readonly STOP_TIMEOUT_SECONDS=60

say() { printf 'docker: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

server_version() { timeout 10 docker version --format '{{.Server.Version}}' 2>/dev/null; }
is_root() { [ "$(id -u)" = 0 ]; }
has_systemd() { [ -d /run/systemd/system ]; }
# Field 22 of /proc/PID/stat tells a process from a later one with the same pid; the name before it may hold spaces.
start_time() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }
# A dead process that nobody has reaped still has its start time.
is_running() { [ "$(start_time "$1")" = "$2" ] && ! grep -q '^State:[[:space:]]*Z' "/proc/$1/status" 2>/dev/null; }

check() {
  local version cdi
  if ! command -v docker >/dev/null; then
    say "there is no docker command"
    return 1
  fi
  if ! version=$(server_version) || [ -z "$version" ]; then
    if [ -z "${DOCKER_HOST:-}" ] && [ -S /var/run/docker.sock ] && ! [ -w /var/run/docker.sock ]; then
      say "this user may not use /var/run/docker.sock: run as root (sudo), or add the user to the group 'docker'"
    else
      say "no Docker answers at ${DOCKER_HOST:-/var/run/docker.sock}"
    fi
    return 1
  fi
  if [ "$(printf '%s\n%s\n' "$OLDEST" "$version" | sort -V | head -n 1)" != "$OLDEST" ]; then
    say "Docker $version is too old: $OLDEST or newer is needed"
    return 1
  fi
  cdi=$(timeout 10 docker info --format '{{len .CDISpecDirs}}' 2>/dev/null) || cdi=0
  if [ "$cdi" = 0 ]; then
    say "Docker $version answers; CDI is off, which matters only where GPUs are handed out"
  else
    say "Docker $version answers; CDI is on"
  fi
}

# Debian's own mirror as this machine knows it, so that a local mirror or proxy goes on being used.
debian_mirror() {
  local found
  found=$(
    {
      sed -n 's/^URIs:[[:space:]]*//p' /etc/apt/sources.list.d/*.sources
      sed -nE 's/^deb[[:space:]]+(\[[^]]*\][[:space:]]+)?([^[:space:]]+).*/\2/p' \
        /etc/apt/sources.list /etc/apt/sources.list.d/*.list
    } 2>/dev/null | tr ' ' '\n' | grep -E '/debian/?$' | head -n 1
  ) || true
  [ -n "${found:-}" ] || die "no apt source of this Debian release was found; install Docker 20.10 or newer by hand"
  printf '%s\n' "$found"
}

os_release() (
  # shellcheck source=/dev/null
  . /etc/os-release && printf '%s\n' "${!1:-}"
)

confirm() {
  [ "$1" != --yes ] || return 0
  if [ -t 0 ] && [ -t 2 ]; then
    local answer=""
    printf 'docker: go on? [y/N] ' >&2
    read -r answer || true
    case "$answer" in
      [yY]*) ;;
      *) die "not installed" ;;
    esac
  fi
}

install() {
  local yes=${1:-} id codename packages=(docker.io) pin="" suite="" mirror=""
  [ "$(uname -s)" = Linux ] || die "jobs run in Linux containers: install Docker Desktop, colima or podman's \
machine, start it, and run this again (an agent must share the machine with its Docker, so use a Linux VM)"
  [ -r /etc/os-release ] || die "unknown Linux without /etc/os-release: install Docker $OLDEST or newer by hand"
  id=$(os_release ID) codename=$(os_release VERSION_CODENAME)
  if ! command -v apt-get >/dev/null; then
    die "on ${id:-this system} install Docker $OLDEST or newer with its own package manager (Fedora: dnf install \
moby-engine; Arch: pacman -S docker; Alpine: apk add docker), start it, and run this again"
  fi
  is_root || die "installing Docker needs root: run 'sudo $0 install', then start again"

  # Debian 12's own Docker is 20.10, without CDI; the next release's installs cleanly beside Debian 12's runc.
  if [ "$id" = debian ] && [ "$codename" = bookworm ]; then
    suite=$SUITE_WITH_CDI
    packages=("docker.io/$suite" "containerd/$suite")
    pin="Package: *
Pin: release n=$suite
Pin-Priority: 100"
    mirror=$(debian_mirror)
  fi
  # Debian 13 and later have the command in a package of its own.
  if [ "$id" = debian ] && [ "$codename" != bullseye ] && ! command -v docker >/dev/null; then
    packages+=("docker-cli${suite:+/$suite}")
  fi
  # Where the kernel enforces AppArmor, no container starts without its parser.
  if grep -qs Y /sys/module/apparmor/parameters/enabled && ! command -v apparmor_parser >/dev/null; then
    packages+=(apparmor)
  fi

  say "no usable Docker here. This is what will be done, as root:"
  if [ -n "$pin" ]; then
    say "  add the apt source   deb $mirror $suite main   (sources.list.d/pilotlight-$suite.list)"
    say "  pin it at 100, so that nothing else is taken from it   (preferences.d/pilotlight-$suite)"
  fi
  say "  apt-get update"
  say "  apt-get install --no-install-recommends ${packages[*]} ca-certificates"
  if has_systemd; then say "  the package starts Docker as a service of this system, and it stays on"; fi
  confirm "$yes"

  if [ -n "$pin" ]; then
    printf '%s\n' "$pin" >"/etc/apt/preferences.d/pilotlight-$suite"
    printf 'deb %s %s main\n' "$mirror" "$suite" >"/etc/apt/sources.list.d/pilotlight-$suite.list"
  fi
  apt-get update -q
  hold_services
  DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${packages[@]}" ca-certificates
}

# Without systemd the package's init script would start a dockerd that nobody stops: that is what `start` is for.
hold_services() {
  if has_systemd || [ -e /usr/sbin/policy-rc.d ]; then return; fi
  printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
  chmod 755 /usr/sbin/policy-rc.d
  trap 'rm -f /usr/sbin/policy-rc.d' EXIT
}

start() {
  local pidfile=$1 log=$1.log config=/etc/docker/daemon.json pid waited=0 interrupted=no
  if check 2>/dev/null; then
    check
    return
  fi
  [ -z "${DOCKER_HOST:-}" ] || die "DOCKER_HOST is $DOCKER_HOST and no Docker answers there; start it, or unset DOCKER_HOST"
  command -v dockerd >/dev/null || die "there is no dockerd to start"
  is_root || die "starting dockerd needs root: run with sudo, or start Docker as a service"
  if [ ! -e "$config" ]; then
    config=$pidfile.json
    printf '{"features":{"cdi":true}}\n' >"$config"
  fi
  # A session of its own: Ctrl-C on the terminal must reach us and not it. Signals wait until its pid is written down.
  trap 'interrupted=yes' INT TERM HUP
  setsid dockerd --config-file "$config" >"$log" 2>&1 </dev/null &
  pid=$!
  printf '%s %s\n' "$pid" "$(start_time "$pid")" >"$pidfile"
  say "started dockerd (pid $pid)"
  while ! server_version >/dev/null; do
    [ "$interrupted" = no ] || exit 130
    if ! kill -0 "$pid" 2>/dev/null; then
      tail -n 15 "$log" >&2
      rm -f "$pidfile"
      die "dockerd ended at once; the end of its log is above"
    fi
    if [ "$waited" -ge $((START_TIMEOUT_SECONDS * 5)) ]; then
      tail -n 15 "$log" >&2
      stop "$pidfile" || true
      die "dockerd did not answer within $START_TIMEOUT_SECONDS s; the end of its log is above"
    fi
    waited=$((waited + 1))
    sleep 0.2
  done
  [ "$interrupted" = no ] || exit 130
  check
}

stop() {
  local pidfile=$1 pid started waited=0
  [ -e "$pidfile" ] || return 0
  read -r pid started <"$pidfile"
  if is_running "$pid" "$started"; then
    kill -TERM "$pid"
    while is_running "$pid" "$started"; do
      [ "$waited" -lt $((STOP_TIMEOUT_SECONDS * 5)) ] || die "dockerd (pid $pid) is still there $STOP_TIMEOUT_SECONDS s after SIGTERM"
      waited=$((waited + 1))
      sleep 0.2
    done
    say "stopped the dockerd that was started here (pid $pid)"
  fi
  rm -f "$pidfile" "$pidfile.json" "$pidfile.log"
}

ensure() {
  if ! check; then
    command -v dockerd >/dev/null || install
    start "$1"
  fi
}

case "${1:-}" in
  check) check ;;
  install) install "${2:-}" ;;
  start | ensure | stop)
    [ "${2:-}" = --pidfile ] && [ -n "${3:-}" ] || die "usage: $0 $1 --pidfile FILE"
    "$1" "$3"
    ;;
  *)
    sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
    exit 64
    ;;
esac
