#!/usr/bin/env bash
# Measures an edge with two uplinks in the VM lab, whose clock counts instructions, and prints the table of perf/README.md.
#
#   perf/vm-paths.sh [events] [RUNS]     how long traffic stops while links, addresses and relays fail or change: the longer
#                                        test of `tests/tests/vm/paths.rs`; writes perf/results/paths-lab.json
#   perf/vm-paths.sh downloads           how long a download takes over each uplink, and in ranges over both: the longer test
#                                        of `tests/tests/vm/downloads.rs`; writes perf/results/downloads-lab.json
#
# Uses development builds.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
project=$(dirname "$here")
target=${CARGO_TARGET_DIR:-$project/target}
subject=events
if [[ ${1-} == events || ${1-} == downloads ]]; then subject=$1; shift; fi
case $subject in
  events)
    runs=${1:-3} out=$here/results/paths-lab.json command="perf/vm-paths.sh $runs"
    name=paths::tunnels_and_a_nested_connection_go_on_while_links_addresses_and_relays_change
    # figure: EVENT: TRAFFIC: gap 312 ms, 14 of 2000 payloads lost
    row='part[1] == "figure" && parts >= 4 {
      split(part[4], word, " ")
      printf "{%s, \"run\": %d, \"event\": \"%s\", \"traffic\": \"%s\", \"gap_ms\": %d", origin, run, part[2], part[3], word[2]
      if (word[6]) printf ", \"lost\": %d, \"sent\": %d", word[4], word[6]
      print "}"
    }'
    table='
      def range: if min == max then "\(min)" else "\(min)–\(max)" end;
      unique_in_order(.traffic) as $kinds
      | "| event | \($kinds | map("\(.): ms, lost") | join(" | ")) |", "|---|\($kinds | map("--:") | join("|"))|",
      (. as $rows | unique_in_order(.event)[] as $event
        | [$kinds[] as $kind | [$rows[] | select(.event == $event and .traffic == $kind)]
            | "\(map(.gap_ms) | range)" + (map(select(.sent)) | if length > 0 then ", \(map(.lost) | add) of \(map(.sent) | add)" else "" end)]
        | "| \($event) | \(join(" | ")) |")' ;;
  downloads)
    runs=1 out=$here/results/downloads-lab.json command="perf/vm-paths.sh downloads"
    name=downloads::a_download_in_ranges_is_measured_over_uplinks_of_every_kind
    # download: CELL: WAY: seed 1: 3.210 s
    row='part[1] == "download" && parts == 5 {
      split(part[4] " " part[5], word, " ")
      printf "{%s, \"seed\": %d, \"cell\": \"%s\", \"way\": \"%s\", \"seconds\": %s}\n", origin, word[2], part[2], part[3], word[3]
    }'
    table='
      def hundredths: . * 100 | round / 100;
      def mean: add / length;
      def span: "\(mean | hundredths) (\(min | hundredths)–\(max | hundredths))";
      unique_in_order(.way) as $ways
      | "| uplinks | \($ways | map("\(.), s") | join(" | ")) | ranges to the faster uplink |", "|---|\($ways | map("--:") | join("|"))|--:|",
      (. as $rows | unique_in_order(.cell)[] as $cell
        | ($ways | map(. as $way | {key: $way, value: [$rows[] | select(.cell == $cell and .way == $way) | .seconds]}) | from_entries) as $of
        | ([$of.first, $of.second] | map(mean) | min) as $faster
        | "| \($cell) | \($ways | map($of[.] | span) | join(" | ")) | \(($of.ranges | mean) / $faster | hundredths) |")' ;;
esac
commit=${PACED_COMMIT:-$("$here/commit.sh")} trees=${PACED_TREES:-$("$here/commit.sh" --trees)}

cd "$project"
test=$(cargo build --workspace --bins --tests --message-format=json-render-diagnostics --target-dir "$target" |
  jq -r 'select(.reason == "compiler-artifact" and .executable != null and .target.name == "vm") | .executable')
rm -f "$out.new"
for ((run = 1; run <= runs; run++)); do
  log=$target/$(basename "$out" .json).$run.log
  tests/vm/run --icount --timeout 7200 -- sh -c "uname -r | sed 's/^/kernel: /'
    sed -n 's/^model name.*: /machine: /p' /proc/cpuinfo | head -1
    # Waiting for a file of the host would let the clock jump.
    cat $test $target/debug/paced $target/debug/pacectl \$(command -v iperf3 curl ip tc ethtool) >/dev/null
    cd tests && PACED_RINGS=vm exec $test $name --exact" </dev/null | tee "$log"
  grep -q '^test result: ok. 1 passed' "$log"
  tr -d '\r' <"$log" | awk -v commit="$commit" -v trees="$trees" -v command="$command" -v run="$run" '
    { parts = split($0, part, ": ") }
    /^kernel: / { kernel = $2 }
    sub(/^machine: /, "") {
      origin = sprintf("\"machine\": \"%s\", \"kernel\": \"%s\", \"commit\": \"%s\", \"trees\": \"%s\", \"command\": \"%s\", \"clock\": \"lab\"",
        $0 ", 1 cores", kernel, commit, trees, command)
    }
    '"$row" >>"$out.new"
done
mv "$out.new" "$out"
jq -rs "def unique_in_order(f): map(f) | reduce .[] as \$one ([]; if index(\$one) then . else . + [\$one] end); $table" "$out"
