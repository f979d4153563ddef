# SPDX-License-Identifier: Apache-2.0
"""Prints the folder of cuda.h in NVIDIA's wheel for CUDA 13; fails where it is absent.

Our own declarations of the driver API are held against that header by tests/c/test_cuda_abi.c.
"""

import importlib.util
import pathlib
import sys

spec = importlib.util.find_spec("nvidia")
roots = list(spec.submodule_search_locations or []) if spec else []
for root in roots:
    for header in sorted(pathlib.Path(root).glob("**/include/cuda.h")):
        print(header.parent)
        sys.exit(0)
sys.exit(f"no cuda.h under {roots}: pip install 'nvidia-cuda-runtime>=13,<14'")
