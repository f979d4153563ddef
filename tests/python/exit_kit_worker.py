# SPDX-License-Identifier: Apache-2.0
"""What a worker process of the exit tests runs; a module of its own, so that spawn finds it."""

from __future__ import annotations

import sys

import growpool


def leave_everything() -> None:
    """Leave a pool, a buffer, an export and a stream with work to the end of the process."""
    pool = growpool.Pool("host")
    stream = growpool.host.Stream()
    buffer = pool.allocate(1 << 21, stream=stream)
    stream.submit(lambda: None)
    sys.kept = [pool, buffer, memoryview(pool.allocate(9)), stream]  # type: ignore[attr-defined]
