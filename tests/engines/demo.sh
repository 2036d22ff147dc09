#!/usr/bin/env bash
# The demo of models, after a release build of paced:  demo.sh [OPTION of `paced-perf demo-llm`…]
# With ENGINE=emulated, llama-server is not used. The same happens, with a message, on a machine that cannot build it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# Relative, because rows of results contain the command that produced them.
target=$(realpath --relative-to=. "${CARGO_TARGET_DIR:-$here/../../target}")
engine=${ENGINE:-llama-server}
if [[ $engine == llama-server ]]; then
  "$here/build.sh" || {
    (($? == 3)) || { echo "demo-llm: the engine's build failed" >&2; exit 1; }
    echo "demo-llm: NO REAL ENGINE IS AVAILABLE; emulated engines replace it, with steps whose length comes from a formula" >&2
    engine=emulated
  }
fi
root=(); ((EUID == 0)) || root=(sudo --preserve-env=PATH,PACED_COMMIT,PACED_TREES,RUST_LOG)
exec "${root[@]}" "$target/release/paced-perf" demo-llm --engine "$engine" --json "$target/demo-llm.json" --plot "$target/demo-llm.svg" "$@"
