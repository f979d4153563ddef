# SPDX-License-Identifier: Apache-2.0
"""Copies inside growpool memory, beside memory that the system gives in one piece."""

from __future__ import annotations

import mmap
import statistics
from collections.abc import Callable

import growpool
from growpool._bench import _native
from growpool._bench.growth import need
from growpool._bench.rows import GIB, MIB, Context, Reading, Row, Target

Copy = Callable[[int, int, int, int], float]


def rates(
    players: dict[str, tuple[int, int]], copy: Copy, size: int, rounds: int, count: int
) -> dict[str, float]:
    """Bytes a second that each pair of addresses reads and writes together, in turns."""
    taken: dict[str, list[float]] = {name: [] for name in players}
    for number in range(rounds + 1):
        for name, (to, source) in players.items():
            took = copy(to, source, size, count)
            if number:
                taken[name].append(2 * size * count / took)
    return {name: statistics.median(some) for name, some in taken.items()}


def judged(found: dict[str, float], size: int, plain: str) -> list[Reading]:
    text = f"{size // GIB} GiB" if size >= GIB else f"{size // MIB} MiB"
    ratio = found["growpool"] / found[plain]
    target = Target(">=", 0.95, f"of {plain}")
    return [
        Reading(f"{text}: {plain}", found[plain], "B/s"),
        Reading(f"{text}: growpool", found["growpool"], "B/s", ratio, plain, target),
    ]


def on_cuda(context: Context) -> list[Reading]:
    readings = []
    device = context.ordinal
    for size in (256 * MIB, GIB, 4 * GIB):
        need(context, 4 * size)
        plain: list[int] = []
        with growpool.Pool(context.device) as pool:
            blocks = [pool.malloc(size) for _ in range(2)]
            try:
                for _ in range(2):
                    plain.append(_native.cuda_alloc(device, size))
                players = {
                    "growpool": (blocks[0], blocks[1]),
                    "cuMemAlloc": (plain[0], plain[1]),
                }

                def copy(to: int, source: int, nbytes: int, count: int) -> float:
                    return _native.cuda_copy(device, to, source, nbytes, count)

                found = rates(players, copy, size, context.count(9), max(2, 8 * GIB // size))
            finally:
                for address in plain:
                    _native.cuda_free(device, address)
                for block in blocks:
                    pool.free(block)
        readings += judged(found, size, "cuMemAlloc")
    return readings


def on_host(context: Context) -> list[Reading]:
    size = 4 * MIB if context.quick else 256 * MIB
    with growpool.Pool("host") as pool:
        blocks = [pool.malloc(size) for _ in range(2)]
        with mmap.mmap(-1, 2 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as plain:
            if hasattr(mmap, "MADV_HUGEPAGE"):
                plain.madvise(mmap.MADV_HUGEPAGE)
            import ctypes

            held = ctypes.c_char.from_buffer(plain)
            base = ctypes.addressof(held)
            players = {"growpool": (blocks[0], blocks[1]), "a plain mmap": (base, base + size)}
            for pair in players.values():
                for address in pair:
                    _native.touch(address, size)
            found = rates(players, _native.host_copy, size, context.count(7), context.count(2, 1))
            del held
        for block in blocks:
            pool.free(block)
    return judged(found, size, "a plain mmap")


def copies(context: Context) -> list[Reading]:
    return on_cuda(context) if context.is_cuda else on_host(context)


ROWS = [Row("copies", "copies over memory of 256 MiB and more", ("cuda", "host"), copies)]
