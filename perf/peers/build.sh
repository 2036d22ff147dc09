#!/bin/sh
# Builds the peers into the folder `peers` of cargo's target folder (or into $1) and prints the paths of their programs. The peer on
# quinn needs only cargo. The peers on quic-go need Go: the script exits with status 3 if they cannot be built because Go is missing,
# too old or cannot download the modules.
set -eu
target=$(realpath -m "${CARGO_TARGET_DIR:-$(dirname "$0")/../../target}")
out=$(realpath -m "${1:-$target/peers}")
cd "$(dirname "$0")"
mkdir -p "$out"

skip() {
    echo "peers on quic-go: not built: $1" >&2
    exit 3
}

# A workspace of its own, with its own lock file: the product's build does not change, and its lints do not apply.
(cd quinn-relay && env -u RUSTC_WORKSPACE_WRAPPER cargo build --release --locked --target-dir "$target") >&2
# A running program keeps the old file.
cp --remove-destination "$target/release/quinn-relay" "$out/"
echo "$out/quinn-relay"

wanted=$(sed -n 's/^go //p' go.mod)
command -v go >/dev/null || skip "Go is not installed (go.mod names $wanted)"
export GOTOOLCHAIN=local
have=$(cd / && go env GOVERSION)
have=${have#go}
[ "$(printf '%s\n' "$wanted" "$have" | sort -V | head -n 1)" = "$wanted" ] ||
    skip "Go $have is older than $wanted of go.mod"
go mod download || skip "its modules cannot be downloaded"

# Static, so that the lab's guest needs only the file.
CGO_ENABLED=0 go build -trimpath -o "$out/" ./...
for peer in quic-go-*; do echo "$out/$peer"; done
