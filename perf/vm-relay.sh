#!/usr/bin/env bash
# Measures instructions per relayed payload: the benchmark in the VM lab, whose clock counts instructions (1 ns each).
#
#   perf/vm-relay.sh [--kernel 6.12|6.1]                  writes perf/results/relay-virtual.json
#   perf/vm-relay.sh --long-lived [--kernel 6.12|6.1]     writes perf/results/long-lived-virtual.json: paced alone, with up to
#                                                         10,000 tunnels that stay open
#
# Needs release builds of paced and perf. The comparison with a peer that `perf/peers/build.sh` has not built is reported as skipped.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
project=$(dirname "$here")
target=${CARGO_TARGET_DIR:-$project/target}

if [[ ${1-} == --guest ]]; then
  # From memory, because waiting for a file of the host would let the clock jump.
  mkdir -p /tmp/bench/{release,peers}
  cp "$target"/release/{paced,paced-perf} /tmp/bench/release/
  if [[ ${2-} == --long-lived ]]; then
    ulimit -n 100000 # a socket for each tunnel
  else
    cp "$target"/peers/{quinn,quic-go}-relay /tmp/bench/peers/ 2>/dev/null || true
  fi
  # The same for libraries: their pages are read when they are first used, which may be in the middle of a run.
  ldd /tmp/bench/release/* | sed -n 's/.* => \(\/[^ ]*\) .*/\1/p' | sort -u | xargs cat >/dev/null
  # On one CPU, everything in flight may wait for the generator at once: losses there say nothing about a relay.
  echo 16777216 | tee /proc/sys/net/core/{r,w}mem_max >/dev/null
  cd /tmp
  exec /tmp/bench/release/paced-perf bench --virtual-time "${@:2}"
fi

what=() results=relay-virtual
if [[ ${1-} == --long-lived ]]; then what=(--long-lived) results=long-lived-virtual; shift; fi

PACED_COMMIT=${PACED_COMMIT:-$("$here/commit.sh")} PACED_TREES=${PACED_TREES:-$("$here/commit.sh" --trees)}
export PACED_COMMIT PACED_TREES
rows=$here/results/$results.json
# A run that fails shows its output, and keeps the existing rows.
rm -f "$rows.new"
"$project/tests/vm/run" --icount --timeout 2400 "$@" "$here/vm-relay.sh" --guest "${what[@]}" |
  awk -v to="$rows.new" '/^\{/ { print >to; next } { print; fflush() }'
mv "$rows.new" "$rows"
echo "written to perf/results/$results.json"
