# SPDX-License-Identifier: Apache-2.0
"""Finalisers, weak references and locks around pools that are collected: free runs later, in a
place where it may take any lock, with everything that it refers to intact.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import growpool
import pytest
from cycles_kit import Ledger, eager_collector, ledger
from helpers import PAGE, Supplier, eventually, run_quietly

__all__ = ["eager_collector", "ledger"]  # fixtures

Pool = growpool.Pool
ROOT = Path(__file__).resolve().parents[2]


# ---- the closure ---------------------------------------------------------------------------------


PROGRAM = """
import gc
count = [0]
registry = {"name": "registry", "items": list(range(9))}
class Thing:
    __slots__ = ("other", "deleted", "__weakref__")
    shared = {"key": "value"}
    def __init__(self, other):
        self.other, self.deleted = other, 0
    def __del__(self):
        self.deleted += 1
def generate():
    yield from registry["items"]
def make(ledger):
    one, two, three = Thing(None), {"inner": [1, 2, 3]}, bytearray(b"abc")
    one.other = two["one"] = one
    collect = gc.collect
    def free(chunk, size, device, stream, default=registry, *, keyword=Thing):
        collect()
        assert registry is default and registry["items"][8] == 8 and keyword is Thing
        assert one.other is one and two["inner"][-1] == 3 and two["one"] is one
        assert type(one) is Thing and Thing.shared == {"key": "value"} and one.deleted <= 1
        assert three == b"abc" and free.note == ["attribute"] and free.pool is box[0]
        assert list(generate()) == registry["items"] and box[0].name == "" or box[0].is_closed
        assert [Thing(one).other for _ in range(3)] == [one] * 3
        count[0] += 1
        ledger.free(chunk, size, device, stream)
    def alloc(size, device, stream):
        collect()
        return ledger.alloc(size, device, stream)
    box = []
    free.note, free.box = ["attribute"], box
    return alloc, free, box
