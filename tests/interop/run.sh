#!/bin/sh
# Runs one of the programs here: run.sh connect_udp|strictness|hostile|strangers|udp_echo|openai_client|ask_gateway [OPTION...]
# The first run creates a virtual environment, interop-venv in CARGO_TARGET_DIR or in target; so does each run after a
# change of requirements.txt. Exits with status 3 if that is impossible (no python3 with venv, or no package index can be
# reached).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
venv=${CARGO_TARGET_DIR:-$(cd "$here/../.." && pwd)/target}/interop-venv

[ $# -gt 0 ] || { sed -n 's/^# //p' "$0" >&2; exit 2; }
program=$here/$1.py
shift

"$here/../venv" "$venv" "$here/requirements.txt"
exec "$venv/bin/python" "$program" "$@"
