#!/usr/bin/env bash
# Sees to the programs with which `make test` cuts networks and steps clocks.
#
#   tools.sh check       exit 0 when all are there, else 1 and what is missing
#   tools.sh ensure      install what is missing, with apt-get
set -euo pipefail

say() { printf 'tools: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# Some distributions keep these out of a user's path.
PATH=$PATH:/usr/sbin:/sbin

has_faketime() {
  local library
  for library in /usr/lib/*/faketime/libfaketimeMT.so.1 /usr/lib64/faketime/libfaketimeMT.so.1 \
    /usr/lib/faketime/libfaketimeMT.so.1; do
    if [ -e "$library" ]; then return 0; fi
  done
  return 1
}

# Debian's names of the packages that are missing.
missing() {
  command -v unshare >/dev/null || echo util-linux
  command -v ip >/dev/null || echo iproute2
  command -v nft >/dev/null || echo nftables
  has_faketime || echo faketime
}

check() {
  local packages
  packages=$(missing | paste -sd ' ')
  [ -z "$packages" ] || die "missing, by the names of Debian's packages: $packages"
}

ensure() {
  local packages
  mapfile -t packages < <(missing)
  [ "${#packages[@]}" != 0 ] || return 0
  command -v apt-get >/dev/null ||
    die "install with this system's own package manager, by Debian's names: ${packages[*]}"
  [ "$(id -u)" = 0 ] || die "root is needed once: sudo apt-get install ${packages[*]}"
  say "installing ${packages[*]}"
  # Debian enables the service nftables only when somebody asks for it: no rule of this machine changes.
  DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${packages[@]}" >&2 ||
    { apt-get update -q >&2 && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${packages[@]}" >&2; } ||
    die "apt-get could not install: ${packages[*]}"
  check
}

case "${1:-}" in
  check) check ;;
  ensure) ensure ;;
  *)
    sed -n '2,5s/^# \{0,1\}//p' "$0" >&2
    exit 64
    ;;
esac
