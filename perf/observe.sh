#!/usr/bin/env bash
# Prepares this machine for perf and runs pacectl on a paced that runs on it:  perf/observe.sh trace|flamegraph [OPTION…]
# Where paced is installed, pacectl alone does the same with the tools at hand; this script adds the missing ones.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-$PWD/target}
sudo=(); ((EUID == 0)) || sudo=(sudo)

tests/setup perf >&2
# If this fails, pacectl reports what it needs.
[[ -d /sys/kernel/tracing/events ]] || "${sudo[@]}" mount -t tracefs none /sys/kernel/tracing || true

for pacectl in "${PACECTL:-}" "$target/release/pacectl" "$target/quick/pacectl" "$target/debug/pacectl" "$(command -v pacectl)"; do
  [[ -x $pacectl ]] && exec "${sudo[@]}" "$pacectl" "$@"
done
echo "perf/observe.sh: there is no pacectl; cargo build --release --bins" >&2
exit 1
