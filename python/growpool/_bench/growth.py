# SPDX-License-Identifier: Apache-2.0
"""Growth on a GPU: the first large block and its trim, a callback's own cost, growables."""

from __future__ import annotations

import time
from functools import partial

import growpool
from growpool._bench import _native, peers, timing
from growpool._bench.hot import against
from growpool._bench.rows import GIB, MIB, Context, NotHere, Reading, Row, Target

LEFT_ALONE = 8 * GIB  # of the device, for whoever shares it
ROUNDS = 7


def alloc(size: int, device: int, stream: int) -> growpool.Chunk:
    return growpool.Chunk.create(size, device)


def free(chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
    """Forgets the chunk: growpool closes what nobody else has."""


def need(context: Context, size: int) -> None:
    """Raise NotHere unless the device has that much free, and some for others."""
    here, total = _native.cuda_memory(context.ordinal)
    if here < size + LEFT_ALONE:
        raise NotHere(
            f"needs {size / GIB:g} GiB and leaves {LEFT_ALONE / GIB:g} GiB alone; the device has "
            f"{here / GIB:.1f} of {total / GIB:.1f} GiB free"
        )


def rest_of(size: int) -> float:
    """Seconds: memory that was released a moment ago is slow to get."""
    return 1 + 0.008 * size / GIB


def first_block(context: Context, size: int, callback: bool) -> timing.Times:
    """Seconds of the first block of a new pool, and of its trim. Making the pool is not timed."""
    pool = (
        growpool.Pool(context.device, alloc=alloc, free=free)
        if callback
        else growpool.Pool(context.device)
    )
    with pool:
        begin = time.perf_counter()
        block = pool.malloc(size)
        grown = time.perf_counter()
        pool.free(block)
        freed = time.perf_counter()
        pool.trim()
        return grown - begin, time.perf_counter() - freed


def chunks_of(context: Context, size: int) -> list[int]:
    """The chunks that a pool makes for one block, in order of address."""
    with growpool.Pool(context.device) as pool:
        pool.free(pool.malloc(size))
        chunks = sorted((chunk["address"], chunk["bytes"]) for chunk in pool.snapshot()["chunks"])
    return [nbytes for _, nbytes in chunks]


def first(size: int, context: Context) -> list[Reading]:
    need(context, size)
    sizes = chunks_of(context, size)
    players = {
        "floor": lambda: _native.cuda_floor(context.ordinal, sizes),
        "growpool, Python callback": lambda: first_block(context, size, True),
    }
    small = size <= 16 * GIB  # larger ones play less often: a row takes a minute at most
    if small:
        players["growpool, built-in backing"] = lambda: first_block(context, size, False)
    taken = timing.take_turns(players, context.count(ROUNDS), rest_of(size))
    readings = []
    peer = {
        mode: peers.torch(context, mode, "first", 5 if small else 3, size)
        for mode in peers.TORCH_NAMES
    }
    times = 7.5 if small else 5.0
    parts = (("get", 0, 1.15, 20.0), ("trim", 1, 1.2, times))
    for part, column, most, least_ratio in parts:
        floor = timing.median(taken["floor"], column)
        for name, some in taken.items():
            value = timing.median(some, column)
            readings.append(
                Reading(
                    f"{part}: {name}",
                    value,
                    "s",
                    None if name == "floor" else value / floor,
                    "" if name == "floor" else "floor",
                    Target("<=", most, "of the floor") if name.endswith("callback") else None,
                    f"{len(sizes)} chunks" if name == "floor" else "",
                    timing.least(some, column),
                )
            )
        mine = timing.median(taken["growpool, Python callback"], column)
        for mode, (figures, why) in peer.items():
            bound = least_ratio if mode == "expandable" else 0
            value_of = figures.get("get" if part == "get" else "back")
            name = f"{part}: {peers.TORCH_NAMES[mode]}"
            readings.append(against(name, value_of, why, mine, bound))
    return readings


def many_chunks(context: Context, size: int, chunk: int, callback: bool) -> timing.Times:
    """Seconds a chunk for growing, and for giving back."""
    pool = (
        growpool.Pool(context.device, alloc=alloc, free=free, chunk_size=chunk)
        if callback
        else growpool.Pool(context.device, backing=growpool.DeviceBacking(), chunk_size=chunk)
    )
    with pool:
        begin = time.perf_counter()
        block = pool.malloc(size)
        grown = time.perf_counter()
        pool.free(block)
        freed = time.perf_counter()
        pool.trim()
        count = size // chunk
        return (grown - begin) / count, (time.perf_counter() - freed) / count


def callback_cost(context: Context) -> list[Reading]:
    readings = []
    for chunk in (2 * MIB, 64 * MIB):
        size = context.count(1024 if chunk < 64 * MIB else 256, 4) * chunk
        if context.is_cuda:
            need(context, size)
        players = {
            "callback": partial(many_chunks, context, size, chunk, True),
            "built-in": partial(many_chunks, context, size, chunk, False),
        }
        rest = rest_of(size) if context.is_cuda else 0.0
        taken = timing.take_turns(players, context.count(ROUNDS), rest)
        for part, column in (("get", 0), ("give back", 1)):
            own = {name: timing.median(some, column) for name, some in taken.items()}
            what = f"{chunk // MIB} MiB chunks, {part}"
            readings.append(Reading(f"{what}: built-in backing", own["built-in"], "s"))
            readings.append(Reading(f"{what}: Python callback", own["callback"], "s"))
            readings.append(
                Reading(
                    f"{what}: the callback's own",
                    own["callback"] - own["built-in"],
                    "s",
                    target=Target("<=", 3e-6, "s a chunk"),
                )
            )
    return readings


def growable_once(context: Context, last: int) -> timing.Times:
    """Seconds and peak bytes of a growable that doubles from 64 MiB."""
    base = _native.cuda_memory(context.ordinal)[0]
    with growpool.Pool(context.device) as pool, pool.growable(last) as growable:
        size, begin = 64 * MIB, time.perf_counter()
        while size <= last:
            growable.resize(size)
            size *= 2
        took = time.perf_counter() - begin
        peak = base - _native.cuda_memory(context.ordinal)[0]
        if peak < last:
            raise RuntimeError(f"the driver counts {peak} bytes where {last} are committed")
        return took, float(peak)


def range_pages(context: Context) -> list[Reading]:
    """Pages of 2 MiB of a range, every other one, one by one and in bulk."""
    page, count = 2 * MIB, context.count(1024, 4)
    parts = [(2 * number * page, page) for number in range(count)]
    if context.is_cuda:
        need(context, count * page)
    taken: dict[str, list[timing.Times]] = {}
    for _ in range(context.count(ROUNDS)):
        time.sleep(rest_of(count * page) if context.is_cuda else 0.0)
        with growpool.Pool(context.device, chunk_size=page) as pool:
            cache = pool.range(2 * count * page)
            for name, work in (
                ("commit, one by one", lambda cache=cache: [cache.commit(*p) for p in parts]),
                ("decommit, one by one", lambda cache=cache: [cache.decommit(*p) for p in parts]),
                ("commit_many", lambda cache=cache: cache.commit_many(parts)),
                ("decommit_many", lambda cache=cache: cache.decommit_many(parts)),
            ):
                begin = time.perf_counter()
                work()
                taken.setdefault(name, []).append(((time.perf_counter() - begin) / count,))
            cache.close()
    return [
        Reading(f"{name}, a page", timing.median(some, 0), "s", least=timing.least(some, 0))
        for name, some in taken.items()
    ]


def growable(context: Context) -> list[Reading]:
    last = 16 * GIB
    need(context, 2 * last)
    players = {"growpool": lambda: growable_once(context, last)}
    taken = timing.take_turns(players, context.count(ROUNDS), rest_of(last))["growpool"]
    mine, peak = timing.median(taken, 0), max(entry[1] for entry in taken)
    readings = [
        Reading("growpool growable", mine, "s", least=timing.least(taken, 0)),
        Reading(
            "growpool growable, peak physical",
            peak,
            "B",
            peak / last,
            "final size",
            Target("<=", 1.01, "of the final size"),  # page tables are counted as well
        ),
    ]
    for mode, name in peers.TORCH_NAMES.items():
        figures, why = peers.torch(context, mode, "doubling", 5, last)
        bound = 10 if mode == "default" else 0
        readings.append(against(f"{name}, copying", figures.get("took"), why, mine, bound))
        held = figures.get("peak")
        ratio = held / last if held is not None else None
        readings.append(Reading(f"{name}, peak physical", held, "B", ratio, "final size", note=why))
    return readings


ROWS = [
    Row("first-16", "first 16 GiB as one block, and its trim", ("cuda",), partial(first, 16 * GIB)),
    Row("first-64", "first 64 GiB as one block, and its trim", ("cuda",), partial(first, 64 * GIB)),
    Row("callback", "a Python callback's own cost a chunk", ("cuda", "host"), callback_cost),
    Row("range-pages", "pages of 2 MiB of a range", ("cuda", "host"), range_pages),
    Row("growable", "growable from 64 MiB to 16 GiB by doubling", ("cuda",), growable),
]
