# SPDX-License-Identifier: Apache-2.0
"""A mix of work for many threads in one pool, every byte of which is checked by kernels.

Each thread allocates, frees and trims at 1 : 1 : 0.1, with growables among it. Before a block is
freed its pattern is verified by a kernel, and then another pattern is written over it: a block that
is handed out while its last owner still works shows as wrong words in the next one's pattern. The
device is whatever ``gpu`` drives, so tests/python runs the same mix on the simulated one.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import growpool
from gpu_kit import MIB

LIMIT = 3 * 1024 * MIB
MOST_LIVE_BYTES = 48 * MIB  # in the blocks of one thread
MOST_GROWN_BYTES = 48 * MIB  # in its growable
MOST_SHARED = 64  # blocks on their way to another thread


@dataclass
class Block:
    buffer: growpool.Buffer | None  # None: a plain address
    address: int
    size: int
    seed: int
    stream: int


@dataclass
class Totals:
    """What all threads did, added up at the end of each."""

    counts: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, counts: dict[str, int]) -> None:
        with self.lock:
            for name, count in counts.items():
                self.counts[name] = self.counts.get(name, 0) + count


class Exchange:
    """Blocks that one thread leaves for another to free."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: list[Block] = []

    def leave(self, block: Block) -> Block | None:
        """Leave a block; the oldest comes back when there are too many."""
        with self._lock:
            self._blocks.append(block)
            return self._blocks.pop(0) if len(self._blocks) > MOST_SHARED else None

    def take(self) -> Block | None:
        with self._lock:
            return self._blocks.pop(0) if self._blocks else None


class Worker:
    """What one thread does. ``gpu`` has fill, verify, wait_for and delay as in cuda_driver.py."""

    def __init__(
        self, gpu: Any, pool: growpool.Pool, streams: list[int], counter: Any, exchange: Exchange,
        seed: int,
    ) -> None:  # fmt: skip
        self.gpu, self.pool, self.streams, self.counter = gpu, pool, streams, counter
        self.exchange = exchange
        self.random = random.Random(seed)
        self.live: list[Block] = []
        self.live_bytes = 0
        self.grown = pool.growable(MOST_GROWN_BYTES, stream=streams[0])
        self.grown_seed = self.random.getrandbits(32)
        self.counts = dict.fromkeys(
            "allocations frees trims grows shrinks launches verified_bytes refusals "
            "other_stream other_thread recorded".split(),
            0,
        )

    # -- kernels --

    def fill(self, stream: int, address: int, size: int, seed: int) -> None:
        self.gpu.fill(stream, address, size, seed)
        self.counts["launches"] += 1

    def verify(self, stream: int, address: int, size: int, seed: int) -> None:
        self.gpu.verify(stream, address, size, seed, self.counter)
        self.counts["launches"] += 1
        self.counts["verified_bytes"] += size

    # -- blocks --

    def size(self) -> int:
        """Log-uniform from 512 bytes to 16 MiB, a multiple of 4 and seldom of more."""
        return int(2 ** self.random.uniform(9, 24)) & ~3

    def within_the_limit(self, call: Callable[[], Any]) -> Any:
        """The call's result; where the limit refuses it, after making room, a few times."""
        for _ in range(20):
            try:
                return call()
            except growpool.LimitExceededError:
                self.counts["refusals"] += 1
                for _ in range(len(self.live) // 2 + 1):
                    self.free()
        return call()

    def allocate(self) -> None:
        size, stream = self.size(), self.random.choice(self.streams)
        while self.live and self.live_bytes + size > MOST_LIVE_BYTES:
            self.free()
        buffer = None
        if self.random.random() < 0.5:
            buffer = self.within_the_limit(lambda: self.pool.allocate(size, stream))
        address = buffer.handle if buffer is not None else 0
        if buffer is None:
            address = self.within_the_limit(lambda: self.pool.malloc(size, stream))
        block = Block(buffer, address, size, self.random.getrandbits(32), stream)
        self.fill(stream, address, size, block.seed)
        self.counts["allocations"] += 1
        self.live.append(block)
        self.live_bytes += size

    def free(self) -> None:
        """One of this thread's blocks: here, or by leaving it for another thread."""
        if not self.live:
            return
        at = self.random.randrange(len(self.live))
        self.live[at], self.live[-1] = self.live[-1], self.live[at]
        block: Block | None = self.live.pop()
        assert block is not None
        self.live_bytes -= block.size
        if self.random.random() < 0.2:
            block = self.exchange.leave(block)
            self.counts["other_thread"] += 1
        if block is not None:
            self.end(block)

    def end(self, block: Block) -> None:
        stream = block.stream
        if stream not in self.streams or self.random.random() < 0.2:
            stream = self.random.choice(self.streams)
            if stream != block.stream:
                self.gpu.wait_for(stream, block.stream)
                self.counts["other_stream"] += 1
        if self.random.random() < 0.05:
            self.gpu.delay(stream, 100_000)
        self.verify(stream, block.address, block.size, block.seed)
        self.fill(stream, block.address, block.size, block.seed ^ 0xFFFFFFFF)
        self.counts["frees"] += 1
        if block.buffer is None:
            self.pool.free(block.address, stream)
        elif self.random.random() < 0.5:
            # Freed on the stream it was made for, which waits for nothing: the pool has to know.
            block.buffer.record_stream(stream)
            block.buffer.close()
            self.counts["recorded"] += 1
        else:
            block.buffer.close(stream)

    def trim(self) -> None:
        keep = self.random.choice([0, 0, 64 * MIB, 256 * MIB])
        self.pool.trim(keep, wait=self.random.random() < 0.2)
        self.counts["trims"] += 1

    # -- the growable --

    def grow(self) -> None:
        before = self.grown.size
        size = min(before + self.random.randrange(1, 9) * MIB, MOST_GROWN_BYTES)
        self.within_the_limit(lambda: self.grown.resize(size))
        if size > before:
            new = self.grown.handle + before
            self.fill(self.streams[0], new, size - before, self.grown_seed)
        self.counts["grows"] += 1

    def shrink(self) -> None:
        size = self.grown.size
        if size > 0:
            self.verify(self.streams[0], self.grown.handle, size, self.grown_seed)
        self.grown.resize(self.random.randrange(size // MIB + 1) * MIB)
        self.counts["shrinks"] += 1

    # -- the run --

    def help_others(self) -> None:
        block = self.exchange.take()
        if block is not None:
            self.end(block)

    def run(self, end: float) -> None:
        acts = (self.allocate, self.free, self.help_others, self.trim, self.grow, self.shrink)
        while time.monotonic() < end:
            self.random.choices(acts, (1, 0.8, 0.2, 0.1, 0.05, 0.05))[0]()
        while self.live:
            self.free()
        self.shrink()
        self.grown.close()


def run_threads(
    gpu: Any, pool: growpool.Pool, streams: list[list[int]], counters: list[Any], seconds: float
) -> dict[str, int]:
    """One thread for each list of streams; what they did. A thread that hangs fails the caller."""
    totals, exchange = Totals(), Exchange()
    failures: list[BaseException] = []
    end = time.monotonic() + seconds

    def work(number: int) -> None:
        try:
            worker = Worker(gpu, pool, streams[number], counters[number], exchange, 500 + number)
            worker.run(end)
            totals.add(worker.counts)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(len(streams))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0) + 60)
        assert not thread.is_alive(), "a thread hangs"
    assert not failures, failures
    last = Worker(gpu, pool, streams[0], counters[0], exchange, 1)
    while (block := exchange.take()) is not None:
        last.end(block)
    last.grown.close()
    totals.add(last.counts)
    return totals.counts
