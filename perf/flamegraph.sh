#!/usr/bin/env bash
# Where a running paced spends its time, on the CPU and waiting. Options are those of `pacectl flamegraph`.
exec "$(dirname "$0")/observe.sh" flamegraph "$@"
