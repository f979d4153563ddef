# SPDX-License-Identifier: Apache-2.0
"""What a process can do once: its first large block.

Memory that a process has released comes three to five times slower when it asks again (measured on
an H200, after rests of 20 s too), and as fast as ever in a new process.

usage: python -m growpool._bench.once WORK DEVICE SIZE [CHUNK ...]. Prints one JSON object of
seconds, and bytes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import growpool
from growpool._bench import _native

MIB = 1 << 20
REST = 1.0  # seconds between the first time and the next
Figures = dict[str, float]


def alloc(size: int, device: int, stream: int) -> growpool.Chunk:
    return growpool.Chunk.create(size, device)


def free(chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
    """Forgets the chunk: growpool closes what nobody else has."""


def chunks_of(device: str, size: int) -> list[int]:
    """The chunks that a pool makes for one block, in order of address."""
    with growpool.Pool(device) as pool:
        pool.free(pool.malloc(size))
        chunks = sorted((chunk["address"], chunk["bytes"]) for chunk in pool.snapshot()["chunks"])
    return [nbytes for _, nbytes in chunks]


def steps_of(device: str, last: int) -> list[int]:
    """The chunks of a growable that doubles from 64 MiB."""
    with growpool.Pool(device) as pool, pool.growable(last) as growable:
        size = 64 * MIB
        while size <= last:
            growable.resize(size)
            size *= 2
        return [chunk["bytes"] for chunk in pool.snapshot()["chunks"]]


def block(device: str, size: int, callback: bool) -> tuple[float, float]:
    """Seconds of the first block of a new pool, and of its trim. Making the pool is not timed."""
    pool = growpool.Pool(device, alloc=alloc, free=free) if callback else growpool.Pool(device)
    return grow_and_trim(pool, size)


def grow_and_trim(pool: growpool.Pool, size: int) -> tuple[float, float]:
    """Seconds of a block of a new pool, and of the trim after it; closes the pool."""
    with pool:
        begin = time.perf_counter()
        address = pool.malloc(size)
        grown = time.perf_counter()
        pool.free(address)
        freed = time.perf_counter()
        pool.trim()
        return grown - begin, time.perf_counter() - freed


def twice(one: Callable[[], tuple[float, float]]) -> Figures:
    get, back = one()
    time.sleep(REST)
    again = one()
    return {"get": get, "back": back, "get again": again[0], "back again": again[1]}


def doubling(device: str, last: int) -> Figures:
    """A growable that doubles from 64 MiB."""
    number = int(device.partition(":")[2])
    base = _native.cuda_memory(number)[0]
    with growpool.Pool(device) as pool, pool.growable(last) as growable:
        size, begin = 64 * MIB, time.perf_counter()
        while size <= last:
            growable.resize(size)
            size *= 2
        took = time.perf_counter() - begin
        peak = base - _native.cuda_memory(number)[0]
    if peak < last:
        raise RuntimeError(f"the driver counts {peak} bytes where {last} are committed")
    return {"took": took, "peak": float(peak)}


def main(arguments: list[str]) -> None:
    work, device, size = arguments[0], arguments[1], int(arguments[2])
    if work == "floor":
        sizes = [int(word) for word in arguments[3:]]
        number = int(device.partition(":")[2])
        _native.cuda_memory(number)  # makes the context
        figures = twice(lambda: _native.cuda_floor(number, sizes))
    elif work == "doubling":
        _native.cuda_memory(int(device.partition(":")[2]))
        figures = doubling(device, size)
    else:
        growpool.Pool(device).close()
        figures = twice(lambda: block(device, size, work == "callback"))
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1:])
