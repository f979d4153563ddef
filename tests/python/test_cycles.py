# SPDX-License-Identifier: Apache-2.0
"""Cycles and finalisers: all is collected, each chunk freed once, and free sees its closure whole.

Finalisers only queue: free runs on growpool's delivery thread, so the tests wait for it.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import growpool
import pytest
from helpers import PAGE, Supplier, eventually

Pool = growpool.Pool


@pytest.fixture(autouse=True)
def eager_collector() -> Iterator[None]:
    """Collect at almost every allocation."""
    before = gc.get_threshold()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)


class Ledger(Supplier):
    """Also checks that no garbage collection runs free."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.collecting = threading.local()
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        self.collecting.now = phase == "start"

    def free(self, chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
        if getattr(self.collecting, "now", False):
            self.problems.append("free ran inside a garbage collection")
        super().free(chunk, size, device, stream)

    def done(self) -> None:
        """Everything came back once, and nothing was odd."""
        gc.collect()
        eventually(lambda: self.given and self.taken == self.given)
        assert self.out == []
        assert self.problems == []
        gc.callbacks.remove(self._note)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def test_a_dropped_pool_gives_its_chunks_back(ledger: Ledger) -> None:
    pool = Pool("host", backing=ledger, chunk_size=PAGE)
    pool.malloc(3 * PAGE)
    dead = weakref.ref(pool)
    del pool
    assert dead() is None
    ledger.done()
    assert ledger.given == 3


def test_a_closure_that_refers_to_its_pool(ledger: Ledger) -> None:
    def build() -> weakref.ref[Pool]:
        box: list[Any] = []

        def alloc(size: int, device: int, stream: int) -> growpool.Chunk | None:
            assert box[0] is not None
            return ledger.alloc(size, device, stream)

        def free(chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
            if not (box and isinstance(box[0], Pool) and box[1] == "intact"):
                ledger.problems.append(f"the closure was taken apart: {box}")
            ledger.free(chunk, size, device, stream)

        box.extend([Pool("host", alloc=alloc, free=free, chunk_size=PAGE), "intact"])
        box[0].malloc(2 * PAGE)
        return weakref.ref(box[0])

    dead = build()
    ledger.done()
    eventually(lambda: gc.collect() >= 0 and dead() is None)
    assert ledger.given == 2


def test_a_pool_that_is_an_attribute_of_its_backing(ledger: Ledger) -> None:
    class Backing:
        def __init__(self) -> None:
            self.pool = Pool("host", backing=self)

        def alloc(self, size: int, device: int, stream: int) -> growpool.Chunk | None:
            return ledger.alloc(size, device, stream)

        def free(self, chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
            if not isinstance(self.pool, Pool):
                ledger.problems.append("the backing was taken apart")
            ledger.free(chunk, size, device, stream)

    backing = Backing()
    backing.pool.malloc(1000)
    dead = weakref.ref(backing)
    del backing
    ledger.done()
    eventually(lambda: gc.collect() >= 0 and dead() is None)


@pytest.mark.parametrize("buffer_first", [False, True])
def test_pool_and_buffer_and_callback_in_one_cycle(ledger: Ledger, buffer_first: bool) -> None:
    class Node:
        pass

    def build() -> list[weakref.ref[Any]]:
        node: Any = Node()
        if buffer_first:
            node.first = node

        def alloc(size: int, device: int, stream: int) -> growpool.Chunk | None:
            assert node is not None
            return ledger.alloc(size, device, stream)

        def free(chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
            if not hasattr(node, "buffer"):
                ledger.problems.append("the node was taken apart")
            ledger.free(chunk, size, device, stream)

        node.pool = Pool("host", alloc=alloc, free=free)
        node.buffer = node.pool.allocate(1000)
        return [weakref.ref(node), weakref.ref(node.buffer), weakref.ref(node.pool)]

    dead = build()
    ledger.done()
    eventually(lambda: gc.collect() >= 0 and all(reference() is None for reference in dead))


def test_a_live_export_in_the_cycle(ledger: Ledger) -> None:
    class Node:
        pass

    def build() -> weakref.ref[Any]:
        node: Any = Node()
        node.me = node
        node.pool = Pool("host", backing=ledger)
        node.buffer = node.pool.allocate(1000)
        node.view = memoryview(node.buffer)
        node.view[:] = b"x" * 1000
        return weakref.ref(node)

    dead = build()
    ledger.done()
    assert dead() is None


def test_an_export_that_free_itself_refers_to_keeps_the_pool() -> None:
    """Such a pool stays until the export is released; nothing is unmapped under it meanwhile.

    free needs the closure, the closure holds the export, and the export pins the memory.
    """
    books = Supplier()
    box: dict[str, Any] = {}

    def build() -> None:
        mine = box

        def free(chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
            assert mine is not None
            books.free(chunk, size, device, stream)

        box["pool"] = Pool("host", alloc=books.alloc, free=free)
        box["view"] = memoryview(box["pool"].allocate(1000))
        del box["pool"]

    build()
    gc.collect()
    assert books.taken == 0
    box["view"][:] = b"x" * 1000
    box.pop("view").release()
    eventually(lambda: gc.collect() >= 0 and books.out == [])


def test_a_cycle_through_a_caching_backing(ledger: Ledger) -> None:
    def build() -> weakref.ref[Any]:
        box: list[Any] = []

        class Inner:
            def alloc(self, size: int, device: int, stream: int) -> growpool.Chunk | None:
                return ledger.alloc(size, device, stream)

            def free(self, chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
                if len(box) != 2:
                    ledger.problems.append("the closure was taken apart")
                ledger.free(chunk, size, device, stream)

        caching = growpool.CachingBacking(Inner(), keep="1 GiB")
        box.extend([caching, Pool("host", backing=caching, chunk_size=PAGE)])
        box[1].allocate(2 * PAGE).close()
        box[1].trim()
        box[1].allocate(PAGE)
        return weakref.ref(box[1])

    dead = build()
    ledger.done()
    eventually(lambda: gc.collect() >= 0 and dead() is None)


def test_bound_methods_keep_their_object_alive() -> None:
    ledger = Ledger()
    pool = Pool("host", alloc=ledger.alloc, free=ledger.free)
    pool.malloc(1000)
    books = ledger.calls
    gc.callbacks.remove(ledger._note)
    del ledger
    gc.collect()
    pool.trim()
    del pool
    eventually(lambda: [call[0] for call in books] == ["alloc", "free"])


def test_a_buffer_outlives_every_other_reference_to_its_pool(ledger: Ledger) -> None:
    buffer = Pool("host", backing=ledger).allocate(1000)
    gc.collect()
    memoryview(buffer)[:] = b"x" * 1000
    assert ledger.taken == 0
    del buffer
    ledger.done()


def test_a_resurrected_pool_says_that_it_is_closed(ledger: Ledger) -> None:
    saved: list[Any] = []

    class Phoenix:
        def __init__(self, pool: Pool) -> None:
            self.pool = pool
            self.me = self

        def __del__(self) -> None:
            saved.append(self.pool)

    pool = Pool("host", backing=ledger, name="phoenix")
    buffer = pool.allocate(1000)
    bird: Any = Phoenix(pool)
    bird.buffer = buffer
    del pool, buffer, bird
    gc.collect()
    eventually(lambda: saved)
    (pool,) = saved
    # Whether the pool's own finaliser ran before it was saved is the collector's choice; either
    # way it works or says that it is closed, and nothing is lost.
    if pool.is_closed:
        with pytest.raises(growpool.PoolStateError):
            pool.malloc(1)
    else:
        pool.free(pool.malloc(1))
    saved.clear()
    del pool
    ledger.done()


def test_dropping_a_pool_inside_a_lock_runs_no_callback_there(ledger: Ledger) -> None:
    """A collection inside `with lock` must not run a free that wants the lock."""
    lock = threading.Lock()

    def free(chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
        with lock:
            ledger.free(chunk, size, device, stream)

    for _ in range(20):
        box: list[Any] = []
        box.append(Pool("host", alloc=ledger.alloc, free=free))
        box.append(box)
        box[0].malloc(1000)
        with lock:
            del box
            gc.collect()
    ledger.done()


def test_chunks_that_nobody_keeps_are_released(sim: Any) -> None:
    for _ in range(10):
        growpool.Chunk.create(PAGE, sim.device)
    assert sim.state.unreleased_count == 0
    pool = Pool(sim.device, chunk_size=PAGE)
    pool.malloc(4 * PAGE)
    assert sim.state.unreleased_count == 4
    del pool
    eventually(lambda: sim.state.unreleased_count == 0)
    eventually(lambda: sim.state.reservation_count == 0)


def test_a_pool_waits_for_its_streams_after_it_was_dropped(ledger: Ledger) -> None:
    release = threading.Event()
    stream = growpool.host.Stream()
    pool = Pool("host", backing=ledger)
    buffer = pool.allocate(PAGE, stream=stream)
    address = buffer.handle

    def work() -> None:
        import ctypes

        assert release.wait(20)
        ctypes.memset(address, 1, PAGE)

    stream.submit(work)
    del buffer, pool
    gc.collect()
    assert ledger.taken == 0
    release.set()
    stream.synchronize()
    ledger.done()


def test_callables_are_let_go_after_the_last_chunk() -> None:
    class Callback:
        def __init__(self, function: Callable[..., Any]) -> None:
            self.function = function

        def __call__(self, *args: Any) -> Any:
            return self.function(*args)

    books = Supplier()
    alloc, free = Callback(books.alloc), Callback(books.free)
    dead = [weakref.ref(alloc), weakref.ref(free)]
    pool = Pool("host", alloc=alloc, free=free)
    pool.malloc(1000)
    del alloc, free
    pool.close()
    del pool
    eventually(lambda: all(reference() is None for reference in dead))


def test_nothing_leaks_over_many_pools() -> None:
    books = Supplier()

    def round_trip() -> None:
        with Pool("host", backing=books) as pool:
            pool.allocate(1000)
            pool.malloc(1000)

    for _ in range(5):
        round_trip()
    gc.collect()
    before = sys.getrefcount(books), sys.getrefcount(Pool), len(gc.get_objects())
    for _ in range(50):
        round_trip()
    gc.collect()
    after = sys.getrefcount(books), sys.getrefcount(Pool), len(gc.get_objects())
    assert after[0] == before[0]
    assert after[1] == before[1]
    assert after[2] - before[2] < 25
