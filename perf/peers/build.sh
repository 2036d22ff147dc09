#!/bin/sh
# Builds the peers on quic-go into target/peers of the repository (or into $1) and prints the paths of their programs.
# Exits with status 3 if they cannot be built because Go is missing, too old or cannot download the modules.
set -eu
cd "$(dirname "$0")"
out=${1:-$(cd ../.. && pwd)/target/peers}

skip() {
    echo "peers on quic-go: not built: $1" >&2
    exit 3
}

wanted=$(sed -n 's/^go //p' go.mod)
command -v go >/dev/null || skip "Go is not installed (go.mod names $wanted)"
export GOTOOLCHAIN=local
have=$(cd / && go env GOVERSION)
have=${have#go}
[ "$(printf '%s\n' "$wanted" "$have" | sort -V | head -n 1)" = "$wanted" ] ||
    skip "Go $have is older than $wanted of go.mod"
go mod download || skip "its modules cannot be downloaded"

mkdir -p "$out"
# Static, so that the lab's guest needs only the file.
CGO_ENABLED=0 go build -trimpath -o "$out/" ./...
for peer in quic-go-*; do echo "$out/$peer"; done
