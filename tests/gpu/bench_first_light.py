# SPDX-License-Identifier: Apache-2.0
"""First light in figures: one table, one run. What growpool costs over the driver, beside a peer.

usage: bench_first_light.py FLOOR [PAUSE], where FLOOR is tests/gpu/floor.c, built.
Medians of repeated calls on whatever machine this is: read ratios, not absolutes.

The driver charges for memory that was released a moment ago: creating 16 GiB took 0.8 ms from
memory at rest and 25 to 38 ms right after a release (H200, driver 580.159). So those who are
compared take turns, round by round, each after PAUSE seconds (default 1) of rest.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import growpool
from cuda_driver import Gpu

MIB, GIB = 1 << 20, 1 << 30
BLOCK = 16 * GIB
LEFT_ALONE = 8 * GIB  # of the device, for whoever shares it
ROUNDS = 7
PAIRS = 20_000

Row = tuple[str, str, str]


def floor(program: str, size: int, chunk: int, rounds: int) -> tuple[float, float]:
    """Microseconds of the driver alone: to get `size` bytes in chunks, and to give them back."""
    arguments = [program, str(size), str(chunk), str(rounds)]
    answer = subprocess.run(arguments, check=True, capture_output=True, text=True)
    grow, shrink = answer.stdout.split()
    return float(grow), float(shrink)


def alloc(size: int, device: int, stream: int) -> growpool.Chunk:
    return growpool.Chunk.create(size, device)


def free(chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
    pass


def first_block(make: Callable[[], growpool.Pool]) -> tuple[float, float]:
    """Microseconds for the first block of a new pool and for trimming it."""
    with make() as pool:
        start = time.perf_counter()
        address = pool.malloc(BLOCK)
        grown = time.perf_counter()
        pool.free(address)
        freed = time.perf_counter()
        released = pool.trim()
        end = time.perf_counter()
        assert released >= BLOCK
    return (grown - start) * 1e6, (end - freed) * 1e6


def first_tensor() -> tuple[float, float]:
    """The same for PyTorch's default allocator: a tensor, and empty_cache."""
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    tensor = torch.empty(BLOCK, dtype=torch.uint8, device="cuda")
    grown = time.perf_counter()
    del tensor
    freed = time.perf_counter()
    torch.cuda.empty_cache()
    return (grown - start) * 1e6, (time.perf_counter() - freed) * 1e6


def take_turns(program: str, pause: float) -> list[Row]:
    """16 GiB and back, everybody in every round."""
    players: list[tuple[str, Callable[[], tuple[float, float]]]] = [
        ("driver alone, 16 GiB as one chunk", lambda: floor(program, BLOCK, BLOCK, 1)),
        ("driver alone, 16 GiB as 1 GiB chunks", lambda: floor(program, BLOCK, GIB, 1)),
        (
            "growpool, Python callback, 1 GiB chunks",
            lambda: first_block(lambda: growpool.Pool("cuda:0", alloc=alloc, free=free)),
        ),
        (
            "growpool, device backing, 1 GiB chunks",
            lambda: first_block(lambda: growpool.Pool("cuda:0")),
        ),
    ]
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.empty(1, device="cuda")
        torch.cuda.empty_cache()
        players.append((f"PyTorch {torch.__version__}, default allocator", first_tensor))
    samples: list[list[tuple[float, float]]] = [[] for _ in players]
    for _ in range(ROUNDS):
        for player, (_, play) in enumerate(players):
            time.sleep(pause)
            samples[player].append(play())
    return [
        (name, *ms(*(statistics.median(column) for column in zip(*rounds, strict=True))))
        for (name, _), rounds in zip(players, samples, strict=True)
    ]


def pair(malloc: Callable[[int, int], int], give: Callable[[int, int], object], s: int) -> float:
    """Microseconds for one allocation and its free, the loop's own time included."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(PAIRS):
            give(malloc(MIB, s), s)
        times.append((time.perf_counter() - start) / PAIRS)
    return statistics.median(times) * 1e6


def pool_pair(stream: int) -> float:
    with growpool.Pool("cuda:0", alloc=alloc, free=free) as pool:
        pool.free(pool.malloc(MIB, stream), stream)
        result = pair(pool.malloc, pool.free, stream)
        pool.forget_stream(stream)
    return result


def torch_pair() -> list[Row]:
    if importlib.util.find_spec("torch") is None:
        return [("PyTorch", "not installed", "")]
    import torch

    raw_alloc = torch._C._cuda_cudaCachingAllocator_raw_alloc
    raw_delete = torch._C._cuda_cudaCachingAllocator_raw_delete
    raw_delete(raw_alloc(MIB, 0))
    cost = pair(raw_alloc, lambda address, stream: raw_delete(address), 0)
    return [(f"PyTorch {torch.__version__}, raw 1 MiB alloc + free", f"{cost:.3f} us", "")]


def ms(grow: float, shrink: float) -> tuple[str, str]:
    return f"{grow / 1000:.3f} ms", f"{shrink / 1000:.3f} ms"


def main(program: str, pause: float) -> int:
    gpu = Gpu()
    free_bytes, total = gpu.memory_info()
    if free_bytes < BLOCK + LEFT_ALONE:
        print(
            f"{free_bytes / GIB:.1f} GiB free of {total / GIB:.1f}: too little for 16 and 8 spare"
        )
        return 1
    rows = take_turns(program, pause)
    grow, shrink = floor(program, 2 * MIB, 2 * MIB, 200)
    rows.append(("driver alone, 2 MiB created and released", f"{grow + shrink:.3f} us", ""))
    stream = gpu.create_stream()
    rows.append(("growpool, 1 MiB malloc + free, legacy stream", f"{pool_pair(0):.3f} us", ""))
    rows.append(("growpool, 1 MiB malloc + free, own stream", f"{pool_pair(stream):.3f} us", ""))
    gpu.destroy_stream(stream)
    rows += torch_pair()
    width = max(len(row[0]) for row in rows)
    print(f"{'first light, rests of ' + str(pause) + ' s':{width}}  {'get':>14}  {'give back':>14}")
    for name, get, back in rows:
        print(f"{name:{width}}  {get:>14}  {back:>14}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], float(sys.argv[2]) if len(sys.argv) == 3 else 1.0))
