#!/usr/bin/env bash
# Shows where a running paced spends its time, on the CPU and waiting. Takes the options of `pacectl flamegraph`.
exec "$(dirname "$0")/observe.sh" flamegraph "$@"
