# SPDX-License-Identifier: Apache-2.0
"""Corners of the callback contract, each of which a mutant of tests/mutants breaks."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import growpool
import pytest
from helpers import PAGE, Supplier, eventually, run_quietly

Chunk, Pool = growpool.Chunk, growpool.Pool


def test_re_entry_through_another_pool(supplier: Supplier) -> None:
    """The alloc of one pool grows another, whose alloc would grow the first."""
    told: list[str] = []

    def outer(size: int, device: int, stream: int) -> Chunk | None:
        other.free(other.malloc(PAGE))
        return supplier.alloc(size, device, stream)

    def inner(size: int, device: int, stream: int) -> Chunk | None:
        with pytest.raises(RuntimeError, match="inside its own callback") as error:
            pool.malloc(64 * PAGE)
        told.append(str(error.value))
        return supplier.alloc(size, device, stream)

    other = Pool("host", alloc=inner, free=supplier.free, name="inner")
    with Pool("host", alloc=outer, free=supplier.free, name="outer") as pool, other:
        pool.free(pool.malloc(PAGE))
    assert len(told) == 1 and "'outer'" in told[0]


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


def test_a_dropped_cache_runs_no_callback_inside_a_lock(supplier: Supplier) -> None:
    """A pool over a cache over Python: both go in a collection, and free wants the lock."""
    lock = threading.Lock()

    def free(chunk: Chunk, size: int, device: int, stream: int) -> None:
        with lock:
            supplier.free(chunk, size, device, stream)

    class Books:
        alloc = staticmethod(supplier.alloc)

    Books.free = staticmethod(free)  # type: ignore[attr-defined]
    for _ in range(5):
        box: list[Any] = [Pool("host", backing=growpool.CachingBacking(Books, keep="1 GiB"))]
        box.append(box)
        box[0].allocate(PAGE).close()
        box[0].trim()
        with lock:
            del box
            gc.collect()
            for _ in range(10):  # whatever the interpreter does between two steps is done here
                len(supplier.out)
    eventually(lambda: supplier.taken == supplier.given)


@pytest.mark.parametrize(
    "work", ["about.set(); go_on.wait(); pool.malloc(1 << 21)", "cache.alloc(1 << 21, -1)"]
)
def test_a_thread_that_comes_late_is_parked(work: str) -> None:
    """Before a call, or on the way out of a callback: it neither raises nor goes on."""
    output = run_quietly(
        f"""
        import atexit, threading
        go_on, about = threading.Event(), threading.Event()
        def late():
            go_on.set()
            end.join(0.5)
        atexit.register(late)  # runs after growpool's own, which is registered later
        import growpool
        def wait(size, device, stream):
            chunk = growpool.Chunk.create(size, device)
            about.set()
            go_on.wait()
            return chunk
        pool = growpool.Pool("host")
        class Backing:
            alloc = free = staticmethod(wait)
        cache = growpool.CachingBacking(Backing, keep=0)
        def work():
            try:
                {work}
            finally:
                print("came back", flush=True)
        end = threading.Thread(target=work, daemon=True)
        end.start()
        about.wait()
        """
    )
    assert output == ""


@pytest.mark.parametrize("kind", ["large", "closed"])
def test_a_wrong_answer_is_kept_by_nobody(supplier: Supplier, kind: str) -> None:
    """The chunk goes with the callback's last reference to it."""
    seen: list[weakref.ref[Chunk]] = []

    def alloc(size: int, device: int, stream: int) -> Chunk:
        chunk = Chunk.create(size + PAGE if kind == "large" else size, device)
        if kind == "closed":
            chunk.close()
        seen.append(weakref.ref(chunk))
        return chunk

    with Pool("host", alloc=alloc, free=supplier.free) as pool:
        with pytest.raises(ValueError, match="stays yours"):
            pool.malloc(PAGE)
        assert [chunk() for chunk in seen] == [None]
