# SPDX-License-Identifier: Apache-2.0
"""Many pools, many live blocks: every one has its own memory, and all of it goes back."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import growpool
from helpers import MIB, PAGE, Supplier

Pool = growpool.Pool

POOLS = 1_000
BLOCKS = 100_000  # live at once
SIZE = 512


def live_bytes(pool: Pool) -> int:
    spans = [span for segment in pool.snapshot()["segments"] for span in segment["spans"]]
    return sum(span["bytes"] for span in spans if span["state"] == "used")


def test_many_live_blocks_in_one_pool(pool: Pool, supplier: Supplier) -> None:
    blocks = [pool.malloc(SIZE) for _ in range(BLOCKS)]
    for before, after in pairwise(sorted(blocks)):
        assert after - before >= SIZE
    assert pool.stats.used_bytes == BLOCKS * SIZE == live_bytes(pool)
    # No more than the sum, and one growth step for those to come.
    assert BLOCKS * SIZE <= supplier.out_bytes <= BLOCKS * SIZE + 32 * MIB
    grown = pool.stats.grow_count
    for block in blocks[::2]:
        pool.free(block)
    assert pool.stats.used_bytes == BLOCKS // 2 * SIZE
    again = [pool.malloc(SIZE) for _ in range(BLOCKS // 2)]
    assert sorted(again) == sorted(blocks[::2])
    assert pool.stats.grow_count == grown
    for block in again + blocks[1::2]:
        pool.free(block)
    assert pool.trim() == pool.stats.peak_physical_bytes
    assert pool.stats.physical_bytes == 0


def test_many_pools_with_live_blocks() -> None:
    pools = [Pool("host", chunk_size=PAGE, name=f"pool {i}") for i in range(POOLS)]
    blocks = [[pool.malloc(SIZE) for _ in range(BLOCKS // POOLS)] for pool in pools]
    every = sorted(block for of_one in blocks for block in of_one)
    assert len(every) == BLOCKS
    for before, after in pairwise(every):
        assert after - before >= SIZE
    for pool in pools:
        assert pool.stats.used_bytes == BLOCKS // POOLS * SIZE
        assert pool.stats.physical_bytes == PAGE
    # The reservations of 1,000 pools leave most of the addresses to others.
    assert sum(pool.stats.address_bytes for pool in pools) < 32 << 40
    assert pools[-1].stats.address_bytes <= pools[0].stats.address_bytes
    growable = pools[-1].growable("1 TiB")
    growable.resize(PAGE)
    for pool in pools:
        pool.close()
        stats = pool.stats
        assert (stats.address_bytes, stats.physical_bytes, stats.used_bytes) == (0, 0, 0)


def test_many_objects_in_one_pool(sim: Any) -> None:
    """Buffers, ranges and growables by the thousand; their addresses are all accounted for."""
    with Pool(sim.device, chunk_size=PAGE, address_space="1 GiB") as pool:
        buffers = [pool.allocate(SIZE) for _ in range(10_000)]
        growables = [pool.growable(64 * PAGE) for _ in range(1_000)]
        for growable in growables:
            growable.resize(1)
        assert pool.stats.address_bytes == (1 << 30) + 1_000 * 64 * PAGE
        assert len({growable.handle for growable in growables}) == 1_000
        assert pool.stats.used_bytes == 10_000 * SIZE + 1_000 * PAGE
        buffers.clear()
        growables.clear()
        del growable
        pool.trim()
        pool.drain()
        assert pool.stats.address_bytes == 1 << 30
        assert sim.state.mapping_count == 0
    assert sim.state.reservation_count == 0
