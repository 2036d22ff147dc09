#!/usr/bin/env bash
# Measures the benefit of workers by the machine's clock: echoes per second of a relay with 1, 2, 4 … workers, and its CPU time per payload.
#
#   perf/scale.sh [WORKERS…]     without numbers: 1, 2, 4 … up to half the number of cores
#
# N workers have the first N cores, and N generators the next N: each has a core, 16 clients with a socket, a connection and a tunnel,
# and 16 payloads in flight in each tunnel. Targets share the generators' cores. Use a machine that does nothing else.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
project=$(dirname "$here")
target=${CARGO_TARGET_DIR:-$project/target}
seconds=5 clients=16 window=16

cores=$(nproc)
if (($#)); then counts=("$@"); else
  counts=()
  for ((workers = 1; 2 * workers <= cores; workers *= 2)); do counts+=("$workers"); done
fi
for workers in "${counts[@]}"; do
  [[ $workers =~ ^[1-9][0-9]*$ ]] || { sed -n '2,7s/^# \?//p' "$0" >&2; exit 2; }
  ((2 * workers <= cores)) || { echo "perf/scale.sh: $workers workers want $((2 * workers)) cores; there are $cores" >&2; exit 2; }
done
cargo build --quiet --release -p paced -p pacectl -p perf --manifest-path "$project/Cargo.toml" --target-dir "$target"

folder=$(mktemp -d)
relay=
finish() {
  if [[ $relay ]]; then kill "$relay" 2>/dev/null || true; wait "$relay" || true; fi
  rm -rf "$folder"
}
trap finish EXIT
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost \
  -keyout "$folder/key.pem" -out "$folder/certificate.pem" 2>/dev/null
fingerprint=$(openssl x509 -in "$folder/certificate.pem" -outform der | sha256sum | cut -d' ' -f1)

start_relay() { # WORKERS
  cat >"$folder/paced.toml" <<TOML
state_dir = "$folder"
[relay]
listen = ["127.0.0.1:4433"]
certificate = "$folder/certificate.pem"
private_key = "$folder/key.pem"
auth = "none"
workers = $1
templates = ["https://localhost:4433/.well-known/masque/udp/{target_host}/{target_port}/"]
[relay.targets]
allow = ["127.0.0.0/8"]
unlisted = "deny"
[relay.limits]
strangers_percent = 100
strangers_per_prefix = 100000
[log]
level = "error"
TOML
  taskset -c "0-$(($1 - 1))" "$target/release/paced" run --config "$folder/paced.toml" &
  relay=$!
  for _ in {1..100}; do
    ! grep -q '^ *[0-9]*: [0-9A-F]*:1151 ' /proc/net/udp || return 0 # port 4433
    sleep 0.1
  done
  echo "perf/scale.sh: the relay did not start" >&2
  return 1
}

echo "commit $("$here/commit.sh"), $(sed -n 's/^model name\s*: //p' /proc/cpuinfo | head -n1), $cores cores, Linux $(uname -r)"
echo "| workers | thousand echoes/s | per worker | relay CPU, µs per payload | loss, % |"
echo "|--:|--:|--:|--:|--:|"
for workers in "${counts[@]}"; do
  start_relay "$workers"
  generators=()
  for ((core = workers; core < 2 * workers; core++)); do
    "$target/release/paced-perf" load --relay 127.0.0.1:4433 --fingerprint "$fingerprint" --pid "$relay" --core "$core" \
      echo --tunnels $clients --connections $clients --sockets --window $window --seconds $seconds >"$folder/generator.$core" &
    generators+=($!)
  done
  for generator in "${generators[@]}"; do wait "$generator"; done
  # All generators measure at the same time; each divides the whole relay's CPU time by its own payloads.
  cat "$folder"/generator.* | awk -v workers="$workers" '
    /^echoes / { echoes = $2; all += $2; loaded++ }
    /^loss / { lost += $2 }
    /^relay CPU per payload / { cpu += $5 * echoes }
    END { printf "| %d | %.0f | %.0f | %.2f | %.2f |\n", workers, all / 1e3, all / 1e3 / workers, cpu / loaded / all / 1e3, lost / loaded }'
  rm -f "$folder"/generator.*
  kill "$relay"; wait "$relay" || true; relay=
done
