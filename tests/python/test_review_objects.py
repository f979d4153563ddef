# SPDX-License-Identifier: Apache-2.0
"""Objects at their ends: chunks that go, owners, finishing pools, and several errors at once."""

from __future__ import annotations

import gc
import inspect
import signal
import sys
import threading
import time
import warnings
import weakref
from typing import Any

import growpool
import pytest
from helpers import PAGE, Supplier, eventually, run_quietly

Pool = growpool.Pool
Chunk = growpool.Chunk


# ---- chunks ----


def test_a_chunk_that_goes_is_not_handed_out_again() -> None:
    run_quietly(
        """
        import gc, sys, weakref, growpool
        cache = growpool.CachingBacking(growpool.DeviceBacking(), keep="64 MiB")
        got = []
        chunk = cache.alloc(2 << 20, -1)
        number = id(chunk)
        watch = weakref.ref(chunk, lambda _: got.append(cache.alloc(2 << 20, -1)))
        cache.free(chunk, 2 << 20, -1)
        del chunk
        assert len(got) == 1 and id(got[0]) != number
        assert sys.getrefcount(got[0]) == 2
        others = [growpool.Chunk.create(2 << 20, -1) for _ in range(8)]
        assert all(other is not got[0] for other in others)
        assert type(got[0]) is growpool.Chunk and not got[0].is_closed
        gc.collect()
        """
    )


class Owner:
    chunk: object = None


def test_the_collector_is_not_shown_an_owner_that_went_with_close(sim: Any) -> None:
    base = Chunk.create(PAGE, sim.device)
    owner = Owner()
    gone = weakref.ref(owner)
    chunk = Chunk.from_handle(base.handle, PAGE, sim.device, owner)
    del owner
    assert gone() is not None
    chunk.close()
    assert gone() is None
    assert gc.get_referents(chunk) == [Chunk]


def test_the_collector_leaves_an_owner_whole_while_the_chunk_outlives_its_object(sim: Any) -> None:
    base = Chunk.create(PAGE, sim.device)
    cache = growpool.CachingBacking(growpool.DeviceBacking(), keep="64 MiB")
    owner = Owner()
    owner.chunk = Chunk.from_handle(base.handle, PAGE, sim.device, owner)
    alive = weakref.ref(owner)
    cache.free(owner.chunk, PAGE, sim.device)
    del owner
    gc.collect()
    kept = alive()
    assert kept is not None
    assert isinstance(kept.chunk, Chunk)
    kept.chunk = None
    del kept
    cache.trim()
    assert alive() is None


def test_a_closed_chunk_is_let_go_by_the_backing_that_supplied_it() -> None:
    supplied: list[Chunk] = []

    class Backing:
        def alloc(self, size: int, device: int, stream: int) -> Chunk:
            supplied.append(Chunk.create(size, device))
            return supplied[-1]

        def free(self, chunk: Chunk, size: int, device: int, stream: int) -> None:
            raise AssertionError

    cache = growpool.CachingBacking(Backing(), keep="64 MiB")
    cache.alloc(PAGE, -1).close()
    assert not any(isinstance(thing, Chunk) for thing in gc.get_referents(cache))
    gone = weakref.ref(supplied.pop())
    assert gone() is None


def test_a_chunk_closed_before_the_pool_took_it_is_let_go() -> None:
    current: list[Chunk | None] = [None]
    stop = False

    def closer() -> None:
        while not stop:
            chunk = current[0]
            if chunk is not None:
                try:
                    chunk.close()
                except growpool.PoolStateError:
                    pass

    def alloc(size: int, device: int, stream: int) -> Chunk:
        current[0] = Chunk.create(size, device)
        return current[0]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=closer)
    thread.start()
    try:
        pool = Pool("host", alloc=alloc, free=lambda *_: None)
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            try:
                pool.free(pool.malloc(100))
                pool.trim()
            except (ValueError, growpool.OutOfMemoryError):
                pass
    finally:
        stop = True
        thread.join()
        sys.setswitchinterval(interval)
    pool.trim()
    assert not any(isinstance(thing, Chunk) for thing in gc.get_referents(pool))
    pool.close()


# ---- finishing pools ----