"""


def test_everything_that_free_refers_to_is_intact(ledger: Ledger) -> None:
    """Cells, globals, defaults, attributes, and garbage with finalisers of its own."""

    def build() -> dict[str, Any]:
        module: dict[str, Any] = {"__name__": "garbage"}
        exec(PROGRAM, module)
        alloc, free, box = module["make"](ledger)
        free.pool = Pool("host", alloc=alloc, free=free, chunk_size=PAGE)
        box += [free.pool, module, free]
        free.pool.allocate(2 * PAGE).close()
        free.pool.malloc(PAGE)
        free.pool.trim(wait=False)
        return module["count"]

    count = build()
    ledger.done()
    assert count[0] == ledger.taken


def test_collections_in_every_callback(ledger: Ledger) -> None:
    """Of garbage that holds pools, whose callbacks collect in their turn."""

    def garbage(depth: int) -> None:
        box: list[Any] = []

        def alloc(size: int, device: int, stream: int) -> growpool.Chunk | None:
            if depth > 0:
                garbage(depth - 1)
            gc.collect()
            return ledger.alloc(size, device, stream)

        def free(chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
            if depth > 0 and box:
                garbage(depth - 1)
            gc.collect()
            ledger.free(chunk, size, device, stream)

        box += [box, Pool("host", alloc=alloc, free=free, chunk_size=PAGE)]
        box.append(box[1].allocate(2 * PAGE))
        box[1].free(box[1].malloc(PAGE))
        box[1].trim()

    garbage(2)
    ledger.done()


# ---- resurrection --------------------------------------------------------------------------------


class Phoenix:
    """Its finaliser saves what it holds."""

    def __init__(self, ashes: list[Any], held: Any) -> None:
        self.ashes, self.held, self.me = ashes, held, self

    def __del__(self) -> None:
        self.ashes.append(self.held)


def state_error(call: Callable[[], object]) -> str:
    with pytest.raises(growpool.PoolStateError) as raised:
        call()
    return raised.value.reason


def saved(held: Any) -> Any:
    """Drop what is held, in a cycle, and have a finaliser of that cycle save it."""
    ashes: list[Any] = []
    Phoenix(ashes, held)
    del held
    gc.collect()
    (held,) = ashes
    return held


def test_a_resurrected_pool_says_that_it_is_closed(ledger: Ledger) -> None:
    def build() -> Any:
        pool = Pool("host", backing=ledger, name="phoenix")
        pool.malloc(1000)
        return pool

    pool = saved(build())
    assert pool.is_closed
    assert state_error(lambda: pool.malloc(1)) == "closed"
    assert state_error(lambda: pool.allocate(1)) == "closed"
    assert state_error(pool.trim) == "closed"
    assert state_error(lambda: pool.growable("1 GiB")) == "closed"
    pool.close()
    with pytest.raises(growpool.PoolStateError), pool:
        pass
    assert "closed" in repr(pool)
    ledger.done()
    pool = saved(pool)  # again: its finaliser ran already
    assert pool.is_closed


@pytest.mark.parametrize("kept", ["a buffer", "a growable", "a range"])
def test_a_resurrected_object_says_that_it_is_closed(ledger: Ledger, kept: str) -> None:
    """Its pool, which was no garbage, works on."""
    pool = Pool("host", backing=ledger, chunk_size=PAGE)

    def build() -> Any:
        made: Any = pool.allocate(1000) if kept == "a buffer" else None
        if kept == "a growable":
            made = pool.growable("1 GiB")
            made.resize(PAGE)
        if kept == "a range":
            made = pool.range("1 GiB")
            made.commit(0, PAGE)
        return made

    thing = saved(build())
    assert thing.is_closed
    assert thing.pool is pool
    thing.close()
    assert "closed" in repr(thing)
    assert thing.handle == 0
    for call in (
        lambda: memoryview(thing),
        lambda: thing.view((9,), "uint8"),
        thing.__dlpack__,
        lambda: thing.record_stream(None),
    ):
        with pytest.raises((growpool.PoolStateError, BufferError)):
            call()
    if kept == "a growable":
        assert state_error(lambda: thing.resize(9)) == "closed"
    if kept == "a range":
        assert state_error(lambda: thing.commit(0, PAGE)) == "closed"
    assert pool.stats.used_bytes == 0
    pool.free(pool.malloc(1000))
    pool.close()
    ledger.done()


def test_a_resurrected_view_is_whole(ledger: Ledger) -> None:
    """It pins its memory, so nothing has happened to that."""
    pool = Pool("host", backing=ledger)
    view = saved(pool.allocate(1000).view((1000,), "uint8"))
    memoryview(view)[:] = b"x" * 1000
    assert bytes(memoryview(view)) == b"x" * 1000
    view.close()
    del view
    gc.collect()
    pool.close()
    ledger.done()


def test_a_resurrected_view_of_a_resurrected_pool_keeps_the_memory(ledger: Ledger) -> None:
    def build() -> Any:
        return Pool("host", backing=ledger).allocate(1000).view((1000,), "uint8")

    view = saved(build())
    assert view.pool.is_closed
    assert ledger.taken == 0
    with pytest.raises(growpool.PoolStateError):
        view.pool.malloc(1)
    del view
    gc.collect()
    ledger.done()


def test_a_resurrected_caching_backing_says_that_it_is_closed(ledger: Ledger) -> None:
    def build() -> Any:
        caching = growpool.CachingBacking(ledger, keep="1 GiB")
        caching.free(caching.alloc(PAGE, -1, 0), PAGE, -1, 0)
        return caching

    caching = saved(build())
    assert state_error(lambda: caching.alloc(PAGE, -1, 0)) == "closed"
    assert state_error(caching.trim) == "closed"
    assert state_error(lambda: Pool("host", backing=caching)) == "closed"
    ledger.done()


def test_a_resurrected_stream_works_on() -> None:
    stream = saved(growpool.host.Stream())
    done: list[int] = []
    stream.submit(lambda: done.append(1))
    stream.synchronize()
    assert done == [1]
    stream.close()


def test_callbacks_that_save_what_free_is_given(ledger: Ledger) -> None:
    """A chunk that free keeps is the program's, whatever becomes of the pool."""
    kept: list[growpool.Chunk] = []

    def build() -> None:
        box: list[Any] = []

        def free(chunk: growpool.Chunk, *args: int) -> None:
            kept.append(chunk)
            ledger.free(chunk, *args)

        box += [box, Pool("host", alloc=ledger.alloc, free=free, chunk_size=PAGE)]
        box[1].malloc(2 * PAGE)

    build()
    ledger.done()
    assert len(kept) == 2
    assert not any(chunk.is_in_use or chunk.is_closed for chunk in kept)
    with Pool(
        "host", alloc=lambda *args: kept.pop(), free=lambda *args: None, chunk_size=PAGE
    ) as p:
        p.malloc(2 * PAGE)


# ---- weak references -----------------------------------------------------------------------------


