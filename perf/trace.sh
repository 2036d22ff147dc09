#!/usr/bin/env bash
# Shows each QUIC packet that a running paced sends: decided, handed over, wanted, left. Takes the options of `pacectl trace`.
exec "$(dirname "$0")/observe.sh" trace "$@"
