# SPDX-License-Identifier: Apache-2.0
"""Growth on a GPU: the first large block and its trim, a callback's own cost, growables."""

from __future__ import annotations

import time
from functools import partial

import growpool
from growpool._bench import _native, once, peers, timing
from growpool._bench.hot import against
from growpool._bench.rows import GIB, MIB, Context, NotHere, Reading, Row, Target

FLOOR, MINE = "floor", "growpool, Python callback"
LEFT_ALONE = 8 * GIB  # of the device, for whoever shares it
ROUNDS = 7


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


def first(size: int, context: Context) -> list[Reading]:
    need(context, size)
    sizes = once.chunks_of(context.device, size)
    small = size <= 16 * GIB  # larger ones play less often: a row takes a minute at most
    players: dict[str, tuple[object, ...]] = {
        FLOOR: ("once", "floor", context.device, size, *sizes),
        MINE: ("once", "callback", context.device, size),
        "growpool, built-in backing": ("once", "built-in", context.device, size),
    }
    for mode, name in peers.TORCH_NAMES.items():
        players[name] = ("peer_torch", mode, "first", context.ordinal, size)
    found = peers.in_new_processes(players, context.count(5 if small else 3))
    readings = []
    for part, name, most, times in (
        ("get", "get", 1.15, 20.0),
        ("trim", "back", 1.2, 7.5 if small else 5.0),
        ("get again", "get again", None, 0.0),
        ("trim again", "back again", None, 0.0),
    ):
        readings += beside_floor(part, name, found, most, f"{len(sizes)} chunks")
        mine = found[MINE].median(name)
        for mode, peer in peers.TORCH_NAMES.items():
            bound = times if mode == "expandable" else 0
            outcome = found[peer]
            told = against(f"{part}: {peer}", outcome.median(name), outcome.why, mine or 0, bound)
            readings.append(told)
    return readings


def beside_floor(
    part: str, name: str, found: dict[str, peers.Outcome], most: float | None, note: str
) -> list[Reading]:
    """The floor's figure, and growpool's as ratios to it."""
    floor = found[FLOOR].median(name)
    readings = [Reading(f"{part}: {FLOOR}", floor, "s", note=found[FLOOR].why or note)]
    for player in (MINE, "growpool, built-in backing"):
        value = found[player].median(name)
        target = Target("<=", most, "of the floor") if player == MINE and most else None
        ratio = value / floor if value and floor else None
        readings.append(
            Reading(
                f"{part}: {player}",
                value,
                "s",
                ratio,
                "floor",
                target,
                found[player].why,
                found[player].least(name),
            )
        )
    return readings


def many_chunks(context: Context, size: int, chunk: int, callback: bool) -> timing.Times:
    """Seconds a chunk for growing, and for giving back."""
    pool = (
        growpool.Pool(context.device, alloc=once.alloc, free=once.free, chunk_size=chunk)
        if callback
        else growpool.Pool(context.device, backing=growpool.DeviceBacking(), chunk_size=chunk)
    )
    grown, trimmed = once.grow_and_trim(pool, size)
    count = size // chunk
    return grown / count, trimmed / count


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
    players: dict[str, tuple[object, ...]] = {
        "growpool growable": ("once", "doubling", context.device, last),
        FLOOR: ("once", "floor", context.device, last, *once.steps_of(context.device, last)),
    }
    for mode, name in peers.TORCH_NAMES.items():
        players[f"{name}, copying"] = ("peer_torch", mode, "doubling", context.ordinal, last)
    found = peers.in_new_processes(players, context.count(5))
    mine, floor = found.pop("growpool growable"), found.pop(FLOOR)
    took, peak = mine.median("took"), mine.median("peak")
    # Page tables are counted as well.
    target = Target("<=", 1.01, "of the final size")
    readings = [
        Reading(FLOOR, floor.median("get"), "s", note=floor.why or "the same chunks at once"),
        Reading("growpool growable", took, "s", least=mine.least("took"), note=mine.why),
        Reading(
            "growpool growable, peak physical",
            peak,
            "B",
            peak / last if peak else None,
            "final size",
            target,
            mine.why,
        ),
    ]
    for name, outcome in found.items():
        bound = 10 if name.startswith("PyTorch,") else 0
        readings.append(against(name, outcome.median("took"), outcome.why, took or 0, bound))
        held = outcome.median("peak")
        ratio = held / last if held else None
        what = f"{name.removesuffix(', copying')}, peak physical"
        readings.append(Reading(what, held, "B", ratio, "final size", note=outcome.why))
    return readings


ROWS = [
    Row("first-16", "first 16 GiB as one block, and its trim", ("cuda",), partial(first, 16 * GIB)),
    Row("first-64", "first 64 GiB as one block, and its trim", ("cuda",), partial(first, 64 * GIB)),
    Row("callback", "a Python callback's own cost a chunk", ("cuda", "host"), callback_cost),
    Row("range-pages", "pages of 2 MiB of a range", ("cuda", "host"), range_pages),
    Row("growable", "growable from 64 MiB to 16 GiB by doubling", ("cuda",), growable),
]