def test_weak_references_to_everything_die_with_it(ledger: Ledger) -> None:
    """Their callbacks run, once, and find the reference dead."""
    told: list[str] = []
    found: list[Any] = []

    def note(name: str) -> Callable[[weakref.ref[Any]], None]:
        return lambda reference: (told.append(name), found.append(reference()))[0]

    def build(cycle: bool) -> list[Any]:
        pool = Pool("host", backing=ledger, chunk_size=PAGE)
        buffer, growable, sparse = pool.allocate(9), pool.growable("1 GiB"), pool.range("1 GiB")
        things = {
            "pool": pool,
            "buffer": buffer,
            "growable": growable,
            "range": sparse,
            "view": buffer.view((3,), "uint8"),
            "caching": growpool.CachingBacking(ledger, keep="1 GiB"),
            "stream": growpool.host.Stream(),
            "chunk": growpool.Chunk.create(PAGE, "host"),
            "device backing": growpool.DeviceBacking(),
        }
        references: list[Any] = [weakref.ref(thing, note(name)) for name, thing in things.items()]
        references.append(weakref.finalize(pool, told.append, "finalize"))
        references.append(weakref.WeakSet(things.values()))
        if cycle:
            keep: list[Any] = [things]
            keep.append(keep)
        return references

    for cycle in (False, True):
        references = build(cycle)
        gc.collect()
        eventually(lambda told=told: len(told) == 10)
        assert sorted(told) == sorted(
            "pool buffer growable range view caching stream chunk finalize".split()
            + ["device backing"]
        )
        assert found == [None] * 9
        assert len(references[-1]) == 0
        told.clear()
        found.clear()
    ledger.done()


def test_a_weak_reference_callback_that_uses_the_pool(ledger: Ledger) -> None:
    pool = Pool("host", backing=ledger)
    used: list[int] = []
    buffer = pool.allocate(1000)
    reference = weakref.ref(buffer, lambda _: used.append(pool.malloc(9)))
    del buffer
    assert reference() is None
    pool.free(used[0])
    pool.close()
    ledger.done()


def test_types_that_cannot_hold_references_of_their_own() -> None:
    """So no cycle can go through an attribute, and no subclass can add one."""
    pool = Pool("host")
    things = [pool, pool.allocate(9), pool.growable("1 GiB"), pool.range("1 GiB")]
    things += [growpool.Chunk.create(PAGE, "host"), growpool.DeviceBacking()]
    things += [growpool.CachingBacking(growpool.DeviceBacking(), keep=0), growpool.host.Stream()]
    for thing in things:
        with pytest.raises(AttributeError):
            thing.attribute = thing
        with pytest.raises(TypeError):
            type("Sub", (type(thing),), {})
    pool.close()


# ---- streams that a pool keeps -------------------------------------------------------------------


def test_a_stream_object_that_refers_to_its_pool(sim: Any) -> None:
    """The pool keeps it while it may own memory; both go together."""
    books = Supplier()

    class Stream:
        def __init__(self, handle: int, pool: Pool) -> None:
            self.ptr, self.pool = handle, pool

    def build() -> list[weakref.ref[Any]]:
        pool = Pool(sim.device, backing=books)
        stream = Stream(sim.stream(), pool)
        pool.allocate(1000, stream=stream)
        return [weakref.ref(stream), weakref.ref(pool)]

    dead = build()
    eventually(lambda: gc.collect() >= 0 and all(reference() is None for reference in dead))
    eventually(lambda: sim.complete_all() is None and books.given == books.taken == 1)
    eventually(lambda: sim.state.reservation_count == 0)


def test_an_exception_of_a_stream_whose_traceback_refers_to_the_pool(ledger: Ledger) -> None:
    def build() -> list[weakref.ref[Any]]:
        pool = Pool("host", backing=ledger)
        stream = growpool.host.Stream()
        buffer = pool.allocate(1000, stream=stream)

        def fail() -> None:
            mine = buffer, stream
            raise ValueError(str(len(mine)))

        stream.submit(fail)
        buffer.close()
        pool.trim()
        return [weakref.ref(pool), weakref.ref(stream)]

    told: list[Any] = []
    before, sys.unraisablehook = sys.unraisablehook, lambda info: told.append(info.exc_type)
    try:
        dead = build()
        eventually(lambda: gc.collect() >= 0 and all(reference() is None for reference in dead))
    finally:
        sys.unraisablehook = before
    assert told == [ValueError]
    ledger.done()


# ---- locks ---------------------------------------------------------------------------------------