def test_the_end_of_the_with_block_of_a_finalised_pool() -> None:
    run_quietly(
        """
        import gc, growpool
        kept = []
        class Back:
            def __del__(self):
                kept.append(self)
        back = Back()
        back.pool = growpool.Pool("host")
        back.buffer = back.pool.allocate(100)
        back.view = memoryview(back.buffer)
        back.itself = back
        del back
        gc.collect()
        pool = kept[0].pool
        assert pool.is_closed
        pool.__exit__(None, None, None)
        pool.close()
        kept[0].view[0] = 1
        kept[0].view.release()
        """
    )


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_finishing_pool_takes_no_exports_and_no_streams_but_blocks_back(
    supplier: Supplier,
) -> None:
    with Pool("host", backing=supplier, name="late") as pool:
        pinned, other = pool.allocate(100), pool.allocate(100)
        block = pool.malloc(100)
        view = memoryview(pinned)
    for refused in (
        lambda: memoryview(other),
        lambda: memoryview(pinned),
        lambda: other.record_stream(0),
        lambda: pool.malloc(1),
    ):
        with pytest.raises(growpool.PoolStateError) as caught:
            refused()
        assert caught.value.reason == "closed"
    used = pool.stats.used_bytes
    pool.free(block)
    other.close()
    assert pool.stats.used_bytes < used
    with pytest.raises(BufferError):
        pool.close()
    view.release()
    pool.close()
    assert supplier.out == []


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_close_of_a_finishing_pool_waits_and_the_object_stays_whole() -> None:
    taken: list[Chunk] = []

    def alloc(size: int, device: int, stream: int) -> Chunk:
        taken.append(Chunk.create(size, device))
        return taken[-1]

    def free(chunk: Chunk, size: int, device: int, stream: int) -> None:
        time.sleep(0.1)
        taken.remove(chunk)

    with Pool("host", alloc=alloc, free=free, name="late") as pool:
        view = memoryview(pool.allocate(100))
    del view
    pool.close()
    assert taken == []
    assert pool.name == "late"
    assert pool.stats.physical_bytes == 0


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_finishing_pool_keeps_what_could_not_be_returned(
    unraisable: list[BaseException],
) -> None:
    mended = False

    def free(chunk: Chunk, size: int, device: int, stream: int) -> None:
        if not mended:
            raise ValueError

    with Pool("host", alloc=lambda s, d, _: Chunk.create(s, d), free=free) as pool:
        view = memoryview(pool.allocate(100))
    del view
    eventually(lambda: len(pool.unreturned) == 1 and unraisable)
    assert isinstance(unraisable[0], growpool.ReleaseWarning)
    assert isinstance(unraisable[0].__cause__, ValueError)
    mended = True
    assert pool.return_unreturned() == PAGE
    assert pool.unreturned == []
    pool.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_finishing_pool_closes_by_itself_once_its_streams_are_done(supplier: Supplier) -> None:
    go = threading.Event()
    with growpool.host.Stream() as stream:
        with Pool("host", backing=supplier) as pool:
            buffer = pool.allocate(100, stream)
            stream.submit(lambda: go.wait(10))
            view = memoryview(buffer)
        view.release()
        time.sleep(0.1)
        assert supplier.out != []
        with Pool("host", backing=supplier) as other:  # the delivery thread serves others meanwhile
            held = memoryview(other.allocate(100))
        held.release()
        eventually(lambda: len(supplier.out) == 1)
        go.set()
        eventually(lambda: supplier.out == [])
        eventually(lambda: buffer.is_closed)


# ---- several errors ----


def failing_pool(error: type[BaseException]) -> tuple[Pool, list[BaseException]]:
    """Make a pool with chunks of a page whose free raises; also give what it raised."""
    raised: list[BaseException] = []

    def free(*_: object) -> None:
        raised.append(error("always the same"))
        raise raised[-1]

    pool = Pool("host", alloc=lambda s, d, _: Chunk.create(s, d), free=free, chunk_size=PAGE)
    return pool, raised


def test_an_interrupt_in_the_end_of_a_with_block_is_not_swallowed() -> None:
    pool, raised = failing_pool(KeyboardInterrupt)
    body = ValueError("body")
    with pytest.raises(KeyboardInterrupt) as caught, pool:
        pool.malloc(1)
        raise body
    assert caught.value is raised[0]
    assert caught.value.__context__ is body


