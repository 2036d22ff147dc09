#!/usr/bin/env bash
# Prints what a payload costs the relay in instructions, of the sources as they stand here and of another commit, in turns
# in one VM whose clock counts instructions (1 ns each), with how far rounds lie apart.
#
#   perf/bench-diff.sh [COMMIT] [ARGUMENT…]     without a commit: only what stands here
#
# ARGUMENTs are further ones of `paced-perf bench-diff`. A build of COMMIT is kept in the target folder. Both relays are loaded
# by the generator that stands here.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
project=$(dirname "$here")
target=${CARGO_TARGET_DIR:-$project/target}

if [[ ${1-} == --guest ]]; then
  # From memory: waiting for a file of the host would let the clock jump.
  mkdir -p /tmp/bench
  cp "$target"/release/{paced,paced-perf} /tmp/bench/
  before=()
  if [[ $2 ]]; then
    cp "$2" /tmp/bench/paced-before
    before=(--before /tmp/bench/paced-before)
  fi
  # On one CPU all that is in flight may wait for the generator at once: what is lost there says nothing of a relay.
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
    # Files get the time of now: by those of the commit, cargo would take them for built.
    rm -rf "$target/before/$commit" && mkdir -p "$target/before/$commit/source"
    git -C "$project" archive "$commit" | tar -x -m -C "$target/before/$commit/source"
    build "$target/before/$commit/source" --bin paced
    mv "$target/release/paced" "$before"
    rm -rf "$target/before/$commit/source"
  fi
fi
build "$project"
exec "$project/tests/vm/run" --icount --timeout 900 "$here/bench-diff.sh" --guest "$before" "$@"
