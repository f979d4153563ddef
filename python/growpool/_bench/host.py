# SPDX-License-Identifier: Apache-2.0
"""The host device: growing and shrinking beside the raw system calls, and beside numpy."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import growpool
from growpool._bench import _native, peers, timing
from growpool._bench.hot import against
from growpool._bench.rows import GIB, MIB, Context, Reading, Row, Target


def chunks_of(size: int) -> list[int]:
    """What a growable of this size is made of."""
    with growpool.Pool("host") as pool, pool.growable(size) as growable:
        growable.resize(size)
        return [chunk["bytes"] for chunk in pool.snapshot()["chunks"]]


def grow_once(size: int, touched: bool) -> timing.Times:
    """Seconds, from C, of growing a new range to `size` and of shrinking it to nothing."""
    with growpool.Pool("host") as pool:
        return _native.resize(pool, size, touched)


def grow_and_shrink(context: Context) -> list[Reading]:
    readings = []
    for size, touched in ((256 * MIB, False), (256 * MIB, True)):
        size = 4 * MIB if context.quick else size
        players: dict[str, Callable[[], timing.Times]] = {
            "raw system calls": partial(_native.host_floor, chunks_of(size), touched),
            "growpool": partial(grow_once, size, touched),
        }
        taken = timing.take_turns(players, context.count(21), 0.0)
        state = "touched" if touched else "untouched"
        for part, column in (("grow", 0), ("shrink", 1)):
            floor = timing.median(taken["raw system calls"], column)
            mine = timing.median(taken["growpool"], column)
            what = f"{part} {size // MIB} MiB, {state}"
            readings.append(Reading(f"{what}: raw system calls", floor, "s"))
            target = Target("<=", 1.3, "of the raw calls")
            ratio = mine / floor
            readings.append(Reading(f"{what}: growpool", mine, "s", ratio, "raw calls", target))
    return readings


def append_growable(last: int) -> timing.Times:
    with growpool.Pool("host") as pool, pool.growable(last) as growable:
        size, done, begin = 2 * MIB, 0, time.perf_counter()
        while size <= last:
            growable.resize(size)
            _native.touch(growable.handle + done, size - done)
            done, size = size, size * 2
        return (time.perf_counter() - begin,)


def append_numpy(numpy: Any, last: int) -> timing.Times:
    size, begin = 2 * MIB, time.perf_counter()
    array = numpy.zeros(0, dtype=numpy.uint8)
    while size <= last:
        array = numpy.append(array, numpy.ones(size - array.size, dtype=numpy.uint8))
        size *= 2
    return (time.perf_counter() - begin,)


def beside_numpy(context: Context) -> list[Reading]:
    last = 4 * MIB if context.quick else min(GIB, timing.available_bytes() // 8)
    players = {"growpool": partial(append_growable, last)}
    why = "numpy is not installed"
    if peers.is_here("numpy"):
        numpy: Any = importlib.import_module("numpy")
        players["numpy"] = partial(append_numpy, numpy, last)
    taken = timing.take_turns(players, context.count(5), 0.0)
    mine = timing.median(taken["growpool"], 0)
    theirs = timing.median(taken["numpy"], 0) if "numpy" in taken else None
    return [
        Reading("growpool growable", mine, "s", least=timing.least(taken["growpool"], 0)),
        against("numpy.append", theirs, "" if theirs else why, mine, 0),
    ]


ROWS = [
    Row("host-grow", "host: grow and shrink", ("host",), grow_and_shrink),
    Row("host-append", "host: 2 MiB to 1 GiB by doubling, written", ("host",), beside_numpy),
]
