#!/usr/bin/env bash
# Runs a plan in the VM lab: over netem, with a clock that counts instructions (1 ns each).
#
#   perf/vm-plan.sh [--kernel 6.12|6.1] [--timeout SECONDS] [--out PREFIX] PLAN [ARGUMENT…]
#
# Writes PREFIX.json and, for plans with a picture, PREFIX.svg; without --out, PREFIX is perf/results/PLAN-lab.
# ARGUMENTs are passed on to `paced-perf run`. Needs release builds of paced and perf: with PACED_PROFILE=debug it uses
# the output of `cargo build`, but then the CPU is several times slower. Rows of quic-go need its peers:
# `perf/peers/build.sh`.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
project=$(dirname "$here")
target=${CARGO_TARGET_DIR:-$project/target}
profile=${PACED_PROFILE:-release}

if [[ ${1-} == --guest ]]; then
  # From memory, because waiting for a file of the host would let the clock jump.
  mkdir -p /tmp/run /tmp/peers
  cp "$target/$profile"/{paced,paced-perf} /tmp/run/
  cp "$target/peers/quic-go-streams" /tmp/peers/ 2>/dev/null || true # Without it, the run reports which schedulers it omits.
  # The same for libraries: their pages are read when they are first used, which may be in the middle of a run.
  ldd /tmp/run/* | sed -n 's/.* => \(\/[^ ]*\) .*/\1/p' | sort -u | xargs cat >/dev/null
  for module in veth sch_netem sch_fq sch_ingress cls_bpf tcp_bbr tcp_diag; do modprobe "$module"; done
  PATH=/tmp/run:$PATH RUST_LOG=warn,edge=info paced-perf run "${@:2}" --clock lab --json /tmp/results.json --plot /tmp/results.svg
  # Files vanish with the guest.
  cat /tmp/results.json
  for picture in /tmp/results*.svg; do
    [[ -e $picture ]] || continue # Some plans draw none.
    echo "=== ${picture#/tmp/results}"
    cat "$picture"
    echo "==="
  done
  exit
fi

options=(--timeout 1200) out=
while [[ ${1-} == --* ]]; do
  if [[ $1 == --out ]]; then out=$2; else options+=("$1" "$2"); fi
  shift 2
done
plan=${1:?a plan}; shift
out=${out:-$here/results/$plan-lab}
PACED_COMMIT=${PACED_COMMIT:-$("$here/commit.sh")} PACED_TREES=${PACED_TREES:-$("$here/commit.sh" --trees)}
export PACED_COMMIT PACED_TREES PACED_PROFILE=$profile
# A run that fails keeps the existing rows.
rm -f "$out.json.new"
"$project/tests/vm/run" --icount "${options[@]}" "$here/vm-plan.sh" --guest "$plan" "$@" | awk -v to="$out" '
  /^=== / { picture = to $2; printf "" >picture; next }
  /^===$/ { picture = ""; next }
  picture { print >picture; next }
  /^\{/ { print >(to ".json.new"); next }
  { print; fflush() }'
mv "$out.json.new" "$out.json"
