# SPDX-License-Identifier: Apache-2.0
"""How time is taken: warm-up, turns with rests, medians. It knows no player and no device."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from growpool._bench import _native

GIB = 1 << 30


def available_bytes() -> int:
    """Host memory that could be had now without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def touch_host_memory(most: int = 16 * GIB) -> int:
    """Write to fresh host memory once: machines that grow as they are used are slow before.

    Never more than half of what is available. Returns the bytes touched.
    """
    size = min(most, available_bytes() // 2)
    if size > 0:
        _native.touch_new(size)
    return max(size, 0)


def each(function: Callable[[int], object], count: int, rounds: int) -> tuple[float, float]:
    """Median and least seconds of one of the `count` steps that `function(count)` does."""
    function(max(count // 10, 1))
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        function(count)
        times.append((time.perf_counter() - begin) / count)
    return statistics.median(times), min(times)


Times = tuple[float, ...]


def take_turns(
    players: Mapping[str, Callable[[], Times]], rounds: int, rest: float
) -> dict[str, list[Times]]:
    """Let everybody play in every round, each time in another order, after a rest in seconds."""
    taken: dict[str, list[Times]] = {name: [] for name in players}
    for name in turns(list(players), rounds):
        time.sleep(rest)
        taken[name].append(players[name]())
    return taken


def turns(names: list[str], rounds: int) -> Iterator[str]:
    """Everybody once in each round, each time in another order."""
    for number in range(rounds):
        shift = number % len(names)
        order = names[shift:] + names[:shift]
        yield from reversed(order) if number % 2 else order


def median(times: Sequence[Times], column: int) -> float:
    return statistics.median(entry[column] for entry in times)


def least(times: Sequence[Times], column: int) -> float:
    return min(entry[column] for entry in times)
