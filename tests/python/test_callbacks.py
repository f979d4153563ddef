# SPDX-License-Identifier: Apache-2.0
"""The callback contract: what callbacks may do and what they are given.

What becomes of callbacks that misbehave is asserted in test_misbehaviour.py and
test_misbehaving_free.py, the order of what a pool tries in test_ladder.py.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import growpool
import pytest
from helpers import PAGE, Supplier

Pool = growpool.Pool
Chunk = growpool.Chunk


def make(alloc: Callable[..., Any], supplier: Supplier, **options: Any) -> Pool:
    return Pool("host", alloc=alloc, free=supplier.free, name="odd", **options)


def test_free_gets_the_very_object_that_alloc_gave() -> None:
    """Though nobody but the pool keeps it; what free forgets is gone."""
    given: list[weakref.ref[Chunk]] = []
    taken: list[int] = []

    def alloc(size: int, device: int, stream: int) -> Chunk:
        chunk = Chunk.create(size, device)
        given.append(weakref.ref(chunk))
        return chunk

    def free(chunk: Chunk, size: int, device: int, stream: int) -> None:
        taken.append(sum(chunk is reference() for reference in given))

    with Pool("host", alloc=alloc, free=free, chunk_size=PAGE) as pool:
        pool.allocate(4 * PAGE)
        gc.collect()
        assert None not in [reference() for reference in given]
    gc.collect()
    assert taken == [1] * 4
    assert [reference() for reference in given] == [None] * 4


def test_what_callbacks_may_do(supplier: Supplier) -> None:
    with Pool("host", name="other") as other:
        dropped: list[growpool.Buffer] = []

        def alloc(size: int, device: int, stream: int) -> Chunk | None:
            other.allocate(1000)  # another pool grows
            dropped.clear()  # buffers of this pool are freed
            gc.collect()
            assert pool.stats.used_bytes == 0
            assert repr(pool)
            assert pool.set_limit("1 GiB").limit == 1 << 30
            return supplier.alloc(size, device, stream)

        with make(alloc, supplier) as pool:
            dropped.append(pool.allocate(1000))
            pool.allocate(8 * PAGE)
            assert supplier.given == 3  # in two chunks, for the pool had free memory


def test_small_blocks_are_served_inside_a_callback_without_growing(supplier: Supplier) -> None:
    got: list[int] = []

    def alloc(size: int, device: int, stream: int) -> Chunk | None:
        if supplier.given >= 2:
            got.append(pool.malloc(512))
            pool.free(got[-1])
        return supplier.alloc(size, device, stream)

    with make(alloc, supplier, chunk_size=PAGE) as pool:
        first = pool.allocate(PAGE // 2)
        second = pool.allocate(PAGE)
        first.close()
        pool.allocate(8 * PAGE)
        assert got != []
        del second


def test_callbacks_run_detached_from_growpools_locks(supplier: Supplier) -> None:
    """While one thread sits in alloc, another uses the pool."""
    inside, leave = threading.Event(), threading.Event()

    def alloc(size: int, device: int, stream: int) -> Chunk | None:
        if size >= 8 * PAGE:
            inside.set()
            assert leave.wait(20)
        return supplier.alloc(size, device, stream)

    with make(alloc, supplier) as pool:
        thread = threading.Thread(target=lambda: pool.free(pool.malloc(32 * PAGE)))
        thread.start()
        assert inside.wait(20)
        other = pool.allocate(1000)
        other.close()
        assert pool.stats.used_bytes == 0
        assert pool.trim() >= 0
        leave.set()
        thread.join(20)
        assert not thread.is_alive()


def test_re_entry_by_way_of_another_pool(supplier: Supplier) -> None:
    """The pool is asked while its own callback is under way, however far below."""
    answers: list[str] = []

    def alloc(size: int, device: int, stream: int) -> Chunk | None:
        for call in (pool.trim, pool.drain, pool.close, lambda: pool.malloc(64 * PAGE)):
            with pytest.raises(RuntimeError, match="pool 'odd' inside its own callback") as caught:
                call()
            assert type(caught.value) is RuntimeError
            answers.append(str(caught.value))
        return supplier.alloc(size, device, stream)

    with Pool("host", alloc=alloc, free=supplier.free, name="between") as between:

        def passing(size: int, device: int, stream: int) -> Chunk | None:
            between.allocate(PAGE)
            return supplier.alloc(size, device, stream)

        with make(passing, supplier) as pool:
            pool.allocate(PAGE)
    assert len(answers) == 4


def test_a_finaliser_in_the_course_of_an_exception(sim: Any) -> None:
    """What C enters Python for while an exception is under way neither sees it nor loses it."""
    seen: list[int] = []

    class Owner:
        def __del__(self) -> None:
            seen.append(1)

    first = Chunk.create(PAGE, sim.device)
    with pytest.raises(ZeroDivisionError):
        [Chunk.from_handle(first.handle, PAGE, sim.device, owner=Owner()), 1 // len(seen)]
    assert seen == [1]
    first.close()


def test_what_a_pool_raises_inside_a_callback_of_another_comes_out_unchanged(
    supplier: Supplier,
) -> None:
    mine = ZeroDivisionError("mine")

    def raising(size: int, device: int, stream: int) -> Chunk:
        raise mine

    with make(raising, supplier) as inner:

        def alloc(size: int, device: int, stream: int) -> Chunk:
            inner.allocate(PAGE)
            raise AssertionError

        with make(alloc, supplier) as outer:
            for _ in range(2):
                with pytest.raises(ZeroDivisionError) as caught:
                    outer.allocate(PAGE)
                assert caught.value is mine
            assert (outer.stats.callback_errors, inner.stats.callback_errors) == (2, 2)
