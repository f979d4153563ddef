# SPDX-License-Identifier: Apache-2.0
"""Cost against size: the same work for 1 to 100,000 live blocks and 1 GiB to 100 GiB."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator

import growpool
from growpool._bench import _native
from growpool._bench.growth import LEFT_ALONE
from growpool._bench.hot import Stream, number_of, warm
from growpool._bench.rows import GIB, MIB, Context, Reading, Row, Target

BLOCK = 4096  # bytes


def live_blocks(context: Context, counts: list[int]) -> list[Reading]:
    readings: list[Reading] = []
    curves: dict[str, list[tuple[float, float]]] = {}
    smallest: dict[str, float] = {}
    for live in counts:
        with warm(context) as (pool, (stream,)):
            number = number_of(stream)
            repeats = max(1, min(50, 20_000 // live))
            _native.fill(pool, BLOCK, number, live)
            runs = [_native.fill(pool, BLOCK, number, live) for _ in range(repeats)]
            taken = {
                "allocate": sorted(run[0] for run in runs)[repeats // 2] / live,
                "free": sorted(run[1] for run in runs)[repeats // 2] / live,
            }
            kept = [pool.malloc(BLOCK, stream) for _ in range(live)]
            taken["trim beside live blocks"] = statistics.median(trims(pool, stream, 21))
            count = context.count(50_000, 20)
            taken["a 1 MiB pair beside them"] = _native.pair(pool, MIB, number, count) / count
            for block in kept:
                pool.free(block)
        for what, value in taken.items():
            curves.setdefault(what, []).append((live, value))
            first = smallest.setdefault(what, value)
            readings.append(
                Reading(f"{what}, {live:,} live", value, "s", value / first, f"{counts[0]} live")
            )
    context.plots["cost of one call against live blocks (s)"] = curves
    # Fewer than a hundred come from quick lists, which know no size.
    base = min(100, counts[-1])
    for what, curve in curves.items():
        beyond = [(live, value) for live, value in curve if live >= base]
        worst = max(value for _, value in beyond) / beyond[0][1]
        bound = math.log(counts[-1]) / math.log(base)
        target = Target("<=", bound, f"times the cost at {base} live blocks (log n)")
        readings.append(Reading(f"{what}: the dearest", worst, "x", target=target))
    return readings


def trims(pool: growpool.Pool, stream: Stream, rounds: int) -> Iterator[float]:
    """Seconds of trims that set some idle chunks retiring and do not wait."""
    for _ in range(rounds):
        pool.free(pool.malloc(16 * MIB, stream), stream)
        begin = time.perf_counter()
        pool.trim(wait=False)
        yield time.perf_counter() - begin


def grown(context: Context) -> list[Reading]:
    readings = []
    curves: dict[str, list[tuple[float, float]]] = {"grow": [], "trim": []}
    here = _native.cuda_memory(context.ordinal)[0]
    for size in (1, 2, 5, 10, 20, 50, 100):
        if size * GIB + LEFT_ALONE > here:
            readings.append(
                Reading(
                    f"{size} GiB",
                    None,
                    "s",
                    note="the device has too little free",
                    absent="no room",
                )
            )
            continue
        time.sleep(1 + 0.008 * size)
        with growpool.Pool(context.device) as pool:
            begin = time.perf_counter()
            block = pool.malloc(size * GIB)
            middle = time.perf_counter()
            pool.free(block)
            freed = time.perf_counter()
            pool.trim()
            end = time.perf_counter()
        for what, took in (("grow", middle - begin), ("trim", end - freed)):
            curves[what].append((size, took / size))
            readings.append(Reading(f"{what} {size} GiB, a GiB", took / size, "s"))
    context.plots["cost of a GiB against GiB grown (s)"] = curves
    return readings


def sizes(context: Context) -> list[Reading]:
    counts = [1, 10, 100] if context.quick else [1, 10, 100, 1000, 10_000, 100_000]
    readings = live_blocks(context, counts)
    return readings + (grown(context) if context.is_cuda else [])


ROWS = [Row("sizes", "cost against live blocks and bytes grown", ("cuda", "host"), sizes)]
