# shellcheck shell=bash disable=SC2034,SC2154
# The engines that scripts/compare compares with; sourced by its modes, never run. peer_get NAME sets
#   peer_py[NAME]    a Python that has the engine
#   peer_why[NAME]   empty, or why it can't be had here
# Each is installed into an environment of its own below $cache, once for this CPU.
# $LLMRUN_COMPARE_VENV names an environment with llama-cpp-python to use instead of building one.

declare -A peer_py=() peer_why=()
llama_version=0.3.36

# venv_fresh VENV STAMP: true if it was made for this stamp
venv_fresh() { [ "$(cat "$1/built" 2>/dev/null)" = "$2" ]; }
# CPUs with other instructions need another build
cpu_stamp() { grep -m1 -E '^(flags|Features)' /proc/cpuinfo | cksum; }

# why_pip LOG: one line out of pip's log
why_pip() {
    if grep -qi 'no space left' "$1"; then
        echo "disk full: $(human "$(free_bytes "$cache")") free in $cache"
    elif grep -qiE 'name resolution|NewConnectionError|unreachable|Max retries' "$1"; then
        echo "no network: the Python package index can't be reached"
    elif grep -qiE 'no matching distribution|requires a different python' "$1"; then
        echo "no package for this system and Python"
    else
        echo "installing failed (log: $1): $(grep -iE 'error' "$1" | tail -n 1)"
    fi
}

# new_venv VENV LOG: an empty environment, or a reason in $why
new_venv() {
    rm -rf "$1"
    python3 -m venv "$1" >"$2" 2>&1 && return
    why="python3 -m venv failed (package python3-venv; run scripts/deps): $(tail -n 1 "$2")"
    return 1
}

build_llama() {
    local venv=$1 log=$2
    have g++ || { why="needs a C++ compiler; run scripts/deps --compare"; return 1; }
    note "building llama-cpp-python $llama_version for this CPU (some minutes; log: $log)"
    new_venv "$venv" "$log" || return 1
    # GCC 12 believes that loading the tile configuration reads 8 bytes of it only, and drops the stores of the rest:
    # on CPUs with AMX llama.cpp then ends in a fault. The barrier keeps them, at no cost.
    cat >"$venv/amx_barrier.h" <<'END_HEADER'
#if defined(__x86_64__) && defined(__AMX_TILE__)
#include <immintrin.h>
#define _tile_loadconfig(config) \
    (__extension__({ __asm__ volatile("" : : "r"(config) : "memory"); (_tile_loadconfig)(config); }))
#endif
END_HEADER
    CMAKE_ARGS="-DGGML_NATIVE=ON ${CMAKE_ARGS:-}" CXXFLAGS="-include $venv/amx_barrier.h ${CXXFLAGS:-}" \
        CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-$(nproc)} "$venv/bin/python" -m pip install --disable-pip-version-check \
        --no-cache-dir --no-binary llama-cpp-python "llama-cpp-python==$llama_version" --verbose >>"$log" 2>&1 ||
        { why=$(why_pip "$log"); return 1; }
    "$venv/bin/python" -c 'import llama_cpp' >>"$log" 2>&1 ||
        { why="was built but can't be loaded (log: $log)"; return 1; }
}

# llama.cpp is looked for under the names of older builds, too
peer_llama.cpp() {
    if [ -n "${LLMRUN_COMPARE_VENV:-}" ]; then
        peer_py[llama.cpp]=$LLMRUN_COMPARE_VENV/bin/python
        "${peer_py[llama.cpp]}" -c 'import llama_cpp' 2>/dev/null || why="no llama-cpp-python in $LLMRUN_COMPARE_VENV"
        return
    fi
    peer_install llama.cpp "$cache/compare-venv" "$llama_version $(cpu_stamp)" build_llama
}

# peer_install NAME VENV STAMP BUILD: runs BUILD VENV LOG unless the environment is there; a lock keeps others out
peer_install() {
    local name=$1 venv=$2 stamp=$3 build=$4 log=$2.log start
    peer_py[$name]=$venv/bin/python
    if venv_fresh "$venv" "$stamp"; then return; fi
    require python3
    mkdir -p "$cache"
    exec {lock}>"$cache/.lock-compare"
    flock "$lock"
    start=$(now)
    if ! venv_fresh "$venv" "$stamp" && "$build" "$venv" "$log"; then
        echo "$stamp" >"$venv/built"
        note "$name is there ($(since "$start") s)"
    fi
    exec {lock}>&-
}

peer_get() {
    local why=
    "peer_$1"
    peer_why[$1]=$why
}
