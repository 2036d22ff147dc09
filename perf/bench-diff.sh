#!/usr/bin/env bash
# Prints the cost of a payload at the relay in instructions, for the sources in this tree and for another commit. Both run in
# turns in one VM whose clock counts instructions (1 ns each). Also prints how much the rounds differ.
#
#   perf/bench-diff.sh [COMMIT] [ARGUMENT…]     without a commit: only this tree
#
# ARGUMENTs are passed on to `paced-perf bench-diff`. A build of COMMIT is kept in the target folder. This tree's generator
# loads both relays.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
project=$(dirname "$here")
target=${CARGO_TARGET_DIR:-$project/target}

if [[ ${1-} == --guest ]]; then
  # From memory, because waiting for a file of the host would let the clock jump.
  mkdir -p /tmp/bench
  cp "$target"/release/{paced,paced-perf} /tmp/bench/
  before=()
  if [[ $2 ]]; then
    cp "$2" /tmp/bench/paced-before
    before=(--before /tmp/bench/paced-before)
  fi
  # On one CPU, everything in flight may wait for the generator at once: losses there say nothing about a relay.
  echo 16777216 | tee /proc/sys/net/core/{r,w}mem_max >/dev/null
  cd /tmp
  exec /tmp/bench/paced-perf bench-diff "${before[@]}" "${@:3}"
fi

build() { cargo build --quiet --release -p paced -p pacectl -p perf --manifest-path "$1/Cargo.toml" --target-dir "$target" "${@:2}"; }
before=
if [[ ${1-} && $1 != -* ]]; then
  commit=$(git -C "$project" rev-parse --verify --short=12 "$1^{commit}"); shift
  before=$target/before/$commit/paced
  if [[ ! -x $before ]]; then
    # Files get the current time: with the commit's times, cargo would consider them built.
    rm -rf "$target/before/$commit" && mkdir -p "$target/before/$commit/source"
    git -C "$project" archive "$commit" | tar -x -m -C "$target/before/$commit/source"
    build "$target/before/$commit/source" --bin paced
    mv "$target/release/paced" "$before"
    rm -rf "$target/before/$commit/source"
  fi
fi
build "$project"
exec "$project/tests/vm/run" --icount --timeout 900 "$here/bench-diff.sh" --guest "$before" "$@"
