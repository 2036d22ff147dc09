#!/usr/bin/env bash
# Each QUIC packet of a running paced on its way out: decided, handed over, wanted, left. Options are those of `pacectl trace`.
exec "$(dirname "$0")/observe.sh" trace "$@"
