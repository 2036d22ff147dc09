#!/bin/sh
# Installs litellm's proxy into target/peers/litellm of the repository (or into $1/litellm) and prints its path.
# Exits with status 3 if it cannot be installed.
set -eu
project=$(cd "$(dirname "$0")/../.." && pwd)
venv=${1:-$project/target/peers}/litellm
"$project/tests/venv" "$venv" "$project/perf/peers/litellm.txt"
echo "$venv/bin/litellm"
