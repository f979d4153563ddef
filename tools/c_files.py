# SPDX-License-Identifier: Apache-2.0
"""Prints the C files of this checkout, one a line."""

import pathlib

OURS = ("backing", "sync", "vmm", "python/ext", "bench", "bench/native")
TESTS = ("tests/c", "tests/consumer", "tests/fuzz", "tests/gpu", "tests/support")
EXAMPLES = ("examples/c",)

for folder in OURS + TESTS + EXAMPLES:
    for path in sorted(pathlib.Path(folder).glob("*.[ch]")):
        print(path)
