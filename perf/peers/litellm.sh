#!/bin/sh
# Installs litellm's proxy into target/peers/litellm of the repository (or into $1/litellm) and prints its program.
# Ends with 3 where it cannot be installed: python3 with venv is missing, or no package index can be reached.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
venv=${1:-$here/../../target/peers}/litellm

skip() {
    echo "litellm's proxy: not installed: $1" >&2
    exit 3
}

if ! cmp -s "$here/litellm.txt" "$venv/litellm.txt"; then
    rm -rf "$venv"
    python3 -m venv "$venv" >&2 || skip "python3 with its venv module is needed (Debian: python3-venv)"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/litellm.txt" >&2 ||
        skip "the packages of litellm.txt cannot be installed"
    cp "$here/litellm.txt" "$venv/"
fi
echo "$venv/bin/litellm"
