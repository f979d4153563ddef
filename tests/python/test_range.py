# SPDX-License-Identifier: Apache-2.0
"""Ranges: sparse commits and decommits, one by one and in bulk, against a model of pages."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import growpool
import pytest
from helpers import PAGE, Supplier

Pool = growpool.Pool


def intervals_of(pages: set[int]) -> list[tuple[int, int]]:
    """The longest runs of the pages, as `committed` shows them."""
    runs: list[tuple[int, int]] = []
    for page in sorted(pages):
        if runs and sum(runs[-1]) == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return [(start * PAGE, count * PAGE) for start, count in runs]


def test_committing_and_decommitting(pool: Pool, supplier: Supplier) -> None:
    sparse = pool.range("64 GiB")
    assert (sparse.size, sparse.nbytes, sparse.granularity) == (64 << 30, 64 << 30, PAGE)
    assert (sparse.committed, sparse.committed_bytes, sparse.physical_bytes) == ([], 0, 0)
    assert sparse.commit(PAGE, 2 * PAGE) == 2 * PAGE
    assert sparse.commit("32 GiB", PAGE) == PAGE
    assert sparse.committed == [(PAGE, 2 * PAGE), (32 << 30, PAGE)]
    assert sparse.committed_bytes == 3 * PAGE == sparse.physical_bytes == supplier.out_bytes
    assert sparse.decommit(PAGE, 2 * PAGE) == (2 * PAGE, 0)
    assert sparse.committed == [(32 << 30, PAGE)]
    sparse.close()
    pool.drain()
    assert supplier.out == []
    assert sparse.committed == []


def test_both_are_idempotent(pool: Pool) -> None:
    sparse = pool.range(16 * PAGE)
    assert sparse.commit(0, 4 * PAGE) == 4 * PAGE
    sparse.fill(1)
    assert sparse.commit(0, 4 * PAGE) == 0
    assert sparse.commit(2 * PAGE, 4 * PAGE) == 2 * PAGE
    assert bytes(memoryview(sparse.view(4 * PAGE))) == b"\x01" * (4 * PAGE)
    assert sparse.commit(0, 0) == 0
    assert sparse.decommit(8 * PAGE, 8 * PAGE) == (0, 0)
    assert sparse.decommit(16 * PAGE, 0) == (0, 0)
    sparse.decommit(0, 16 * PAGE)
    assert sparse.decommit(0, 16 * PAGE) == (0, 0)
    assert sparse.committed == []


def test_cuts_keep_the_chunk(pool: Pool) -> None:
    sparse = pool.range(16 * PAGE)
    sparse.commit(0, 8 * PAGE)
    assert sparse.decommit(2 * PAGE, 2 * PAGE) == (0, 2 * PAGE)
    assert sparse.committed == [(0, 2 * PAGE), (4 * PAGE, 4 * PAGE)]
    assert (sparse.committed_bytes, sparse.physical_bytes) == (6 * PAGE, 8 * PAGE)
    assert sparse.commit(2 * PAGE, 2 * PAGE) == 2 * PAGE
    assert sparse.physical_bytes == 8 * PAGE
    assert sparse.decommit(0, 16 * PAGE) == (8 * PAGE, 0)


def test_chunk_size_makes_it_exact(supplier: Supplier) -> None:
    with Pool("host", backing=supplier, chunk_size=PAGE) as pool:
        sparse = pool.range(16 * PAGE)
        sparse.commit(0, 16 * PAGE)
        assert sparse.decommit(3 * PAGE, 5 * PAGE) == (5 * PAGE, 0)
        assert supplier.out_bytes == 11 * PAGE


def test_bulk_calls(pool: Pool) -> None:
    sparse = pool.range(64 * PAGE)
    parts = [(40 * PAGE, PAGE), (0, 2 * PAGE), (PAGE, 2 * PAGE), (40 * PAGE, PAGE)]
    assert sparse.commit_many(parts) == 4 * PAGE
    assert sparse.committed == [(0, 3 * PAGE), (40 * PAGE, PAGE)]
    assert sparse.commit_many([]) == 0
    assert sparse.commit_many(iter([[2 * PAGE, PAGE], ("6 MiB", "2 MiB")])) == PAGE
    assert sparse.decommit_many((o, s) for o, s in parts).released_bytes >= PAGE
    assert sparse.committed == [(3 * PAGE, PAGE)]
    assert sparse.decommit_many([], wait=False) == (0, 0)


def test_bulk_calls_are_all_or_nothing(supplier: Supplier) -> None:
    with Pool("host", backing=supplier, limit=8 * PAGE, chunk_size=PAGE) as pool:
        sparse = pool.range(64 * PAGE)
        sparse.commit(0, 4 * PAGE)
        with pytest.raises(growpool.LimitExceededError):
            sparse.commit_many([(i * PAGE, PAGE) for i in range(2, 60, 3)])
        with pytest.raises(ValueError):
            sparse.commit_many([(10 * PAGE, PAGE), (64 * PAGE, PAGE)])
        with pytest.raises(ValueError):
            sparse.decommit_many([(0, PAGE), (1, PAGE)])
        assert sparse.committed == [(0, 4 * PAGE)]
        assert pool.stats.physical_bytes == 4 * PAGE
        with sparse.view(1, offset=3 * PAGE), pytest.raises(BufferError):
            sparse.decommit_many([(0, PAGE), (3 * PAGE, PAGE)])
        assert sparse.committed == [(0, 4 * PAGE)]


def test_a_bulk_decommit_fences_once(sim: Any) -> None:
    stream = sim.stream()
    with Pool(sim.device, chunk_size=PAGE) as pool:
        sparse = pool.range(64 * PAGE, stream=stream)
        sparse.commit_many([(i * PAGE, PAGE) for i in range(0, 64, 2)])
        sim.launch(stream, sparse.handle, PAGE)
        sim.set_wait_completes(True)
        before = len(sim.log())
        waits = pool.stats.wait_count
        sparse.decommit_many([(i * PAGE, PAGE) for i in range(0, 64, 2)])
        records = [line for line in sim.log()[before:] if "record" in line]
        assert len(records) <= 2
        assert pool.stats.wait_count - waits <= 1
        assert sim.state.mapping_count == 0


def test_random_steps_against_a_model(supplier: Supplier) -> None:
    random.seed(7)
    with Pool("host", backing=supplier) as pool:
        sparse = pool.range(128 * PAGE)
        pages: dict[int, int] = {}
        for step in range(300):
            parts = [
                (start, random.randrange(1, min(16, 128 - start) + 1))
                for start in random.choices(range(128), k=random.choice([1, 1, 4]))
            ]
            touched = {page for start, count in parts for page in range(start, start + count)}
            given = [(start * PAGE, count * PAGE) for start, count in parts]
            if random.random() < 0.55:
                assert sparse.commit_many(given) == len(touched - pages.keys()) * PAGE
                for page in touched - pages.keys():
                    pages[page] = step % 251
                    sparse.view(8, offset=page * PAGE).fill(step % 251)
            else:
                sparse.decommit_many(given, wait=random.random() < 0.5)
                for page in touched & pages.keys():
                    del pages[page]
            assert sparse.committed == intervals_of(set(pages))
            assert sparse.committed_bytes == len(pages) * PAGE <= sparse.physical_bytes
            for page, value in pages.items():
                with memoryview(sparse.view(8, offset=page * PAGE)) as seen:
                    assert bytes(seen) == bytes([value]) * 8


def test_commit_waits_for_memory_that_is_still_in_use(sim: Any) -> None:
    """The addresses that the user wants are mapped, and another stream still works on them."""
    first, second = sim.stream(), sim.stream()
    with Pool(sim.device) as pool:
        sparse = pool.range(16 * PAGE, stream=first)
        sparse.commit(0, 8 * PAGE)
        sim.launch(first, sparse.handle, PAGE)
        sparse.decommit(0, 4 * PAGE, first, wait=False)
        sim.set_wait_completes(True)
        assert sparse.commit(0, 4 * PAGE, second) == 4 * PAGE
        assert sim.work_all() == 0


def test_a_capture_that_is_in_the_way(sim: Any) -> None:
    stream = sim.stream()
    with Pool(sim.device) as pool:
        sparse = pool.range(16 * PAGE, stream=stream)
        sparse.commit(0, 4 * PAGE)
        sim.capture_begin(stream, 0)
        with pytest.raises(growpool.CaptureError):
            sparse.decommit(0, 4 * PAGE)
        assert sparse.committed == [(0, 4 * PAGE)]
        assert sim.capture_end(stream)
        sparse.decommit(0, 4 * PAGE)


# ---- arguments ----


@pytest.mark.parametrize(
    ("offset", "size", "error"),
    [
        (1, PAGE, ValueError),
        (0, PAGE - 1, ValueError),
        (PAGE // 2, PAGE, ValueError),
        (0, 17 * PAGE, ValueError),
        (16 * PAGE, PAGE, ValueError),
        (1 << 62, PAGE, ValueError),
        (-PAGE, PAGE, ValueError),
        (0, -PAGE, ValueError),
        ("x", PAGE, ValueError),
        (0, 1 << 63, OverflowError),
        (1.5, PAGE, TypeError),
        (0, None, TypeError),
        (True, PAGE, TypeError),
        (b"0", PAGE, TypeError),
    ],
)
def test_wrong_intervals(pool: Pool, offset: Any, size: Any, error: type[Exception]) -> None:
    sparse = pool.range(16 * PAGE)
    for single in (sparse.commit, sparse.decommit):
        with pytest.raises(error):
            single(offset, size)
    for bulk in (sparse.commit_many, sparse.decommit_many):
        with pytest.raises(error):
            bulk([(0, PAGE), (offset, size)])
    assert sparse.committed == []


@pytest.mark.parametrize(
    "intervals",
    [
        None,
        7,
        [7],
        [(1,)],
        [(0, PAGE, 1)],
        ["ab"],
        [b"ab"],
        "ab",
        [None],
        {0: PAGE},
        [(0, PAGE), object()],
    ],
)
def test_wrong_lists(pool: Pool, intervals: Any) -> None:
    sparse = pool.range(16 * PAGE)
    for bulk in (sparse.commit_many, sparse.decommit_many):
        with pytest.raises(TypeError, match="interval"):
            bulk(intervals)
    assert sparse.committed == []


def test_lists_that_raise_or_change(pool: Pool) -> None:
    sparse = pool.range(16 * PAGE)

    def broken() -> Iterator[tuple[int, int]]:
        yield (0, PAGE)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sparse.commit_many(broken())

    class Clears:
        def __init__(self, victim: list[Any]) -> None:
            self.victim = victim

        def __index__(self) -> int:
            self.victim.clear()
            return PAGE

    victim: list[Any] = []
    victim += [[0, Clears(victim)], (PAGE, PAGE)]
    assert sparse.commit_many(victim) == 2 * PAGE
    inner: list[Any] = []
    inner += [4 * PAGE, Clears(inner)]
    assert sparse.commit_many([inner]) == PAGE

    class Closes:
        def __index__(self) -> int:
            sparse.close()
            return PAGE

    with pytest.raises(growpool.PoolStateError):
        sparse.commit_many([(0, Closes())])


def test_wrong_arguments(pool: Pool) -> None:
    sparse = pool.range(PAGE)
    wrong: list[Any] = [
        lambda: sparse.commit(),
        lambda: sparse.commit(0),
        lambda: sparse.commit(0, PAGE, None, True),
        lambda: sparse.commit(0, PAGE, wait=True),
        lambda: sparse.commit(0, PAGE, "stream"),
        lambda: sparse.decommit(0, PAGE, None, True),
        lambda: sparse.decommit(0, PAGE, "stream"),
        lambda: sparse.commit_many(),
        lambda: sparse.commit_many([], None, 1),
        lambda: sparse.commit_many([], object()),
        lambda: sparse.decommit_many([], None, 1),
        lambda: pool.range(1, None),
        lambda: pool.range(),
    ]
    for call in wrong:
        with pytest.raises(TypeError):
            call()


def test_after_closing(pool: Pool) -> None:
    with pool.range(4 * PAGE) as sparse:
        sparse.commit(0, PAGE)
    sparse.close()
    assert sparse.is_closed
    assert (sparse.handle, sparse.committed, sparse.committed_bytes) == (0, [], 0)
    for call in (
        lambda: sparse.commit(0, PAGE),
        lambda: sparse.decommit(0, PAGE),
        lambda: sparse.commit_many([(0, PAGE)]),
        lambda: sparse.decommit_many([(0, PAGE)]),
        lambda: sparse.fill(1),
        lambda: sparse.view(1),
    ):
        with pytest.raises(growpool.PoolStateError) as caught:
            call()
        assert caught.value.reason == "closed"
    assert "closed" in repr(sparse)


def test_an_odd_size(pool: Pool) -> None:
    sparse = pool.range(PAGE + 100)
    assert sparse.size == PAGE + 100
    assert sparse.commit(PAGE, PAGE) == PAGE
    with pytest.raises(ValueError):
        sparse.commit(2 * PAGE, PAGE)
    sparse.commit(0, PAGE)
    with memoryview(sparse) as view:
        assert view.nbytes == PAGE + 100
        view[-1] = 1


def test_the_repr(pool: Pool) -> None:
    sparse = pool.range("1 GiB")
    sparse.commit(0, PAGE)
    assert repr(sparse) == (
        f"<growpool.Range: 1.0 GiB on host at {sparse.handle:#x}, 2.0 MiB committed>"
    )


# ---- threads ----


def test_threads_on_their_own_parts(supplier: Supplier) -> None:
    with Pool("host", backing=supplier) as pool:
        sparse = pool.range(256 * PAGE)
        start = threading.Barrier(4)
        failures: list[BaseException] = []

        def work(index: int) -> None:
            try:
                start.wait(20)
                base = index * 64 * PAGE
                for step in range(60):
                    part = [(base + (step * 7 + i * 3) % 60 * PAGE, PAGE) for i in range(5)]
                    sparse.commit_many(part)
                    with sparse.view(8, offset=part[0][0]) as view:
                        view.fill(index)
                        assert bytes(memoryview(view)) == bytes([index]) * 8
                    sparse.decommit_many(part, wait=step % 2 == 0)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert sparse.committed == []


def test_the_same_part_at_once_is_busy(supplier: Supplier) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def alloc(size: int, device: int, stream: int) -> growpool.Chunk | None:
        inside.set()
        assert go_on.wait(20)
        return supplier.alloc(size, device, stream)

    with Pool("host", alloc=alloc, free=supplier.free) as pool:
        sparse = pool.range(16 * PAGE)
        thread = threading.Thread(target=sparse.commit, args=(0, 4 * PAGE))
        thread.start()
        assert inside.wait(20)
        for call in (sparse.commit, sparse.decommit):
            with pytest.raises(growpool.PoolStateError) as caught:
                call(2 * PAGE, 4 * PAGE)
            assert caught.value.reason == "busy"
        go_on.set()
        thread.join()
        assert sparse.committed == [(0, 4 * PAGE)]


def test_many_pages(supplier: Supplier) -> None:
    """A cache of pages, every second one, in one call each way."""
    with Pool("host", backing=supplier, chunk_size=PAGE) as pool:
        sparse = pool.range("16 GiB")
        pages = [(i * PAGE, PAGE) for i in range(0, 4000, 2)]
        assert sparse.commit_many(pages) == 2000 * PAGE
        assert sparse.committed == pages
        assert sparse.decommit_many(pages) == (2000 * PAGE, 0)
