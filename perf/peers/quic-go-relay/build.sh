#!/bin/sh
# Builds the relay into target/peers of the repository (or into $1) and prints the path of the binary.
# Ends with 3 where it cannot be built because Go is absent, too old or cannot get the modules.
set -eu
cd "$(dirname "$0")"
out=${1:-$(cd ../../.. && pwd)/target/peers}

skip() {
    echo "quic-go-relay: not built: $1" >&2
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
go build -trimpath -o "$out/quic-go-relay" .
echo "$out/quic-go-relay"
