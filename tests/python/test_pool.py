# SPDX-License-Identifier: Apache-2.0
"""What a pool does when all is well: growing, reuse, limits, trimming, figures, the with block."""

from __future__ import annotations

import pickle
import weakref

import growpool
import pytest
from helpers import MIB, PAGE, Supplier, eventually

Pool = growpool.Pool


def test_callbacks_get_ints(pool: Pool, supplier: Supplier) -> None:
    pool.allocate(1000)
    pool.close()
    (alloc, free) = supplier.calls
    assert alloc[0] == "alloc"
    assert alloc[2:] == (-1, 0)
    assert free == ("free", *alloc[1:])
    assert all(type(value) is int for value in alloc[1:])


def test_the_stream_of_the_growth_reaches_both_callbacks(pool: Pool, supplier: Supplier) -> None:
    with growpool.host.Stream() as stream:
        pool.allocate(1000, stream=stream).close()
        pool.trim()
    assert [call[3] for call in supplier.calls] == [stream.id, stream.id]


def test_nothing_is_asked_for_before_the_first_block(pool: Pool, supplier: Supplier) -> None:
    assert supplier.calls == []
    assert pool.stats.address_bytes == 0


def test_blocks_are_aligned_and_apart(pool: Pool) -> None:
    addresses = [pool.malloc(size) for size in (1, 511, 512, 513, 4096, 3 * MIB)]
    assert all(address % 512 == 0 for address in addresses)
    assert len(set(addresses)) == len(addresses)
    for address in addresses:
        pool.free(address)
    assert pool.stats.used_bytes == 0


def test_the_same_stream_takes_memory_back_at_once(pool: Pool, supplier: Supplier) -> None:
    with growpool.host.Stream() as stream:
        first = pool.malloc(1000, stream)
        pool.free(first, stream)
        assert pool.malloc(1000, stream) == first
        pool.free(first)
    assert supplier.given == 1


def test_memory_grows_in_place(pool: Pool) -> None:
    keep = pool.allocate(PAGE)
    address = keep.handle
    memoryview(keep)[:4] = b"here"
    more = [pool.allocate(PAGE) for _ in range(20)]
    assert keep.handle == address
    assert bytes(memoryview(keep)[:4]) == b"here"
    assert len({buffer.handle for buffer in more}) == 20


def test_limit(supplier: Supplier) -> None:
    with Pool(
        "host", alloc=supplier.alloc, free=supplier.free, limit=8 * PAGE, name="small"
    ) as pool:
        kept = pool.allocate(6 * PAGE)
        with pytest.raises(growpool.LimitExceededError) as caught:
            pool.allocate(4 * PAGE)
        error = caught.value
        assert isinstance(error, growpool.OutOfMemoryError)
        assert isinstance(error, MemoryError)
        assert (error.size, error.limit, error.physical) == (4 * PAGE, 8 * PAGE, 6 * PAGE)
        assert "small" in str(error)
        assert supplier.out_bytes <= 8 * PAGE
        kept.close()
        assert pool.allocate(8 * PAGE).size == 8 * PAGE  # the idle chunks went back for it
        assert supplier.out_bytes <= 8 * PAGE
        pool.set_limit(16 * PAGE)
        pool.allocate(4 * PAGE)


def test_trim(pool: Pool, supplier: Supplier) -> None:
    live = pool.allocate(PAGE)
    idle = pool.allocate(6 * PAGE)
    assert pool.trim() == 0 or pool.stats.free_bytes == 0  # growth steps may have left an idle page
    idle.close()
    released = pool.trim()
    assert released >= 6 * PAGE
    assert supplier.out_bytes == pool.stats.physical_bytes
    live.close()
    pool.trim(min_bytes_to_keep="1 GiB")
    assert pool.stats.physical_bytes > 0
    pool.trim("0")
    assert pool.stats.physical_bytes == 0
    assert supplier.out == []


def test_trim_without_waiting(pool: Pool, supplier: Supplier) -> None:
    pool.allocate(4 * PAGE).close()
    assert pool.trim(wait=False) >= 4 * PAGE
    eventually(lambda: pool.stats.physical_bytes == 0)
    pool.drain()
    assert supplier.out == []


