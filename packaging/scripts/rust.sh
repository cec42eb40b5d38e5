#!/usr/bin/env bash
# Is there what builds Pilotlight? Exits 1 and names the one command otherwise.
set -euo pipefail
cd "$(dirname "$0")/../.."

needed=$(sed -nE 's/^rust-version = "(.*)"/\1/p' Cargo.toml)
if ! command -v cargo >/dev/null || ! command -v rustc >/dev/null; then
  echo "rust: Rust $needed or newer is needed. Install it with this command, then open a new shell and try again:" >&2
  echo "  curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh" >&2
  exit 1
fi
found=$(rustc --version | cut -d' ' -f2)
if [ "$(printf '%s\n%s\n' "$needed" "$found" | sort -V | head -n 1)" != "$needed" ]; then
  echo "rust: Rust $found is too old, $needed or newer is needed: rustup update stable" >&2
  exit 1
fi
if ! command -v cc >/dev/null; then
  echo "rust: a C compiler is needed for SQLite and aws-lc (Debian: apt-get install gcc libc6-dev)" >&2
  exit 1
fi
