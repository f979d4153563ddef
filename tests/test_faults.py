# SPDX-License-Identifier: Apache-2.0
"""That the fault sweeps reach the whole C interface. Reads the files and runs nothing of them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADERS = ("backing/backing.h", "sync/stream.h", "vmm/growpool.h")
SWEPT = ("tests/support/scenario*.c", "tests/support/model*.c", "tests/support/world.c")
SWEPT += ("tests/c/test_faults*.c",)

# Functions that can fail and are in no sweep, and why a sweep would show nothing.
NEED_NONE = {
    "gp_cuda_available": "opens no device here; test_cuda.c fails its allocations",
    "gp_device_open": "one allocation; test_ground.c, test_cuda.c and test_host.c fail it",
    "gp_error_set": "never fails",
    "gp_pool_try_free": "calls and allocates nothing",
    "gp_pool_try_malloc": "calls and allocates nothing but what a malloc does first",
}


def code_of(pattern: str) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob(pattern)))


def test_every_function_that_can_fail_is_in_a_fault_sweep() -> None:
    declared = re.findall(r"^GP_API gp_status (\w+)\(", "\n".join(map(code_of, HEADERS)), re.M)
    assert len(declared) > 40
    swept = set(re.findall(r"\bgp_\w+", "\n".join(map(code_of, SWEPT))))
    missing = [name for name in declared if name not in swept and name not in NEED_NONE]
    assert not missing, f"no fault sweep calls {missing}"
    assert not NEED_NONE.keys() - set(declared), "NEED_NONE names functions that are gone"
