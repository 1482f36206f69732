# shellcheck shell=bash disable=SC2034
# What every script here shares; sourced, never run. Sets:
#   root   the top of the checkout        cache  where models and tools are kept ($LLMRUN_MODELS or ~/.cache/llmrun)
#   me     the script's name in messages
# A message goes to standard error as "scripts/NAME: text"; die ends with status 1.

me=${0##*/}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${LLMRUN_MODELS:-$HOME/.cache/llmrun}

note() { printf 'scripts/%s: %s\n' "$me" "$*" >&2; }
die() { note "$*"; exit 1; }
# usage_error TEXT: a wrong flag or argument, status 2
usage_error() { note "$* (see scripts/$me --help)"; exit 2; }
have() { command -v "$1" >/dev/null 2>&1; }

# human BYTES -> "1.1 GB"
human() { awk -v b="$1" 'BEGIN { if (b >= 1e9) printf "%.1f GB", b / 1e9; else printf "%.0f MB", b / 1e6 }'; }
# free_bytes FOLDER -> bytes a user may still write on the file system that holds it
free_bytes() { df --output=avail -B1 "$1" | tail -n 1 | tr -d ' '; }
# seconds since the epoch with a fraction, and since($1) as "12.3"
now() { date +%s.%N; }
since() { awk -v a="$1" -v b="$(now)" 'BEGIN { printf "%.1f", b - a }'; }

# require TOOL...: ends with a hint where a tool is missing
require() {
    local tool
    for tool; do have "$tool" || die "$tool is not installed; run scripts/deps first"; done
}
