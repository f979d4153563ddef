# SPDX-License-Identifier: Apache-2.0
"""Sixteen Python threads allocate, launch and free in one pool with Python callbacks.

For a minute, or GP_GPU_SECONDS. Every block's pattern is verified by a kernel before its free.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from cuda_driver import Counter, Gpu
from gpu_kit import Supplier
from sixteen_threads import LIMIT, run_threads

pytestmark = pytest.mark.gpu

THREADS = 16
SECONDS = float(os.environ.get("GP_GPU_SECONDS", "60"))
NewStream = Callable[..., int]


def test_sixteen_threads_with_patterns_verified(
    gpu: Gpu, supplier: Supplier, new_stream: NewStream, capsys: pytest.CaptureFixture[str]
) -> None:
    streams = [[new_stream(), new_stream()] for _ in range(THREADS)]
    counters = [Counter(gpu) for _ in range(THREADS)]
    with supplier.pool(limit=LIMIT, name="sixteen") as pool:
        counts = run_threads(gpu, pool, streams, counters, SECONDS)
        for counter in counters:
            counter.check()
        stats = pool.stats
        assert stats.used_bytes == 0
        assert stats.peak_physical_bytes <= LIMIT
        assert (stats.callback_errors, stats.unreturned_bytes, stats.abandoned_bytes) == (0, 0, 0)
        pool.trim()
        assert (pool.stats.physical_bytes, pool.stats.chunk_count) == (0, 0)
        # The ledger of chunks: what came from alloc went to free, each once, to the byte.
        assert supplier.made == supplier.freed > 0
        assert supplier.made_bytes == supplier.freed_bytes
    words = sum(counter.expected for counter in counters)
    assert words * 4 == counts["verified_bytes"]
    assert counts["allocations"] == counts["frees"] > 0
    for counter in counters:
        counter.close()
    with capsys.disabled():
        told = ", ".join(f"{count} {name}" for name, count in counts.items())
        print(
            f"\n{THREADS} threads, {SECONDS:g} s: {told}; {supplier.made} chunks, "
            f"{stats.peak_physical_bytes >> 20} MiB at the peak"
        )
