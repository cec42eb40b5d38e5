#!/usr/bin/env bash
# Builds the real Gitea server and its real runner, against which the tests of the forge side run.
#
#   build.sh           build what is missing and print the directory that holds it; milliseconds when nothing is missing
#
# The directory has `gitea`, `gitea-runner` and `static` (Gitea's templates, options and public files). It lies outside
# the checkout, so that every clone on a machine shares it: ${PILOTLIGHT_PEERS:-~/.cache/pilotlight/peers}/KEY, where
# KEY stands for the pinned modules and this script. Modules and object files stay in Go's own caches.
set -euo pipefail
cd "$(dirname "$0")"

say() { printf 'peers: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# The version that go.mod requires of a module.
version() { sed -nE "s|^[[:space:]]+$1 v([0-9][^[:space:]]*)$|\1|p" go.mod; }

has_go() {
  local needed found
  needed=$(sed -nE 's/^go ([0-9.]+)$/\1/p' go.mod)
  command -v go >/dev/null || die "Gitea needs Go $needed or newer, and there is no go command: https://go.dev/dl"
  # Asked here, a Go that may fetch another one answers for that.
  found=$(go env GOVERSION) || die "Gitea needs Go $needed or newer: https://go.dev/dl"
  found=${found#go}
  [ "$(printf '%s\n%s\n' "$needed" "$found" | sort -V | head -n 1)" = "$needed" ] ||
    die "Gitea needs Go $needed or newer, and this is $found: https://go.dev/dl"
}

# go_build FILE VERSION PACKAGE. SQLite in pure Go needs no C compiler. This checkout's commit must not get into it.
go_build() {
  # Two hundred modules are downloaded, a line each.
  CGO_ENABLED=0 GOFLAGS='' GOWORK=off go build -mod=readonly -buildvcs=false -ldflags "-s -w -X $2" -o "$1" "$3" \
    2> >(grep -v '^go: downloading ' >&2)
}

# One at a time, the others wait for its result; what a killed one left is begun again.
build() {
  local gitea runner unfinished=$1.unfinished began=$SECONDS
  gitea=$(version gitea.dev) runner=$(version gitea.com/gitea/runner)
  [ -n "$gitea" ] && [ -n "$runner" ] || die "go.mod names no version of gitea.dev or gitea.com/gitea/runner"
  has_go
  mkdir -p "$base"
  exec 9>"$base/lock"
  flock --nonblock 9 || { say "waiting for another build" && flock 9; }
  [ ! -d "$1" ] || return 0
  chmod -R u+w "$unfinished" 2>/dev/null || true
  rm -rf "$unfinished"
  mkdir -p "$unfinished/static"

  say "building Gitea $gitea and its runner $runner into $1 (some minutes the first time)"
  go_build "$unfinished/gitea" "main.Version=$gitea" gitea.dev
  go_build "$unfinished/gitea-runner" "gitea.com/gitea/runner/internal/pkg/ver.version=v$runner" gitea.com/gitea/runner
  # Copied, because Go's module cache may be cleaned.
  local source part
  source=$(go list -mod=readonly -m -f '{{.Dir}}' gitea.dev)
  for part in templates options public; do cp -R "$source/$part" "$unfinished/static/"; done
  chmod -R u+w "$unfinished/static"
  # Whole or not at all, on the disk too.
  sync -f "$unfinished"
  mv -T "$unfinished" "$1"
  say "built in $((SECONDS - began)) s"
}

base=${PILOTLIGHT_PEERS:-${XDG_CACHE_HOME:-${HOME:?}/.cache}/pilotlight/peers}
key=$(cat go.mod go.sum build.sh | sha256sum | cut -c-16)
[ -d "$base/$key" ] || build "$base/$key"
printf '%s\n' "$base/$key"
