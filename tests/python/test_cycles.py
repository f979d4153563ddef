# SPDX-License-Identifier: Apache-2.0
"""Cycles and finalisers: all is collected, each chunk freed once, and free sees its closure whole.

Finalisers only queue: free runs on growpool's delivery thread, so the tests wait for it.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import growpool
import pytest
from cycles_kit import Ledger, eager_collector, ledger
from helpers import PAGE, Supplier, eventually

__all__ = ["eager_collector", "ledger"]  # fixtures

Pool = growpool.Pool


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


class Node:
    """Something to hang references on, with a finaliser of its own."""

    def __init__(self) -> None:
        self.deleted = 0

    def __del__(self) -> None:
        self.deleted += 1


def make_function(node: Any, pool_first: bool, ledger: Ledger) -> tuple[Any, Any]:
    def alloc(size: int, device: int, stream: int) -> growpool.Chunk | None:
        assert node is not None
        return ledger.alloc(size, device, stream)

    def free(chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
        check_node(node, ledger)
        ledger.free(chunk, size, device, stream)

    return alloc, free


def make_lambda(node: Any, pool_first: bool, ledger: Ledger) -> tuple[Any, Any]:
    return (
        lambda *args: ledger.alloc(*args) if node else None,
        lambda *args: check_node(node, ledger) or ledger.free(*args),
    )


def make_methods(node: Any, pool_first: bool, ledger: Ledger) -> tuple[Any, Any]:
    class Supplies:
        def __init__(self) -> None:
            self.node = node

        def alloc(self, *args: int) -> growpool.Chunk | None:
            return ledger.alloc(*args)

        def free(self, *args: Any) -> None:
            check_node(self.node, ledger)
            ledger.free(*args)

    supplies = node.supplies = Supplies()
    return supplies.alloc, supplies.free


def make_class_methods(node: Any, pool_first: bool, ledger: Ledger) -> tuple[Any, Any]:
    methods = make_methods(node, pool_first, ledger)
    cls = type(methods[0].__self__)
    cls.node = node
    cls.shared_alloc, cls.shared_free = classmethod(cls.alloc), classmethod(cls.free)
    return cls.shared_alloc, cls.shared_free


def make_partials(node: Any, pool_first: bool, ledger: Ledger) -> tuple[Any, Any]:
    def free(node: Any, *args: Any, ledger: Ledger) -> None:
        check_node(node, ledger)
        ledger.free(*args)

    def alloc(node: Any, *args: Any) -> growpool.Chunk | None:
        return ledger.alloc(*args)

    return partial(alloc, node), partial(free, node, ledger=ledger)


def make_callables(node: Any, pool_first: bool, ledger: Ledger) -> tuple[Any, Any]:
    class Callable:
        def __init__(self, function: Any) -> None:
            self.function, self.node = function, node

        def __call__(self, *args: Any) -> Any:
            if self.function == ledger.free:
                check_node(self.node, ledger)
            return self.function(*args)

    return Callable(ledger.alloc), Callable(ledger.free)


def check_node(node: Any, ledger: Ledger) -> None:
    if not (isinstance(node.pool, Pool) and hasattr(node, "thing")) or node.me is not node:
        ledger.problems.append("the node was taken apart")


MAKERS = [make_function, make_lambda, make_methods, make_class_methods, make_partials]
MAKERS.append(make_callables)
THINGS: dict[str, Callable[[Pool], Any]] = {
    "nothing else": lambda pool: None,
    "a buffer": lambda pool: pool.allocate(1000),
    "an address": lambda pool: pool.malloc(1000),
    "a growable": lambda pool: resized(pool.growable("1 GiB")),
    "a range": lambda pool: committed(pool.range("1 GiB")),
    "a closed view": lambda pool: closed(pool.allocate(1000).view((9,), "uint8")),
    "another pool": lambda pool: Pool("host", backing=growpool.DeviceBacking()).allocate(9),
    "a stream that owns memory": lambda pool: pool.allocate(9, stream=growpool.host.Stream()),
    "the chunks": lambda pool: (pool.malloc(9), gc.get_referents(pool)),
}


def resized(growable: growpool.Growable) -> growpool.Growable:
    growable.resize(3 * PAGE)
    return growable


def committed(sparse: growpool.Range) -> growpool.Range:
    sparse.commit(PAGE, 2 * PAGE)
    return sparse


def closed(view: growpool.View) -> growpool.View:
    view.close()
    return view


@pytest.mark.parametrize(
    ("make", "thing", "pool_first"),
    [(make, "a buffer", first) for make in MAKERS for first in (False, True)]
    + [(make_function, thing, False) for thing in THINGS if thing != "a buffer"],
)
def test_pool_and_callback_in_one_cycle_with(
    ledger: Ledger, make: Any, thing: str, pool_first: bool
) -> None:
    """The order of the objects in the collector's list is the order of their making."""

    def build() -> list[weakref.ref[Any]]:
        node: Any = Node()
        node.me = node
        if pool_first:
            box: list[Any] = []
            node.pool = Pool(
                "host",
                alloc=lambda *args: box[0](*args),
                free=lambda *args: box[1](*args),
                chunk_size=PAGE,
            )
            box += make(node, pool_first, ledger)
        else:
            alloc, free = make(node, pool_first, ledger)
            node.pool = Pool("host", alloc=alloc, free=free, chunk_size=PAGE)
        node.thing = THINGS[thing](node.pool)
        node.pool.malloc(3 * PAGE)
        return [weakref.ref(node), weakref.ref(node.pool)]

    dead = build()
    ledger.done()
    eventually(lambda: gc.collect() >= 0 and all(reference() is None for reference in dead))


def test_a_live_export_in_the_cycle(ledger: Ledger) -> None:
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


EXPORTS: dict[str, Callable[[growpool.Buffer], Any]] = {
    "memoryview": lambda buffer: memoryview(buffer),
    "View": lambda buffer: buffer.view((1000,), "uint8"),
    "DLPack capsule": lambda buffer: buffer.__dlpack__(),
}


@pytest.mark.parametrize("kind", EXPORTS)
def test_an_export_that_free_itself_refers_to_keeps_the_pool(kind: str) -> None:
    """Such a pool stays until the export is released; nothing is unmapped under it meanwhile.

    free needs the closure, the closure holds the export, and the export pins the memory.
    """
    books = Supplier()
    box: dict[str, Any] = {}

    def build() -> int:
        mine = box

        def free(chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
            assert mine is not None
            books.free(chunk, size, device, stream)

        box["pool"] = Pool("host", alloc=books.alloc, free=free)
        buffer = box["pool"].allocate(1000)
        box["export"] = EXPORTS[kind](buffer)
        del box["pool"]
        return buffer.handle

    address = build()
    gc.collect()
    assert books.taken == 0
    ctypes.memset(address, 1, 1000)
    del box["export"]
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
