#!/bin/sh
# Runs one of the programs here: run.sh connect_udp|strictness|hostile|strangers|udp_echo|openai_client|ask_gateway [OPTION...]
# The first run makes their virtual environment in target/interop-venv, as does every run after requirements.txt
# changed. Ends with 3 where that is impossible (no python3 with venv, or no package index to be reached).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=$(cd "$here/../.." && pwd)/target
venv=$target/interop-venv

skip() {
    echo "interop: cannot run: $1" >&2
    exit 3
}

[ $# -gt 0 ] || { sed -n 's/^# //p' "$0" >&2; exit 2; }
program=$here/$1.py
shift

mkdir -p "$target"
(
    flock 9
    if ! cmp -s "$here/requirements.txt" "$venv/requirements.txt"; then
        rm -rf "$venv"
        python3 -m venv "$venv" >&2 || skip "python3 with its venv module is needed (Debian: python3-venv)"
        "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt" >&2 ||
            skip "the packages of requirements.txt cannot be installed"
        cp "$here/requirements.txt" "$venv/requirements.txt"
    fi
) 9>"$target/interop-venv.lock"
exec "$venv/bin/python" "$program" "$@"
