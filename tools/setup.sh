#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Brings what `make demo` or `make test` needs: looks for each thing by trying it, installs Debian
# packages only as root, and otherwise names them all at once and stops. Makes .venv. It never
# builds growpool.
#
#   tools/setup.sh demo|test
set -euo pipefail
cd "$(dirname "$0")/.."

purpose=${1:-}
case $purpose in
demo | test) ;;
*)
    echo "usage: tools/setup.sh demo|test" >&2
    exit 2
    ;;
esac

python=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# compiles COMPILER HEADER [FLAG...]: whether a program with this header compiles and links.
compiles() {
    local compiler=$1 header=$2
    shift 2
    printf '%s\nint main(void)\n{\n    return 0;\n}\n' "$header" >"$scratch/try.c"
    "$compiler" "$scratch/try.c" -o "$scratch/try" "$@" >/dev/null 2>&1
}

# libFuzzer brings main().
links_fuzzer() {
    printf '%s\n%s\n' '#include <stddef.h>' \
        'int LLVMFuzzerTestOneInput(const void *data, size_t size) { return data == NULL && size > 0; }' \
        >"$scratch/fuzz.c"
    clang "$scratch/fuzz.c" -o "$scratch/fuzz" -fsanitize=fuzzer,address,undefined >/dev/null 2>&1
}

has_python() {
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

has_venv() {
    "$python" -c 'import ensurepip, venv' >/dev/null 2>&1
}

# A Python that was built on this machine brings its own headers, so only a compiler can tell.
has_python_headers() {
    local include
    include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))' 2>/dev/null) &&
        compiles gcc '#include <Python.h>' -c "-I$include"
}

# The packages whose contents this machine lacks, one a line.
missing_packages() {
    has_python || echo python3
    has_venv || echo python3-venv
    compiles gcc '#include <stdlib.h>' || printf 'gcc\nlibc6-dev\n'
    has_python_headers || echo python3-dev
    [ "$purpose" = test ] || return 0
    compiles gcc '#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>' -lcmocka || echo libcmocka-dev
    compiles clang '#include <stdlib.h>' || echo clang
    command -v pkg-config >/dev/null || echo pkgconf
    command -v valgrind >/dev/null || echo valgrind
    if ! compiles clang '#include <stdlib.h>' -fsanitize=address,undefined ||
        ! compiles clang '#include <stdlib.h>' -fsanitize=thread || ! links_fuzzer; then
        echo libclang-rt-dev
    fi
}

need() {
    missing_packages | sort -u | tr '\n' ' '
}

missing=$(need)
if [ -n "$missing" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "setup: installing $missing"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q
    # The list is words on purpose. One retry: a mirror may change between update and install.
    # shellcheck disable=SC2086
    apt-get install -q -y --no-install-recommends $missing ||
        { apt-get update -q && apt-get install -q -y --no-install-recommends $missing; }
    missing=$(need)
fi
if [ -n "$missing" ]; then
    echo "setup: this machine lacks: $missing" >&2
    echo "setup: install with: sudo apt-get install $missing" >&2
    if ! has_python; then
        echo "setup: growpool needs Python 3.11 or newer; PYTHON=... names another one" >&2
    fi
    exit 1
fi

# A .venv whose Python has gone (a system upgrade) is made anew.
if ! .venv/bin/python -c 'import pip' >/dev/null 2>&1; then
    rm -rf .venv
    "$python" -m venv .venv
fi
