#!/usr/bin/env bash
# Shows each QUIC packet that a running paced sends: decided, handed over, wanted, left. Takes the options of `pacectl trace`:
#   perf/trace.sh --seconds 2                                 a table on standard output
#   perf/trace.sh --socket FILE --json --output trace.json    of the paced with this control socket
# Needs root or sudo, because it installs perf, mounts tracefs and reads tracepoints. perf/README.md ("Seeing a relay at work") has an
# example, docs/looking-at-it.md ("Trace single packets") explains what it prints.
exec "$(dirname "$0")/observe.sh" trace "$@"
