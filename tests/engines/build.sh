#!/usr/bin/env bash
# Builds the real engine of the ring `engines`, and its three models: build.sh [--clients]
# target/engines then holds llama-server and {large,medium,small}.gguf; with --clients, also the clients that the ring tests.
# The server is built from the source in llama-cpp-python on the Python Package Index, which takes about ten minutes on two
# cores; existing parts are not built again. Exits with status 3 if something is unavailable: a C++ compiler, cmake, python3
# with venv, or a package index.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${CARGO_TARGET_DIR:-$here/../../target}/engines
version=0.3.36
sha256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
source=llama_cpp_python-$version

cannot() { echo "engines: cannot be built: $1" >&2; exit 3; }
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
exec 9>"$folder/lock"
flock 9 # another run may be building

environment() { "$here/../venv" "$folder/$1" "$here/$2"; }

compile() { # without web pages, TLS and examples; for this machine's instruction set, because it runs where it is built
  nice -n 15 cmake -S "$1/$source/vendor/llama.cpp" -B "$1/objects" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
    -DGGML_OPENMP=OFF -DGGML_CCACHE=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
    -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF || return
  # Code that does not compute tokens need not be fast, and compiles in half the time with -O1.
  find "$1/objects/common" "$1/objects/tools" -name flags.make -exec sed -i 's/-O3/-O1/' {} + || return
  nice -n 15 cmake --build "$1/objects" --target llama-server -j "${JOBS:-$(nproc)}"
}

build_server() {
  local program work=$folder/build
  for program in cmake make g++; do
    command -v "$program" >/dev/null || cannot "$program is missing (Debian: cmake make g++)"
  done
  mkdir -p "$work"
  if ! echo "$sha256  $work/$source.tar.gz" | sha256sum --check --status 2>/dev/null; then
    echo "engines: fetching the source of llama-cpp-python $version (77 MB)" >&2
    environment venv requirements.txt
    "$folder/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
      --dest "$work" "llama-cpp-python==$version" >&2 || cannot "the source of llama-cpp-python cannot be fetched"
    echo "$sha256  $work/$source.tar.gz" | sha256sum --check --status ||
      { rm -f "$work/$source.tar.gz"; cannot "the source of llama-cpp-python $version has another checksum than expected"; }
  fi
  rm -rf "${work:?}/$source"
  tar -xzf "$work/$source.tar.gz" -C "$work" "$source/vendor/llama.cpp"
  echo "engines: building llama-server; the compiler's output is in $work/log" >&2
  compile "$work" >"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2; cannot "llama-server does not compile"; }
  cp "$work/objects/bin/llama-server" "$folder/llama-server.new"
  mv "$folder/llama-server.new" "$folder/llama-server"
  echo "$version" >"$folder/version"
  # The objects take half a gigabyte. The archive stays, so that a removed server can be built again without a network.
  rm -rf "$work/objects" "${work:?}/$source"
}

make_models() {
  local stamp
  stamp=$(cat "$here/models.py" "$here/requirements.txt" | sha256sum)
  [[ -f $folder/models.sha256 && $(<"$folder/models.sha256") == "$stamp" ]] && return
  environment venv requirements.txt
  "$folder/venv/bin/python" "$here/models.py" "$folder" >&2 || cannot "the models cannot be created"
  echo "$stamp" >"$folder/models.sha256"
}

[[ ${1:-} != --clients ]] || environment litellm litellm.txt
make_models
[[ -x $folder/llama-server && $(cat "$folder/version" 2>/dev/null) == "$version" ]] || build_server
