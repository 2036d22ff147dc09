# Counts what `tests/run` prints: lines `=== RING NAME` and `=== ended STATUS`, and between them the output of one executable.
# Prints the counts in the last line, and fails if a test failed or a test of a requested ring was skipped.
function fail(what) { failed++; name(what) }
function name(what) { named++; names[named] = what }
# A command in a gap of the rings (`=== also`) may skip a part of its own work: it is listed, but no ring lacks a test.
function skip(what) { skipped++; skips[skipped] = what; if (ring !~ /^(unasked|also)$/) broken++ }
{ sub(/\r$/, "") }
/^=== the / { next }
/^=== ended / {
  if (open == "") next
  if ($3 != 0 && !failed_here) fail(open ": ended with status " substr($0, 11))
  else if (!ran && ring ~ /^(netns|vm|engines)$/ && open !~ /^(netns clients|engines build)$/) fail(open ": ran no test")
  open = ""; next
}
/^=== / { if (open != "") fail(open ": did not end"); ring = $2; open = substr($0, 5); failed_here = ran = 0; next }
/^test result: / { passed += $4; failed += $6; failed_here += $6; ran += $4 + $6 + $8; next }
/^test .* \.\.\. FAILED$/ { name(open ": " $2); next }
/^test .* \.\.\. ignored/ { skip($2 ": " substr($0, index($0, "ignored"))); next }
/^skipped: / { if (ring !~ /^(unasked|also)$/) passed--; skip(substr($0, 10)) }
END {
  if (open != "") fail(open ": did not end")
  print ""
  for (i = 1; i <= skipped; i++) print "skipped: " skips[i]
  for (i = 1; i <= named; i++) print "failed: " names[i]
  if (broken) print broken " skipped in a requested ring: that fails the run"
  printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped
  exit failed || broken ? 1 : 0
}
