#!/usr/bin/env bash
# Prints the commit that stands here, with `-dirty` where anything tracked differs from it but the results of measurements.
set -euo pipefail
cd "$(dirname "$0")/.."
commit=$(git rev-parse --short HEAD)
changed=$(git status --porcelain --untracked-files=no -- . ':!perf/results')
echo "$commit${changed:+-dirty}"
