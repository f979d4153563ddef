# SPDX-License-Identifier: Apache-2.0
"""Prints the C files of this checkout, one a line."""

import pathlib

for folder in ("backing", "sync", "vmm", "python/ext", "tests/c", "tests/gpu", "tests/support"):
    for path in sorted(pathlib.Path(folder).glob("*.[ch]")):
        print(path)
