# SPDX-License-Identifier: Apache-2.0
"""The hot path: allocate and free 1 MiB that the pool has, from C, from Python, by threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import growpool
from growpool._bench import _native, peers, timing
from growpool._bench.rows import MIB, Context, Reading, Row, Target, over

THREADS = 16
ROUNDS = 7
Stream = growpool.cuda.Stream | growpool.host.Stream


def number_of(stream: Stream) -> int:
    return stream.handle if isinstance(stream, growpool.cuda.Stream) else stream.id


@contextlib.contextmanager
def warm(context: Context, streams: int = 1) -> Iterator[tuple[growpool.Pool, list[Stream]]]:
    """A pool with memory for 1 MiB on each of some streams, and the streams."""
    with contextlib.ExitStack() as stack:
        made: list[Stream] = []
        for _ in range(streams):
            if context.is_cuda:
                made.append(stack.enter_context(growpool.cuda.Stream(context.device)))
            else:
                made.append(stack.enter_context(growpool.host.Stream()))
        pool = stack.enter_context(growpool.Pool(context.device))
        blocks = [(pool.malloc(4 * MIB, stream), stream) for stream in made]
        for block, stream in blocks:
            pool.free(block, stream)
        yield pool, made


def from_c(context: Context) -> list[Reading]:
    count = context.count(1_000_000, 100)
    readings = []
    with warm(context) as (pool, (stream,)):
        for name, handle in (("a created stream", number_of(stream)), ("stream 0", 0)):
            _native.pair(pool, MIB, handle, max(count // 10, 1))
            times = [_native.pair(pool, MIB, handle, count) / count for _ in range(ROUNDS)]
            target = Target("<=", 60e-9, "s a pair") if handle else None
            readings.append(
                Reading(
                    f"growpool, {name}",
                    sorted(times)[ROUNDS // 2],
                    "s",
                    least=min(times),
                    target=target,
                )
            )
        if context.is_cuda:
            readings += driver_alone(context, number_of(stream), count)
    return readings


def driver_alone(context: Context, handle: int, count: int) -> list[Reading]:
    """What a malloc asks of the driver: the first of a stream it was given, both of a handle."""
    taken = [_native.cuda_ask(context.ordinal, handle, count) for _ in range(ROUNDS)]
    return [
        Reading(
            f"the driver alone: {what}",
            timing.median(taken, column) / count,
            "s",
            least=timing.least(taken, column) / count,
        )
        for column, what in enumerate(("whether a stream captures", "a stream's id"))
    ]


def as_ints(context: Context) -> list[Reading]:
    count = context.count(200_000, 50)
    with warm(context) as (pool, (stream,)):
        malloc, free, number = pool.malloc, pool.free, number_of(stream)

        def many(times: int) -> None:
            for _ in range(times):
                free(malloc(MIB, number))

        mine, best = timing.each(many, count, ROUNDS)
    readings = [Reading("growpool", mine, "s", target=Target("<=", 200e-9, "s a pair"), least=best)]
    if not context.is_cuda:
        return readings
    for mode in peers.TORCH_NAMES:
        figures, why = peers.torch_pairs(context.ordinal, mode, ROUNDS)
        name = f"{peers.TORCH_NAMES[mode]}, raw pair"
        readings.append(against(name, figures.get("raw"), why, mine, 3 if mode == "default" else 0))
    for name, (value, why) in peers.pairs(context, ROUNDS, 20_000).items():
        readings.append(against(name, value, why, mine, 3 if name == "CuPy pool" else 0))
    return readings


def against(player: str, value: float | None, why: str, mine: float, bound: float) -> Reading:
    """A peer's reading: how many times of growpool's time it takes, held against a bound if any."""
    ratio = over(value, mine) if value is not None else None
    target = Target(">=", bound, "times growpool's time") if bound else None
    return Reading(player, value, "s", ratio, "growpool", target, why)


def as_buffers(context: Context) -> list[Reading]:
    count = context.count(100_000, 50)
    with warm(context) as (pool, (stream,)):
        allocate = pool.allocate

        def many(times: int) -> None:
            for _ in range(times):
                allocate(MIB, stream).close()

        mine, best = timing.each(many, count, ROUNDS)
    readings = [Reading("growpool", mine, "s", target=Target("<=", 400e-9, "s a pair"), least=best)]
    if context.is_cuda:
        for mode in peers.TORCH_NAMES:
            figures, why = peers.torch_pairs(context.ordinal, mode, ROUNDS)
            name = f"{peers.TORCH_NAMES[mode]}, torch.empty and del"
            bound = 4 if mode == "default" else 0
            readings.append(against(name, figures.get("tensor"), why, mine, bound))
    return readings


def by_threads(context: Context) -> list[Reading]:
    count = context.count(300_000 if context.is_cuda else 30_000, 50)
    with warm(context, THREADS) as (pool, streams):
        numbers = [number_of(stream) for stream in streams]
        rates = {}
        for name, some in (("1 thread", numbers[:1]), (f"{THREADS} threads", numbers)):
            _native.threads(pool, MIB, some, max(count // 10, 1))
            times = [_native.threads(pool, MIB, some, count) for _ in range(ROUNDS)]
            rates[name] = len(some) * count / sorted(times)[ROUNDS // 2]
        python = {len(some): _python_rate(pool, some, count) for some in (numbers[:1], numbers)}
    one, all_of_them = rates["1 thread"], rates[f"{THREADS} threads"]
    bound = Target(">=", 4, "times one thread's pairs a second")
    return [
        Reading("growpool, C, 1 thread", one, "/s"),
        Reading(
            f"growpool, C, {THREADS} threads",
            all_of_them,
            "/s",
            all_of_them / one,
            "1 thread",
            bound,
        ),
        Reading("growpool, Python, 1 thread", python[1], "/s"),
        Reading(
            f"growpool, Python, {THREADS} threads",
            python[THREADS],
            "/s",
            python[THREADS] / python[1],
            "1 thread",
            note="one thread at a time holds the GIL",
        ),
    ]


def _python_rate(pool: growpool.Pool, numbers: list[int], count: int) -> float:
    """Pairs a second of Python threads, each on its stream."""
    count = max(count // 10, 1)
    gate = threading.Barrier(len(numbers) + 1)

    def loop(number: int) -> None:
        malloc, free = pool.malloc, pool.free
        gate.wait()
        for _ in range(count):
            free(malloc(MIB, number))

    threads = [threading.Thread(target=loop, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    gate.wait()
    begin = time.perf_counter()
    for thread in threads:
        thread.join()
    return len(numbers) * count / (time.perf_counter() - begin)


BOTH = ("cuda", "host")
ROWS = [
    Row("pair-c", "allocate and free 1 MiB, same stream, from C", BOTH, from_c),
    Row("pair-int", "the same from Python as ints", BOTH, as_ints),
    Row("pair-buffer", "the same as Buffer objects", BOTH, as_buffers),
    Row("threads", f"{THREADS} threads, own streams", BOTH, by_threads),
]
