#!/usr/bin/env bash
# Prints the commit that is checked out here, with `-dirty` if a tracked file differs from it. perf/results and the pages that are
# made from it (perf/*.md) do not count.
# With --trees, prints the git trees of the product's folders and of perf/experiment in that commit instead, then a hash of the
# versions of the libraries that move bytes, and ` dirty` in the same case. Commits for which it prints the same have the same
# product and the same experiments. Plans and load generators may differ.
set -euo pipefail
cd "$(dirname "$0")/.."
changed=$(git status --porcelain --untracked-files=no -- . ':!perf/results' ':!perf/*.md')
if [[ ${1-} == --trees ]]; then
  for folder in bpf config daemon masque sched perf/experiment; do
    echo -n "$folder $(git rev-parse --short=10 "HEAD:$folder") "
  done
  libraries=$(git show HEAD:Cargo.lock | grep -A1 -E '^name = "(s2n-.*|rustls|aws-lc-.*|tokio|quinn-udp)"$' | sha256sum)
  echo "libraries ${libraries:0:10}${changed:+ dirty}"
else
  echo "$(git rev-parse --short HEAD)${changed:+-dirty}"
fi
