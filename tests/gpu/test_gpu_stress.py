# SPDX-License-Identifier: Apache-2.0
"""10,000 allocations over several streams, each filled by a kernel and verified on free."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

import growpool
import pytest
from cuda_driver import BLOCKING, Counter, Gpu
from gpu_kit import MIB, Supplier

pytestmark = pytest.mark.gpu

ALLOCATIONS = 10_000
MOST_LIVE_BYTES = 512 * MIB
LIMIT = 1024 * MIB
NewStream = Callable[..., int]


@dataclass
class Block:
    address: int
    size: int
    seed: int
    stream: int


class Mill:
    """Random work on one pool: allocations, frees and trims at 1 : 1 : 0.1."""

    def __init__(
        self,
        gpu: Gpu,
        pool: growpool.Pool,
        streams: list[int],
        counter: Counter,
        seed: int,
        most_live_bytes: int,
    ) -> None:
        self.gpu, self.pool, self.streams, self.counter = gpu, pool, streams, counter
        self.random = random.Random(seed)
        self.most_live_bytes = most_live_bytes
        self.live: list[Block] = []
        self.live_bytes = 0
        self.made = 0
        self.refused = 0

    def size(self) -> int:
        """Log-uniform from 512 bytes to 16 MiB, a multiple of 4 and seldom of more."""
        return int(2 ** self.random.uniform(9, 24)) & ~3

    def allocate(self) -> None:
        size, stream = self.size(), self.random.choice(self.streams)
        while self.live and self.live_bytes + size > self.most_live_bytes:
            self.free()
        try:
            address = self.pool.malloc(size, stream)
        except growpool.LimitExceededError:
            # Fragments: legal, and rare at half the limit. Make room and ask again.
            self.refused += 1
            for _ in range(len(self.live) // 2 + 1):
                self.free()
            address = self.pool.malloc(size, stream)
        block = Block(address, size, self.random.getrandbits(32), stream)
        self.gpu.fill(stream, address, size, block.seed)
        self.live.append(block)
        self.live_bytes += size
        self.made += 1

    def free(self) -> None:
        if not self.live:
            return
        at = self.random.randrange(len(self.live))
        self.live[at], self.live[-1] = self.live[-1], self.live[at]
        block = self.live.pop()
        self.live_bytes -= block.size
        stream = block.stream
        if self.random.random() < 0.1:  # the last use is on another stream than the first
            stream = self.random.choice(self.streams)
            if stream != block.stream:
                self.gpu.wait_for(stream, block.stream)
        if self.random.random() < 0.05:
            self.gpu.delay(stream, 100_000)
        self.gpu.verify(stream, block.address, block.size, block.seed, self.counter)
        self.pool.free(block.address, stream)

    def trim(self) -> None:
        keep = self.random.choice([0, 0, 64 * MIB, 256 * MIB])
        self.pool.trim(keep, wait=self.random.random() < 0.2)

    def run(self, allocations: int) -> None:
        while self.made < allocations:
            action = self.random.choices((self.allocate, self.free, self.trim), (1, 1, 0.1))[0]
            action()
        while self.live:
            self.free()


def test_patterns_survive_random_work(
    gpu: Gpu, supplier: Supplier, counter: Counter, new_stream: NewStream
) -> None:
    streams = [0, new_stream(BLOCKING), new_stream(), new_stream(), new_stream()]
    with supplier.pool(limit=LIMIT) as pool:
        mill = Mill(gpu, pool, streams, counter, 20261130, MOST_LIVE_BYTES)
        mill.run(ALLOCATIONS)
        counter.check()
        assert mill.made == ALLOCATIONS
        assert mill.refused < ALLOCATIONS // 20
        assert pool.stats.used_bytes == 0
        assert pool.stats.peak_physical_bytes <= LIMIT
        assert pool.stats.callback_errors == 0
        assert supplier.freed > 0
        pool.trim()
        assert pool.stats.physical_bytes == 0
        assert supplier.freed == supplier.made


def test_patterns_survive_threads(gpu: Gpu, supplier: Supplier, new_stream: NewStream) -> None:
    """Four threads in one pool, each with streams and a seed of its own."""
    failures: list[BaseException] = []

    def work(seed: int, mine: list[int], counter: Counter) -> None:
        try:
            Mill(gpu, pool, mine, counter, seed, MOST_LIVE_BYTES // 4).run(500)
        except BaseException as failure:
            failures.append(failure)

    counters = [Counter(gpu) for _ in range(4)]
    with supplier.pool(limit=LIMIT) as pool:
        threads = [
            threading.Thread(target=work, args=(seed, [new_stream(), new_stream()], counter))
            for seed, counter in enumerate(counters)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(240)
            assert not thread.is_alive(), "a thread hangs"
        assert not failures, failures
        for counter in counters:
            counter.check()
        assert pool.stats.used_bytes == 0
    for counter in counters:
        counter.close()
