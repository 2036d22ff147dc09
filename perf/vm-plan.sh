#!/usr/bin/env bash
# Runs a plan in the VM lab: over netem, with a clock that counts instructions (1 ns each).
#
#   perf/vm-plan.sh [--kernel 6.12|6.1] [--timeout SECONDS] [--out PREFIX] PLAN [ARGUMENT…]
#
# Writes PREFIX.json and, for plans with a picture, PREFIX.svg; without --out, PREFIX is perf/results/PLAN-lab, and
# PLAN-lab-6.1 with that kernel. Rows of other variants that PREFIX.json has stay in it.
# ARGUMENTs are passed on to `paced-perf run`. Needs release builds of paced and perf: with PACED_PROFILE=debug it uses
# the output of `cargo build`, but then the CPU is several times slower. Rows of quic-go need its peers:
# `perf/peers/build.sh`. With PACED_SAMPLES=5000, perf takes 5,000 samples of each thread per second of its CPU time, and
# PREFIX.folded has their stacks, one per line, as for flame graphs: use it with one scheduler and `--repetitions 1`.
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
  sampled=()
  if [[ ${PACED_SAMPLES-} ]]; then
    sysctl -qw kernel.perf_event_max_sample_rate="$PACED_SAMPLES" kernel.perf_cpu_time_max_percent=0 kernel.kptr_restrict=0
    sampled=(perf record --quiet --freq "$PACED_SAMPLES" -g --event cpu-clock --output /tmp/perf.data --)
  fi
  PATH=/tmp/run:$PATH RUST_LOG=warn,edge=info "${sampled[@]}" paced-perf run "${@:2}" --clock lab --json /tmp/results.json --plot /tmp/results.svg
  # Files vanish with the guest.
  cat /tmp/results.json
  for picture in /tmp/results*.svg; do
    [[ -e $picture ]] || continue # Some plans draw none.
    echo "=== ${picture#/tmp/results}"
    cat "$picture"
    echo "==="
  done
  if [[ ${PACED_SAMPLES-} ]]; then
    echo "=== .folded"
    # A sample is a line with program and thread, and a line for each function from the innermost on.
    perf script --input /tmp/perf.data --fields comm,tid,ip,sym 2>/dev/null | awk '
      !NF { if (stack) counts[thread stack]++; thread = stack = ""; next }
      !thread { thread = $1 "-" $NF; next }
      { $1 = ""; sub(/^ /, ""); gsub(/;/, ","); stack = ";" $0 stack }
      END { for (stack in counts) print stack, counts[stack] }' | sort
    echo "==="
  fi
  exit
fi

options=(--timeout 1200) out= kernel=
while [[ ${1-} == --* ]]; do
  if [[ $1 == --out ]]; then out=$2; else options+=("$1" "$2"); fi
  if [[ $1 == --kernel && $2 != 6.12 ]]; then kernel=-$2; fi
  shift 2
done
plan=${1:?a plan}; shift
out=${out:-$here/results/$plan-lab$kernel}
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
[[ -s $out.json.new ]] || { echo "the guest printed no rows" >&2; exit 1; }
touch "$out.json"
awk 'function field(name) { return match($0, "\"" name "\":\"[^\"]*\"") ? substr($0, RSTART, RLENGTH) : "" }
  { plan = field("plan"); variant = field("variant") }
  FNR == NR { replaced[variant]; of = plan; next }
  plan == of && !(variant in replaced)' "$out.json.new" "$out.json" >"$out.json.kept"
cat "$out.json.new" >>"$out.json.kept"
mv "$out.json.kept" "$out.json"
rm "$out.json.new"
