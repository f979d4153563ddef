#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Fuzzes for some seconds, beginning with the kept corpus; what it finds lies under build/fuzz. A crash
# ends it with the command that reproduces it. It changes nothing in the tree.
#
#   tools/fuzz.sh SECONDS [LIBFUZZER-OPTION...]
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:?usage: tools/fuzz.sh SECONDS}
shift
target=build/fuzz/fuzz_pool
found=build/fuzz/found
corpus=tests/fuzz/corpus
log=build/fuzz/log.txt

# New inputs go to the first folder. It starts empty, so that a run depends on the tree alone.
rm -rf "$found"
mkdir -p "$found/corpus"

fuzz() {
    "$target" -timeout=60 -verbosity=0 -artifact_prefix="$found/" "$@" >>"$log" 2>&1
}

# Every kept input first, all of each; then new ones.
: >"$log"
if fuzz -runs=0 "$corpus" &&
    fuzz -max_total_time="$seconds" -seed=1 -max_len=512 -print_final_stats=1 "$@" \
        "$found/corpus" "$corpus"; then
    grep -E '^stat::(number_of_executed_units|average_exec_per_sec|new_units_added)' "$log"
    exit 0
fi
cat "$log" >&2
input=$(find "$found" -maxdepth 1 -type f | head -n 1)
echo "fuzz: reproduce with: make fuzz-build && GP_FUZZ_TRACE=1 $target $input" >&2
[ -z "$input" ] || echo "fuzz: that input is: base64 -d <<<$(base64 -w 0 "$input")" >&2
exit 1
