# SPDX-License-Identifier: Apache-2.0
"""What growpool promises on every device: the same tests on the host, the simulator and a GPU.

On the simulator nothing has contents, but every fill and copy is pending work on its addresses, so
memory that is unmapped or handed on too early is a violation, which aborts.
"""

from __future__ import annotations

import itertools
from typing import Any

import growpool
import pytest
from emergency import refusals
from lab import MIB, PAGE, Lab, expect, gives_addresses_back

pytestmark = pytest.mark.contract


# ---- blocks ----


def test_a_block_holds_what_it_was_given(lab: Lab, pool: growpool.Pool) -> None:
    stream = lab.stream()
    with pool.allocate(3 * MIB, stream=stream) as buffer:
        assert buffer.size == 3 * MIB and buffer.handle % 512 == 0
        buffer.fill(7)
        expect(lab, buffer, (7, 3 * MIB))
        buffer.copy_from(bytes(range(256)) * (3 * MIB // 256))
        got = bytearray(3 * MIB)
        buffer.copy_to(got)
        assert not lab.has_contents or got == bytes(range(256)) * (3 * MIB // 256)
    assert pool.trim() == 4 * MIB
    assert pool.stats.physical_bytes == 0


def test_granularity_is_what_the_suite_counts_with(pool: growpool.Pool) -> None:
    with pool.range(PAGE) as range_:
        assert range_.granularity == PAGE


def test_memory_goes_to_another_stream_only_when_it_has_passed(
    lab: Lab, pool: growpool.Pool
) -> None:
    streams = [lab.stream() for _ in range(3)]
    for round_ in range(30):
        stream = streams[round_ % 3]
        buffer = pool.allocate(PAGE, stream=stream)
        buffer.fill(round_)
        other = streams[(round_ + 1) % 3]
        if round_ % 2:
            buffer.record_stream(other)
            buffer.fill(round_, other)
        buffer.close()
    stats = pool.stats
    assert pool.trim() == (stats.physical_bytes if refusals() else stats.peak_physical_bytes)


def test_the_limit_is_exact_and_reclaims_what_is_idle(lab: Lab, supplier: Any) -> None:
    with supplier.pool(chunk_size=PAGE, limit=4 * PAGE) as pool:
        first, second = lab.stream(), lab.stream()
        buffers = [pool.allocate(PAGE, stream=first) for _ in range(4)]
        for buffer in buffers:
            buffer.fill(1)
        with pytest.raises(growpool.LimitExceededError) as caught:
            pool.allocate(PAGE, stream=second)
        assert caught.value.limit == 4 * PAGE == caught.value.physical
        for buffer in buffers:
            buffer.close()
        whole = pool.allocate(4 * PAGE, stream=second)
        whole.fill(2)
        expect(lab, whole, (2, 4 * PAGE))
        assert pool.stats.physical_bytes == 4 * PAGE == supplier.bytes_out
        whole.close()


@pytest.mark.parametrize("refusals", [1, 3])
def test_a_refusal_is_out_of_memory_and_changes_nothing(
    lab: Lab, supplier: Any, pool: growpool.Pool, refusals: int
) -> None:
    pool.allocate(PAGE).close()
    before = pool.stats.used_bytes
    supplier.refusals = 100
    with pytest.raises(growpool.OutOfMemoryError):
        pool.allocate(8 * PAGE)
    supplier.refusals = 0
    assert pool.stats.used_bytes == before
    pool.allocate(8 * PAGE).close()


def test_an_exception_of_the_callback_arrives_as_itself(supplier: Any, pool: growpool.Pool) -> None:
    class Own(Exception):
        pass

    supplier.error = Own("mine")
    with pytest.raises(Own, match="mine"):
        pool.allocate(PAGE)
    with pool.growable(4 * PAGE) as growable, pytest.raises(Own, match="mine"):
        growable.resize(PAGE)
    with pool.range(4 * PAGE) as range_, pytest.raises(Own, match="mine"):
        range_.commit_many([(0, PAGE), (2 * PAGE, PAGE)])
    supplier.error = None
    assert pool.stats.physical_bytes == 0
    pool.allocate(PAGE).close()


def test_trim_in_the_background_and_drain(lab: Lab, pool: growpool.Pool, supplier: Any) -> None:
    stream = lab.stream()
    buffer = pool.allocate(4 * PAGE, stream=stream)
    buffer.fill(3)
    buffer.close()
    assert pool.trim(wait=False) == 4 * PAGE
    pool.drain()
    assert pool.stats.physical_bytes == 0 == supplier.bytes_out


def test_lowering_the_limit_gives_back_what_is_idle(lab: Lab, pool: growpool.Pool) -> None:
    keep, go = pool.allocate(PAGE), pool.allocate(3 * PAGE)
    go.fill(1)
    go.close()
    result = pool.set_limit(PAGE)
    assert result.overage_bytes == 3 * PAGE
    pool.drain()
    pool.trim()
    assert pool.stats.physical_bytes == PAGE
    keep.close()


def test_a_stream_is_forgotten_before_it_ends(lab: Lab, pool: growpool.Pool) -> None:
    stream = lab.stream()
    buffer = pool.allocate(PAGE, stream=stream)
    buffer.fill(5)
    pool.forget_stream(stream)
    with pytest.raises(ValueError, match="forgotten"):
        buffer.fill(6)
    got = bytearray(PAGE)
    buffer.copy_to(got, lab.stream())  # the fill was waited for
    assert not lab.has_contents or got == b"\x05" * PAGE
    buffer.close()


# ---- growables ----


def test_a_growable_grows_in_place_and_shrinks_at_the_tail(
    lab: Lab, supplier: Any, pool: growpool.Pool
) -> None:
    stream = lab.stream()
    with pool.growable(64 * PAGE, stream=stream) as growable:
        address = growable.handle
        size = PAGE
        growable.resize(size)
        growable.fill(0)
        for step in range(1, 6):
            size *= 2
            growable.resize(size)
            assert growable.handle == address
            with growable.view(size // 2, offset=size // 2) as view:
                view.fill(step)
        runs = [(0, PAGE)] + [(step, PAGE << (step - 1)) for step in range(1, 6)]
        expect(lab, growable, *runs)
        assert growable.physical_bytes == size == supplier.bytes_out
        result = growable.resize(5 * PAGE)
        assert (result.released_bytes, result.kept_bytes) == (27 * PAGE, 0)
        expect(lab, growable, (0, PAGE), (1, PAGE), (2, 2 * PAGE), (3, PAGE))
        assert growable.physical_bytes == 5 * PAGE == supplier.bytes_out
        growable.resize(64 * PAGE)
        with growable.view(4 * PAGE) as view:
            expect(lab, view, (0, PAGE), (1, PAGE), (2, 2 * PAGE))
    pool.trim()  # views may have had users that growpool did not see
    assert pool.stats.physical_bytes == 0


def test_a_cut_through_a_chunk_keeps_it_and_says_so(lab: Lab, supplier: Any) -> None:
    with supplier.pool() as pool, pool.growable(64 * PAGE) as growable:
        growable.resize(8 * PAGE)
        assert len(supplier.out) == 1
        growable.fill(9)
        result = growable.resize(3 * PAGE)
        assert (result.released_bytes, result.kept_bytes) == (0, 5 * PAGE)
        assert growable.physical_bytes == 8 * PAGE
        expect(lab, growable, (9, 3 * PAGE))
        growable.resize(8 * PAGE)
        assert len(supplier.out) == 1
        with growable.view(3 * PAGE) as view:
            expect(lab, view, (9, 3 * PAGE))
        assert growable.resize(0).released_bytes == 8 * PAGE


def test_a_failed_resize_changes_nothing(lab: Lab, supplier: Any) -> None:
    with (
        supplier.pool(chunk_size=PAGE, limit=4 * PAGE) as pool,
        pool.growable(9 * PAGE) as growable,
    ):
        growable.resize(3 * PAGE)
        growable.fill(4)
        with pytest.raises(growpool.LimitExceededError):
            growable.resize(5 * PAGE)
        assert growable.size == 3 * PAGE == growable.physical_bytes == supplier.bytes_out
        expect(lab, growable, (4, 3 * PAGE))
        growable.resize(4 * PAGE)


@pytest.mark.parametrize("raises", [False, True], ids=["refused", "raised"])
def test_contents_survive_a_growth_that_fails_at_any_chunk(
    lab: Lab, supplier: Any, pool: growpool.Pool, raises: bool
) -> None:
    class Own(Exception):
        pass

    expected = Own if raises else growpool.OutOfMemoryError
    with pool.growable(8 * PAGE, stream=lab.stream()) as growable:
        growable.resize(2 * PAGE)
        growable.fill(1)
        supplier.error = Own() if raises else None
        for given in range(4):
            supplier.allowed = given
            with pytest.raises(expected):
                growable.resize(6 * PAGE)
            assert growable.size == 2 * PAGE == supplier.bytes_out == growable.physical_bytes
            expect(lab, growable, (1, 2 * PAGE))
        supplier.error = supplier.allowed = None
        growable.resize(6 * PAGE)
        with growable.view(2 * PAGE) as view:
            expect(lab, view, (1, 2 * PAGE))


@pytest.mark.parametrize("end", ["shrink", "decommit", "close", "close the pool"])
def test_queued_work_is_waited_for_before_memory_goes(lab: Lab, supplier: Any, end: str) -> None:
    with supplier.pool(chunk_size=PAGE) as pool:
        first, second = lab.stream(), lab.stream()
        growable = pool.growable(16 * PAGE, stream=first)
        growable.resize(16 * PAGE)
        sparse = pool.range(16 * PAGE, stream=first)
        sparse.commit(0, 16 * PAGE)
        for memory in (growable, sparse):
            memory.record_stream(second)
            for round_ in range(8):
                memory.view(16 * PAGE).fill(7, (first, second)[round_ % 2])
        if end == "shrink":
            assert growable.resize(PAGE).released_bytes == 15 * PAGE
            expect(lab, growable, (7, PAGE))
        elif end == "decommit":
            assert sparse.decommit(0, 15 * PAGE).released_bytes == 15 * PAGE
            with sparse.view(PAGE, offset=15 * PAGE) as view:
                expect(lab, view, (7, PAGE))
        elif end == "close":
            growable.close()
            sparse.close(second)
            pool.trim()
            assert pool.stats.physical_bytes == 0
    assert supplier.out == []


# ---- ranges ----


def test_a_range_is_sparse_and_its_rules_are_idempotent(
    lab: Lab, supplier: Any, pool: growpool.Pool
) -> None:
    with pool.range(100 * PAGE, stream=lab.stream()) as range_:
        assert range_.commit(10 * PAGE, 4 * PAGE) == 4 * PAGE
        assert range_.commit(12 * PAGE, 4 * PAGE) == 2 * PAGE
        assert range_.commit(10 * PAGE, 6 * PAGE) == 0
        assert range_.committed == [(10 * PAGE, 6 * PAGE)]
        with range_.view(6 * PAGE, offset=10 * PAGE) as view:
            view.fill(6)
        result = range_.decommit(12 * PAGE, PAGE)
        assert (result.released_bytes, result.kept_bytes) == (PAGE, 0)
        assert range_.decommit(12 * PAGE, PAGE).released_bytes == 0
        assert range_.decommit(50 * PAGE, 10 * PAGE).released_bytes == 0
        assert range_.committed == [(10 * PAGE, 2 * PAGE), (13 * PAGE, 3 * PAGE)]
        for offset, size in range_.committed:
            with range_.view(size, offset=offset) as view:
                expect(lab, view, (6, size))
        assert range_.physical_bytes == 5 * PAGE == supplier.bytes_out


def test_bulk_forms_are_all_or_nothing(lab: Lab, supplier: Any) -> None:
    with supplier.pool(chunk_size=PAGE, limit=10 * PAGE) as pool, pool.range(99 * PAGE) as range_:
        every_third = [(i * 3 * PAGE, PAGE) for i in range(10)]
        assert range_.commit_many(every_third) == 10 * PAGE
        with pytest.raises(growpool.LimitExceededError):
            range_.commit_many([(1 * PAGE, PAGE), (4 * PAGE, PAGE)])
        assert range_.committed == every_third
        waits = pool.stats.wait_count
        stream = lab.stream()
        range_.record_stream(stream)
        with range_.view(PAGE) as view:
            view.fill(1, stream)
        assert range_.decommit_many(every_third).released_bytes == 10 * PAGE
        assert pool.stats.wait_count <= waits + 2  # one fence, and one for unknown users
        assert range_.committed == [] and supplier.bytes_out == 0


# ---- exports ----


@pytest.mark.parametrize("kind", ["buffer", "growable", "range"])
def test_exports_pin(lab: Lab, pool: growpool.Pool, kind: str) -> None:
    stream = lab.stream()
    if kind == "buffer":
        memory: Any = pool.allocate(2 * PAGE, stream=stream)
    elif kind == "growable":
        memory = pool.growable(8 * PAGE, stream=stream)
        memory.resize(2 * PAGE)
    else:
        memory = pool.range(8 * PAGE, stream=stream)
        memory.commit(0, 2 * PAGE)
    view = memory.view((PAGE // 4,), "float32", offset=PAGE)
    assert view.handle == memory.handle + PAGE and view.nbytes == PAGE
    for refused in [memory.close, pool.close]:
        with pytest.raises(BufferError):
            refused()
    if kind == "growable":
        with pytest.raises(BufferError):
            memory.resize(PAGE)
        memory.resize(4 * PAGE)  # growing is fine
    if kind == "range":
        with pytest.raises(BufferError):
            memory.decommit(PAGE, PAGE)
        memory.decommit(0, PAGE)  # so is what is not exported
    view.fill(3)
    expect(lab, view, (3, PAGE))
    view.close()
    memory.close()
    pool.trim()
    pool.drain()
    assert pool.stats.physical_bytes == 0


@pytest.mark.parametrize("order", list(itertools.permutations(["object", "export", "pool"])))
def test_dropping_in_every_order_gives_everything_back(
    lab: Lab, supplier: Any, order: tuple[str, ...]
) -> None:
    pool = supplier.pool(chunk_size=PAGE)
    held: dict[str, Any] = {"pool": pool, "object": pool.allocate(PAGE)}
    held["export"] = held["object"].__dlpack__(max_version=(1, 0))
    del pool
    for name in order:
        assert len(supplier.out) == 1
        held.pop(name)
    # Users that nobody saw keep the memory until the next explicit call, of any pool of the device.
    with supplier.pool() as other:
        while supplier.out:
            other.trim()


# ---- copies ----


def test_copies_between_blocks_and_streams(lab: Lab, pool: growpool.Pool) -> None:
    first, second = lab.stream(), lab.stream()
    a = pool.allocate(PAGE, stream=first)
    b = pool.allocate(2 * PAGE, stream=second)
    a.fill(1)
    b.fill(2)
    expect(lab, a, (1, PAGE))  # waits for it
    b.copy_from(a, offset=PAGE // 2)
    expect(lab, b, (2, PAGE // 2), (1, PAGE), (2, PAGE // 2))
    with pytest.raises(ValueError, match=str(2 * PAGE)):
        a.copy_from(b)
    a.close()
    b.close()


# ---- chunks that are shared ----


def test_a_chunk_is_shared_by_descriptor(lab: Lab) -> None:
    import os

    chunk = growpool.Chunk.create(PAGE, lab.device, handle_type="posix_fd")
    fd = chunk.export_fd()
    twin = growpool.Chunk.from_fd(fd, PAGE, lab.device)
    os.close(fd)
    kept: list[growpool.Chunk] = []

    def pool_of(one: growpool.Chunk) -> growpool.Pool:
        return growpool.Pool(lab.device, alloc=lambda *_: one, free=lambda c, *_: kept.append(c))

    with pool_of(chunk) as mine, pool_of(twin) as theirs:
        here, there = mine.allocate(PAGE), theirs.allocate(PAGE)
        here.fill(8)
        expect(lab, here, (8, PAGE))  # waits
        expect(lab, there, (8, PAGE))
        there.fill(9)
        expect(lab, there, (9, PAGE))
        expect(lab, here, (9, PAGE))
    assert kept == [twin, chunk]
    chunk.close()
    twin.close()


def test_a_pool_is_its_own_peer(lab: Lab, supplier: Any) -> None:
    with supplier.pool(peers=[lab.device]) as pool:
        buffer = pool.allocate(PAGE)
        buffer.fill(1)
        expect(lab, buffer, (1, PAGE))
        buffer.close()


# ---- what can be seen ----


def test_a_snapshot_shows_ranges_chunk_by_chunk(lab: Lab, supplier: Any) -> None:
    with supplier.pool() as pool, pool.range(16 * PAGE, stream=lab.stream()) as range_:
        range_.commit(2 * PAGE, 4 * PAGE)
        range_.commit(10 * PAGE, PAGE)
        range_.decommit(3 * PAGE, PAGE)
        block = pool.allocate(PAGE)
        snapshot = pool.snapshot()
        (segment,) = (s for s in snapshot["segments"] if s["address"] == range_.handle)
        assert segment["bytes"] == 16 * PAGE
        states = [(span["state"], span["bytes"] // PAGE) for span in segment["spans"]]
        assert states == [
            ("hole", 2),
            ("used", 1),
            ("free", 1),
            ("used", 2),
            ("hole", 4),
            ("used", 1),
            ("hole", 5),
        ]
        assert all(span["owners"] == 1 for span in segment["spans"] if span["state"] == "used")
        inside = [
            (chunk["address"] - range_.handle, chunk["bytes"])
            for chunk in snapshot["chunks"]
            if 0 <= chunk["address"] - range_.handle < 16 * PAGE
        ]
        assert inside == [(2 * PAGE, 4 * PAGE), (10 * PAGE, PAGE)]
        assert sum(chunk["bytes"] for chunk in snapshot["chunks"]) == pool.stats.physical_bytes
        stats = pool.stats
        assert stats.used_bytes == 5 * PAGE and stats.free_bytes == stats.physical_bytes - 5 * PAGE
        block.close()
        assert sum(s["bytes"] for s in pool.snapshot()["segments"]) == stats.address_bytes


def test_addresses_are_accounted_and_run_out_by_name(lab: Lab, supplier: Any) -> None:
    with supplier.pool(address_space=8 * PAGE, chunk_size=PAGE) as pool:
        growable, range_ = pool.growable(100 * PAGE), pool.range(200 * PAGE)
        assert pool.stats.address_bytes == 300 * PAGE  # none for blocks before the first
        block = pool.allocate(5 * PAGE)
        assert pool.stats.address_bytes == 308 * PAGE
        impossible = [
            lambda: pool.allocate(5 * PAGE),
            lambda: pool.malloc(9 * PAGE),
            lambda: pool.growable(1 << 60),
            lambda: pool.range(1 << 60),
        ]
        for call in impossible:
            with pytest.raises(growpool.AddressSpaceError, match="addresses, not memory"):
                call()
        assert pool.stats.address_bytes == 308 * PAGE
        assert pool.stats.physical_bytes == 5 * PAGE == supplier.bytes_out
        block.close()
        pool.allocate(8 * PAGE).close()  # what idle memory holds is no reason to refuse
        growable.close()
        range_.close()
        gives_addresses_back(pool, down_to=8 * PAGE)
    assert pool.stats.address_bytes == 0


# ---- many ----


def test_many_pools_and_ranges(lab: Lab, supplier: Any) -> None:
    pools = [supplier.pool(name=f"pool {i}") for i in range(50)]
    blocks = [[pool.malloc(512) for _ in range(20)] for pool in pools]
    ranges = [pool.range("1 GiB") for pool in pools]
    for i, range_ in enumerate(ranges):
        range_.commit(i * PAGE, PAGE)
        assert range_.committed == [(i * PAGE, PAGE)]
    for pool, addresses in zip(pools, blocks, strict=True):
        for address in addresses:
            pool.free(address)
    for pool in pools:
        pool.close()
        assert pool.stats.address_bytes == 0
    assert all(range_.is_closed for range_ in ranges)


def test_closing_a_pool_closes_what_it_gave(lab: Lab, supplier: Any) -> None:
    pool = supplier.pool()
    stream = lab.stream()
    buffer = pool.allocate(PAGE, stream=stream)
    growable = pool.growable(8 * PAGE, stream=stream)
    growable.resize(3 * PAGE)
    range_ = pool.range(8 * PAGE, stream=stream)
    range_.commit(4 * PAGE, PAGE)
    for memory in (buffer, growable):
        memory.fill(1)
    pool.close()
    assert buffer.is_closed and growable.is_closed and range_.is_closed
    assert supplier.out == []
    for call in (lambda: growable.resize(0), lambda: range_.commit(0, PAGE), buffer.view):
        with pytest.raises((growpool.PoolStateError, TypeError)):
            call()
    buffer.close()
    growable.close()
    range_.close()
