# SPDX-License-Identifier: Apache-2.0
"""Memory pools that grow in place, stay under a limit, and shrink when idle.

A pool asks two callables of yours for physical memory, in chunks, and gives it back when no stream
uses it any more. Importing this package touches no driver.
"""

from __future__ import annotations

import atexit as _atexit
import os as _os

from growpool import _core, cuda, host
from growpool._core import (
    Buffer,
    CachingBacking,
    Chunk,
    DeviceBacking,
    Growable,
    HostNumaBacking,
    LimitResult,
    Memory,
    Pool,
    Range,
    ReleaseResult,
    Stats,
    View,
    __version__,
    bookkeeping_bytes,
    cuda_unavailable_reason,
    is_cuda_available,
)
from growpool._errors import (
    AddressSpaceError,
    CaptureError,
    DriverError,
    Error,
    LimitExceededError,
    OutOfMemoryError,
    PoolStateError,
    ReleaseWarning,
)

__all__ = [
    "AddressSpaceError",
    "Buffer",
    "CachingBacking",
    "CaptureError",
    "Chunk",
    "DeviceBacking",
    "DriverError",
    "Error",
    "Growable",
    "HostNumaBacking",
    "LimitExceededError",
    "LimitResult",
    "Memory",
    "OutOfMemoryError",
    "Pool",
    "PoolStateError",
    "Range",
    "ReleaseResult",
    "ReleaseWarning",
    "Stats",
    "View",
    "__version__",
    "bookkeeping_bytes",
    "cuda",
    "cuda_unavailable_reason",
    "get_include",
    "host",
    "is_cuda_available",
]


def get_include() -> str:
    """Return the folder for a C compiler's ``-I``: it holds ``growpool/capi.h``.

    That header is for C code that uses pools made in Python; it says how.
    """
    return _os.path.join(_os.path.dirname(__file__), "include")


# Handlers run in reverse order: those registered after this import come first and find pools alive.
_atexit.register(_core._shut_down)
