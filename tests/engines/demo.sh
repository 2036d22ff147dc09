#!/usr/bin/env bash
# The demo of models, once paced is built for release:  demo.sh [OPTION of `paced-perf demo-llm`…]
# ENGINE=emulated does without llama-server. So does a machine on which it cannot be built, and says so.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# Relative, because rows of results say by which command they were made.
target=$(realpath --relative-to=. "${CARGO_TARGET_DIR:-$here/../../target}")
engine=${ENGINE:-llama-server}
if [[ $engine == llama-server ]]; then
  "$here/build.sh" || {
    (($? == 3)) || { echo "demo-llm: the engine's build failed" >&2; exit 1; }
    echo "demo-llm: THERE IS NO REAL ENGINE HERE; emulated engines take its place, whose steps take as long as a formula says" >&2
    engine=emulated
  }
fi
root=(); ((EUID == 0)) || root=(sudo --preserve-env=PATH,PACED_COMMIT,PACED_TREES,RUST_LOG)
exec "${root[@]}" "$target/release/paced-perf" demo-llm --engine "$engine" --json "$target/demo-llm.json" --plot "$target/demo-llm.svg" "$@"