def test_stats(pool: Pool, supplier: Supplier) -> None:
    buffer = pool.allocate(1000)
    stats = pool.stats
    assert stats.used_bytes == 1024
    assert stats.physical_bytes == supplier.out_bytes
    assert stats.free_bytes == stats.physical_bytes - 1024
    assert stats.limit is None
    assert (stats.chunk_count, stats.grow_count) == (1, 1)
    assert stats.peak_used_bytes == 1024
    buffer.close()
    assert pool.stats.peak_used_bytes == 1024
    pool.reset_peak_stats()
    assert pool.stats.peak_used_bytes == 0
    with pytest.raises(AttributeError):
        stats.used_bytes = 1  # type: ignore[misc]


def test_stats_and_limit_results_pickle(pool: Pool) -> None:
    for value in (pool.stats, pool.set_limit("1 GiB"), pool.set_limit(None)):
        again = pickle.loads(pickle.dumps(value))
        assert type(again) is type(value)
        assert again == value
        assert again.limit == value.limit
    result = pool.growable(PAGE).resize(PAGE)
    assert type(pickle.loads(pickle.dumps(result))) is growpool.ReleaseResult


def test_snapshot(pool: Pool) -> None:
    buffer = pool.allocate(PAGE + 1)
    snapshot = pool.snapshot()
    (segment,) = snapshot["segments"]
    spans = segment["spans"]
    assert spans[0]["address"] == segment["address"]
    for before, after in zip(spans, spans[1:], strict=False):
        assert before["address"] + before["bytes"] == after["address"]
    assert sum(span["bytes"] for span in spans) == segment["bytes"]
    (used,) = [span for span in spans if span["state"] == "used"]
    assert used["address"] == buffer.handle
    assert used["bytes"] == PAGE + 512
    assert used["owners"] in (0, 1)
    assert sum(chunk["bytes"] for chunk in snapshot["chunks"]) == pool.stats.physical_bytes
    assert all(chunk["retiring"] is False for chunk in snapshot["chunks"])
    assert len({chunk["id"] for chunk in snapshot["chunks"]}) == pool.stats.chunk_count


def test_the_with_block_closes(supplier: Supplier) -> None:
    with Pool("host", alloc=supplier.alloc, free=supplier.free) as pool:
        buffer = pool.allocate(1000)
    assert pool.is_closed
    assert buffer.is_closed
    assert supplier.out == []


def test_the_with_block_never_masks_the_bodys_exception(supplier: Supplier) -> None:
    with pytest.raises(ZeroDivisionError), Pool("host", backing=supplier) as pool:
        pool.allocate(1000)
        raise ZeroDivisionError
    assert supplier.out == []


def test_names_and_reprs() -> None:
    with Pool("host", name="my pool", limit="1 GiB") as pool:
        assert pool.name == "my pool"
        buffer = pool.allocate("2 MiB")
        assert repr(buffer).startswith("<growpool.Buffer: 2.0 MiB on host at 0x")
        assert repr(pool).startswith("<growpool.Pool 'my pool' on host: 2.0 MiB used, ")
        assert "of 1.0 GiB" in repr(pool)
    with Pool("host", name="ümläut 漢字" * 20) as pool:
        assert pool.name.startswith("ümläut")
        assert repr(pool)


def test_weak_references(pool: Pool) -> None:
    buffer = pool.allocate(100)
    chunk = growpool.Chunk.create(PAGE, "host")
    stream = growpool.host.Stream()
    for thing in (pool, buffer, chunk, stream, growpool.DeviceBacking()):
        assert weakref.ref(thing)
    reference = weakref.ref(buffer)
    del buffer
    del thing
    assert reference() is None


def test_types_are_closed() -> None:
    for base in (Pool, growpool.Buffer, growpool.Chunk, growpool.DeviceBacking):
        with pytest.raises(TypeError):
            type("Sub", (base,), {})
    with pytest.raises(TypeError):
        growpool.Buffer()
