# SPDX-License-Identifier: Apache-2.0
"""A growable that doubles from 64 MiB to 16 GiB on a GPU, beside PyTorch allocating and copying.

Players take turns with rests between them, because memory that was released a moment ago is slower
to get (about 2 ms a GiB on an H200). Prints medians and the peak of device memory by the driver's
count; judges nothing.

usage: python bench/growable.py [ROUNDS]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import growpool
import torch

MIB, GIB = 1 << 20, 1 << 30
FIRST, LAST = 64 * MIB, 16 * GIB
PAGE = 2 * MIB


def used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def by_growable() -> tuple[float, int]:
    base = used()
    with growpool.Pool("cuda:0") as pool, pool.growable(LAST) as growable:
        size, begin = FIRST, time.perf_counter()
        while size <= LAST:
            growable.resize(size)
            size *= 2
        took = time.perf_counter() - begin
        return took, used() - base


def by_copy() -> tuple[float, int]:
    base, peak = used(), 0
    tensor = torch.empty(FIRST, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    size, took = FIRST * 2, 0.0
    while size <= LAST:
        begin = time.perf_counter()
        larger = torch.empty(size, dtype=torch.uint8, device="cuda")
        larger[: tensor.numel()].copy_(tensor)
        torch.cuda.synchronize()
        took += time.perf_counter() - begin
        peak = max(peak, used() - base)
        tensor = larger
        del larger
        size *= 2
    del tensor
    torch.cuda.empty_cache()
    return took, peak


def pages(count: int = 1024) -> list[tuple[str, float]]:
    """Microseconds for one page of 2 MiB, committed and decommitted on a GPU."""
    parts = [(i * 2 * PAGE, PAGE) for i in range(count)]
    with growpool.Pool("cuda:0", chunk_size=PAGE) as pool, pool.range(2 * count * PAGE) as cache:
        ways: list[tuple[str, Callable[[], object]]] = [
            ("commit, one by one", lambda: [cache.commit(*part) for part in parts]),
            ("decommit, one by one", lambda: [cache.decommit(*part) for part in parts]),
            ("commit_many", lambda: cache.commit_many(parts)),
            ("decommit_many", lambda: cache.decommit_many(parts)),
        ]
        figures = []
        for name, way in ways:
            begin = time.perf_counter()
            way()
            figures.append((name, (time.perf_counter() - begin) * 1e6 / count))
        return figures


def main(rounds: int = 5) -> None:
    torch.zeros(1, device="cuda")
    players = {"growpool growable": by_growable, "PyTorch, allocate and copy": by_copy}
    results: dict[str, list[tuple[float, int]]] = {name: [] for name in players}
    for _ in range(rounds):
        for name, player in players.items():
            time.sleep(1)
            results[name].append(player())
    print(f"{'64 MiB to 16 GiB by doubling':32}  {'ms':>8}  {'peak GiB':>8}")
    for name, runs in results.items():
        took = statistics.median(run[0] for run in runs) * 1e3
        print(f"{name:32}  {took:8.2f}  {max(run[1] for run in runs) / GIB:8.2f}")
    print(f"{'pages of a range':32}  {'us a page':>8}")
    for name, took in pages():
        print(f"{name:32}  {took:8.1f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