LOCKED = """
import gc, threading, weakref
import growpool
from helpers import Supplier, PAGE, eventually
books, lock, freed_by = Supplier(), threading.Lock(), set()
def free(*args):
    with lock:
        freed_by.add(threading.get_ident())
        books.free(*args)
def make(**options):
    return growpool.Pool("host", alloc=books.alloc, free=free, chunk_size=PAGE, **options)
def garbage():
    box = [make()]
    box += [box, box[0].allocate(2 * PAGE), box[0].growable("1 GiB")]
    box[3].resize(PAGE)
    box[0].free(box[0].malloc(3 * PAGE))
gc.set_threshold({threshold})
for _ in range(20):
    {body}
gc.collect()
eventually(lambda: gc.collect() >= 0 and books.given == books.taken)
assert books.out == [] and books.given > 0
"""

# What a program may do while it holds a lock that its free takes too, and is not reusable.
HOLDING = {
    "a collection": """
    garbage()
    with lock:
        gc.collect()""",
    "the drop of a pool": """
    pool = make(); pool.malloc(3 * PAGE)
    with lock:
        del pool""",
    "the drop of a buffer": """
    pool = make(); buffer = pool.allocate(3 * PAGE); pool.trim(wait=False)
    with lock:
        del buffer
    pool.close()""",
    "the close of a buffer": """
    pool = make(); buffer = pool.allocate(3 * PAGE); growable = pool.growable("1 GiB")
    growable.resize(3 * PAGE)
    with lock:
        buffer.close(); growable.close()
    pool.trim()""",
    "a malloc that finds room": """
    pool = make(); garbage(); pool.free(pool.malloc(3 * PAGE)); pool.trim(wait=False)
    with lock:
        block = pool.malloc(3 * PAGE); pool.free(block)
    pool.close()""",
    "a malloc that grows": """
    pool = make(); garbage(); pool.free(pool.malloc(3 * PAGE)); pool.trim(wait=False)
    with lock:
        pool.malloc(9 * PAGE)
    pool.close()""",
    "a trim that does not wait": """
    pool = make(); pool.free(pool.malloc(3 * PAGE))
    with lock:
        pool.trim(wait=False)
    pool.close()""",
    "a lower limit": """
    pool = make(); pool.free(pool.malloc(3 * PAGE))
    with lock:
        pool.set_limit(PAGE)
    pool.close()""",
    "a storm of objects": """
    garbage(); garbage()
    with lock:
        kept = [[[index]] for index in range(2000)]; kept.append(kept); del kept""",
    "all reads": """
    pool = make(); pool.malloc(9); garbage()
    with lock:
        pool.stats, pool.snapshot(), pool.unreturned, repr(pool), pool.limit
    pool.close()""",
    "the end of a caching backing": """
    caching = growpool.CachingBacking(make_backing(), keep="1 GiB")
    growpool.Pool("host", backing=caching, chunk_size=PAGE).malloc(3 * PAGE)
    with lock:
        del caching; gc.collect()""",
}


def test_a_lock_that_free_takes_may_be_held_over(eager_collector: int) -> None:
    """Collections, drops, growth without pressure: none of it calls free on this thread.

    A hang ends with the stacks of all threads.
    """
    helper = """
    class make_backing:
        def alloc(self, *args): return books.alloc(*args)
        def free(self, *args): free(*args)
"""
    body = helper + "".join(HOLDING.values())
    run_quietly(LOCKED.format(threshold=eager_collector, body=body.strip()))


def test_explicit_calls_deliver_on_the_thread_that_makes_them(ledger: Ledger) -> None:
    """So a lock that free takes must not be held over these: that deadlock is the program's."""
    lock, threads = threading.RLock(), []

    def free(chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
        with lock:  # reusable: else each of the calls below would wait for itself
            threads.append(threading.get_ident())
            ledger.free(chunk, size, device, stream)

    pool = Pool("host", alloc=ledger.alloc, free=free, chunk_size=PAGE, limit=2 * PAGE)
    growable = pool.growable("1 GiB")
    calls: dict[str, Callable[[], object]] = {
        "trim": pool.trim,
        "a malloc for which idle memory has to go": lambda: growable.resize(2 * PAGE),
        "a resize": lambda: growable.resize(0),
        "close": pool.close,
    }
    pool.free(pool.malloc(PAGE))
    for name, call in calls.items():
        if name == "a malloc for which idle memory has to go":
            pool.free(pool.malloc(2 * PAGE))
        if name == "close":
            pool.malloc(PAGE)
        threads.clear()
        with lock:
            call()
        assert set(threads) == {threading.get_ident()}, name
    ledger.done()


def test_no_callback_is_left_to_the_interpreters_pending_calls() -> None:
    """Those run wherever the main thread happens to be, inside a with lock block too."""
    sources = list((ROOT / "python" / "ext").glob("*.[ch]"))
    assert len(sources) > 40
    for source in sources:
        assert "PendingCall" not in source.read_text(encoding="utf-8"), source
