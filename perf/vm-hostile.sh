#!/usr/bin/env bash
# Measures the cost of a hostile client's packets by kind, in the VM lab, whose clock counts instructions.
#
#   perf/vm-hostile.sh [--kernel 6.12|6.1] [--timeout SECONDS] [ARGUMENT…]     writes perf/results/hostile-lab.json
#
# ARGUMENTs are passed on to `tests/interop/run.sh hostile`. Needs a release build of paced: with PACED_PROFILE=debug it
# uses the output of `cargo build`, but then the CPU is several times slower.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
project=$(dirname "$here")
target=${CARGO_TARGET_DIR:-$project/target}
profile=${PACED_PROFILE:-release}

if [[ ${1-} == --guest ]]; then
  # From memory, because waiting for a file of the host would let the clock jump.
  mkdir -p /tmp/run
  cp "$target/$profile/paced" /tmp/run/
  cp -r "$target/interop-venv" /tmp/run/venv
  cp "$project"/tests/interop/*.py /tmp/run/
  RUST_LOG=error /tmp/run/paced run --state-dir /tmp/state >/tmp/output 2>&1 &
  relay=$!
  until grep -q "Try, in another terminal" /tmp/output; do
    kill -0 $relay || { cat /tmp/output; exit 1; }
    sleep 0.1
  done
  status=0
  /tmp/run/venv/bin/python /tmp/run/hostile.py --insecure --pid $relay --clock instructions --json /tmp/results.json \
    "${@:2}" || status=$?
  # Files vanish with the guest.
  cat /tmp/results.json
  exit $status
fi

options=(--timeout 1800)
while [[ ${1-} == --kernel || ${1-} == --timeout ]]; do options+=("$1" "$2"); shift 2; done
"$project/tests/interop/run.sh" hostile --help >/dev/null
PACED_COMMIT=${PACED_COMMIT:-$("$here/commit.sh")} PACED_TREES=${PACED_TREES:-$("$here/commit.sh" --trees)}
export PACED_COMMIT PACED_TREES PACED_PROFILE=$profile
out=$here/results/hostile-lab.json
# A run that fails keeps the existing rows.
"$project/tests/vm/run" --icount "${options[@]}" "$here/vm-hostile.sh" --guest "$@" | awk -v to="$out.new" '
  BEGIN { printf "" >to }
  /^\{/ { print >to; next }
  { print; fflush() }'
mv "$out.new" "$out"