def test_an_interrupt_while_a_warning_is_given_is_not_swallowed(
    unraisable: list[BaseException],
) -> None:
    """Another exception is on its way already: the interrupt is raised above it."""
    chunks: list[Chunk] = []
    first, interrupt = ZeroDivisionError(), KeyboardInterrupt()

    def alloc(size: int, device: int, stream: int) -> Chunk:
        if chunks:
            raise first
        chunks.append(Chunk.create(size, device))
        return chunks[-1]

    def free(*_: object) -> None:
        raise OSError("undo")

    def show(*_: object, **__: object) -> None:
        raise interrupt

    pool = Pool("host", alloc=alloc, free=free, chunk_size=PAGE)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        with pytest.raises(KeyboardInterrupt) as caught:
            pool.malloc(2 * PAGE)
    assert caught.value is interrupt
    assert caught.value.__context__ is first
    assert unraisable == []
    assert pool.unreturned == chunks


def test_an_error_in_the_end_of_a_with_block_gives_way(unraisable: list[BaseException]) -> None:
    pool, raised = failing_pool(ValueError)
    with (
        warnings.catch_warnings(),
        pytest.raises(ZeroDivisionError),
        pool,
    ):
        warnings.simplefilter("error")
        pool.malloc(1)
        raise ZeroDivisionError
    assert [type(error) for error in unraisable] == [growpool.ReleaseWarning]
    assert unraisable[0].__cause__ is raised[0]


def test_a_later_memory_error_does_not_replace_an_interrupt() -> None:
    class Interrupt(Exception):
        pass

    def handler(*_: object) -> None:
        raise Interrupt

    def alloc(size: int, device: int, stream: int) -> Chunk | None:
        if len(chunks) == 1:
            raise MemoryError
        chunks.append(Chunk.create(size, device))
        return chunks[-1]

    chunks: list[Chunk] = []
    go = threading.Event()
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with growpool.host.Stream() as stream:
            pool = Pool("host", alloc=alloc, free=lambda *_: None, chunk_size=PAGE)
            address = pool.malloc(PAGE, stream)
            stream.submit(lambda: go.wait(10))
            pool.free(address)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(Interrupt):
                pool.malloc(PAGE)
            go.set()
            pool.close()
    finally:
        go.set()
        signal.signal(signal.SIGALRM, before)


# ---- signatures ----


def test_signatures_are_those_of_the_stub() -> None:
    expected = {
        Chunk.create: "(size, device=None, *, location='device', handle_type=None, "
        "gpu_direct_rdma=False)",
        Chunk.from_handle: "(handle, size, device, owner=None)",
        Chunk.from_fd: "(fd, size, device)",
        Chunk.export_fd: "(self, /)",
        Chunk.close: "(self, /)",
        Pool.malloc: "(self, /, size, stream=None)",
        Pool.free: "(self, /, ptr, stream=None)",
        Pool.allocate: "(self, /, size, stream=None)",
        Pool.trim: "(self, /, min_bytes_to_keep=0, wait=True)",
        Pool.drain: "(self, /)",
        Pool.set_limit: "(self, limit, /)",
        Pool.forget_stream: "(self, stream, /)",
        Pool.return_unreturned: "(self, /)",
        Pool.reset_peak_stats: "(self, /)",
        Pool.snapshot: "(self, /)",
        Pool.close: "(self, /)",
        Pool.__enter__: "(self, /)",
        Pool.__exit__: "(self, exc_type, exc, traceback, /)",
        growpool.Buffer.close: "(self, /, stream=None)",
        growpool.Buffer.record_stream: "(self, stream, /)",
        growpool.Buffer.__enter__: "(self, /)",
        growpool.Buffer.__exit__: "(self, exc_type, exc, traceback, /)",
    }
    found = {method: str(inspect.signature(method)) for method in expected}
    assert found == expected


def test_the_figures_in_the_stub_are_the_fields() -> None:
    for view in (growpool.Stats, growpool.LimitResult):
        assert len(view.__match_args__) == view.n_fields == view.n_sequence_fields


# ---- the end of the process ----


@pytest.mark.parametrize("release", ["view.release()", "pass"])
def test_the_process_ends_well_with_a_finishing_pool(release: str) -> None:
    output = run_quietly(
        f"""
        import warnings, growpool
        warnings.simplefilter("ignore")
        def free(chunk, *rest):
            print("free", flush=True)
        with growpool.Pool("host", alloc=lambda s, d, _: growpool.Chunk.create(s, d),
                           free=free) as pool:
            view = memoryview(pool.allocate(100))
        {release}
        """
    )
    assert output == ("free\n" if release != "pass" else "")
