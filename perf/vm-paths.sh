#!/usr/bin/env bash
# Measures how long traffic stops while an edge's links, addresses and relays fail or change, in the VM lab, whose clock counts instructions.
#
#   perf/vm-paths.sh [RUNS]     writes perf/results/paths-lab.json, and prints the table of perf/README.md
#
# Runs the longer test of `tests/tests/vm/paths.rs` with development builds.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
project=$(dirname "$here")
target=${CARGO_TARGET_DIR:-$project/target}
runs=${1:-3}
name=paths::tunnels_and_a_nested_connection_go_on_while_links_addresses_and_relays_change
commit=${PACED_COMMIT:-$("$here/commit.sh")} trees=${PACED_TREES:-$("$here/commit.sh" --trees)}
out=$here/results/paths-lab.json

cd "$project"
test=$(cargo build --workspace --bins --tests --message-format=json-render-diagnostics --target-dir "$target" |
  jq -r 'select(.reason == "compiler-artifact" and .executable != null and .target.name == "vm") | .executable')
rm -f "$out.new"
for ((run = 1; run <= runs; run++)); do
  log=$target/paths-lab.$run.log
  tests/vm/run --icount --timeout 2400 -- sh -c "uname -r | sed 's/^/kernel: /'
    sed -n 's/^model name.*: /machine: /p' /proc/cpuinfo | head -1
    # Waiting for a file of the host would let the clock jump.
    cat $test $target/debug/paced $target/debug/pacectl \$(command -v iperf3 curl ip tc) >/dev/null
    cd tests && PACED_RINGS=vm exec $test $name --exact" </dev/null | tee "$log"
  grep -q '^test result: ok. 1 passed' "$log"
  tr -d '\r' <"$log" | awk -v commit="$commit" -v trees="$trees" -v command="perf/vm-paths.sh $runs" -v run="$run" '
    /^kernel: / { kernel = $2 }
    sub(/^machine: /, "") { machine = $0 ", 1 cores" }
    # figure: EVENT: TRAFFIC: gap 312 ms, 14 of 2000 payloads lost
    split($0, part, ": ") >= 4 && part[1] == "figure" {
      split(part[4], word, " ")
      printf "{\"machine\": \"%s\", \"kernel\": \"%s\", \"commit\": \"%s\", \"trees\": \"%s\", \"command\": \"%s\", \"clock\": \"lab\", \"run\": %d, ", machine, kernel, commit, trees, command, run
      printf "\"event\": \"%s\", \"traffic\": \"%s\", \"gap_ms\": %d", part[2], part[3], word[2]
      if (word[6]) printf ", \"lost\": %d, \"sent\": %d", word[4], word[6]
      print "}"
    }' >>"$out.new"
done
mv "$out.new" "$out"

jq -rs '
  def range: if min == max then "\(min)" else "\(min)–\(max)" end;
  (map(.traffic) | reduce .[] as $one ([]; if index($one) then . else . + [$one] end)) as $kinds
  | "| event | \($kinds | map("\(.): ms, lost") | join(" | ")) |", "|---|\($kinds | map("--:") | join("|"))|",
  (. as $rows | map(.event) | reduce .[] as $one ([]; if index($one) then . else . + [$one] end) | .[] as $event
    | [$kinds[] as $kind | [$rows[] | select(.event == $event and .traffic == $kind)]
        | "\(map(.gap_ms) | range)" + (map(select(.sent)) | if length > 0 then ", \(map(.lost) | add) of \(map(.sent) | add)" else "" end)]
    | "| \($event) | \(join(" | ")) |")' "$out"
