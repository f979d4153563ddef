#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds growpool and runs the C suites and the GPU suite on a machine with an NVIDIA driver; needs no
# network. Nothing may be skipped. Prints a short table last; the exit code is 0 only if all passed.
#
# usage: [CMOCKA_ROOT=FOLDER] [PYTHON=python3] [BUILD=build/gpu] tests/gpu/run.sh [-- PYTEST OPTIONS]
#   CMOCKA_ROOT  an unpacked cmocka (usr/include, usr/lib/x86_64-linux-gnu) where none is installed
#   SUITES       which parts to run: "c testing package bench" (the default), or some of them
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1

PYTHON=${PYTHON:-python3}
BUILD=${BUILD:-build/gpu}
SUITES=${SUITES:-c testing package bench}
JOBS=$(nproc); [ "$JOBS" -le 16 ] || JOBS=16
[ "${1:-}" != -- ] || shift
failed=0
rows=()

wants() { [[ " $SUITES " == *" $1 "* ]]; }
step() { echo; echo "== $*"; }
die() { echo "run.sh: $*" >&2; exit 1; }

command -v cmake >/dev/null || die "cmake is missing"
"$PYTHON" -c 'import ctypes; ctypes.CDLL("libcuda.so.1")' 2>/dev/null || die "no NVIDIA driver on this machine"
mkdir -p "$BUILD/results"
BUILD=$(cd "$BUILD" && pwd)
rm -f "$BUILD"/results/*

options=(-DGROWPOOL_TESTING=ON -DGROWPOOL_BUILD_TESTS=ON -DGROWPOOL_BUILD_EXTENSION=ON
    -DPython_EXECUTABLE="$("$PYTHON" -c 'import sys; print(sys.executable)')")
! command -v ninja >/dev/null || options+=(-G Ninja)
[ -z "${CMOCKA_ROOT:-}" ] || options+=(-DCMOCKA_ROOT="$(cd "$CMOCKA_ROOT" && pwd)")
# The ABI test wants NVIDIA's own header: from the wheel, or from a toolkit.
header=$("$PYTHON" tools/cuda_include.py 2>/dev/null) || header=/usr/local/cuda/include
[ -e "$header/cuda.h" ] || die "no cuda.h for the ABI test: neither the wheel nor a toolkit has it"
options+=(-DGROWPOOL_CUDA_INCLUDE="$header")

if wants c || wants testing; then
    step "building with the test hooks"
    cmake -S . -B "$BUILD/testing" "${options[@]}" --log-level=WARNING || die "cmake failed"
    cmake --build "$BUILD/testing" --parallel "$JOBS" || die "the testing build failed"
fi

if wants c; then
    step "C suites"
    ctest --test-dir "$BUILD/testing" --output-on-failure --no-tests=error --parallel "$JOBS" \
        --output-junit "$BUILD/results/c.xml" | tail -n 40 || failed=1
    rows+=("C suites=$BUILD/results/c.xml")
fi

# python_suite TITLE NAME FOLDER [PYTEST OPTION...]: a suite over the package in FOLDER.
python_suite() {
    local title=$1 name=$2 folder=$3
    shift 3
    step "$title"
    PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONPATH=$folder timeout --signal=ABRT 420 "$PYTHON" \
        -X faulthandler -m pytest -o addopts= -o norecursedirs= -o faulthandler_timeout=90 \
        -p no:cacheprovider --strict-markers --strict-config -ra --durations=5 \
        --junitxml="$BUILD/results/$name.xml" "$@" || failed=1
    rows+=("$title=$BUILD/results/$name.xml")
}

# suites NAME FOLDER DEVICES [OPTION...]: what only a GPU can show, and the contract of every device.
suites() {
    local name=$1 folder=$2 devices=$3
    shift 3
    python_suite "GPU suite, $name" "$name" "$folder" tests/gpu -m gpu "$@"
    python_suite "contract, $name" "contract-$name" "$folder" tests/contract -m contract \
        --contract-devices "$devices"
}

# Once with the lock witness and the assertions of the testing build, once as users install it.
! wants testing || suites testing "$BUILD/testing/python" host,sim,cuda:0 "$@"
if wants package || wants bench; then
    step "installing the package"
    rm -rf "$BUILD/package"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-build-isolation \
        --no-deps --target "$BUILD/package" . || die "pip install failed"
fi
! wants package || suites package "$BUILD/package" host,cuda:0 "$@"

if wants bench; then
    step "the benchmark"
    PYTHONPATH=$BUILD/package timeout 600 "$PYTHON" -m growpool bench --device cuda:0 \
        --json "$BUILD/results/bench.json" || failed=1
fi

echo
[ ${#rows[@]} -eq 0 ] || "$PYTHON" tests/gpu/report.py "${rows[@]}" || failed=1
if [ $failed -eq 0 ]; then echo "all passed"; else echo "FAILED"; fi
exit $failed
