# SPDX-License-Identifier: Apache-2.0
"""Waits notice signals: what the handler raised comes out unchanged, what was retiring stays so,
and the same call goes on afterwards."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import growpool
import pytest
from helpers import PAGE, Supplier, eventually
from signals_kit import Busy, Striker

Pool = growpool.Pool


@pytest.fixture
def strike() -> Iterator[Striker]:
    striker = Striker()
    interval = sys.getswitchinterval()
    before = signal.signal(signal.SIGALRM, striker.handler)
    yield striker
    signal.signal(signal.SIGALRM, before)
    sys.setswitchinterval(interval)


@pytest.fixture(params=["host", "sim"])
def busy(request: pytest.FixtureRequest, sim: Any) -> Iterator[Busy]:
    busy = Busy(request.param, sim)
    yield busy
    busy.release()


def figures(pool: Pool) -> dict[str, Any]:
    stats = pool.stats
    found = {name: getattr(stats, name) for name in type(stats).__match_args__}
    del found["wait_count"]
    return found


# ---- shrinking --------------------------------------------------------------------------------


def leave(pool: Pool) -> None:
    pool.__exit__(None, None, None)


SHRINK: dict[str, Callable[[Pool], Any]] = {
    "trim": lambda pool: pool.trim(),
    "drain": lambda pool: pool.drain(),
    "close": lambda pool: pool.close(),
    "exit": leave,
}


@pytest.mark.parametrize("operation", SHRINK)
def test_a_signal_ends_a_wait(
    supplier: Supplier, strike: Striker, busy: Busy, operation: str
) -> None:
    pool = Pool(busy.device, backing=supplier, name="patient")
    address = pool.malloc(PAGE, busy.stream)
    busy.work(address)
    if operation in ("trim", "drain"):
        pool.free(address)
    if operation == "drain":
        pool.trim(wait=False)
    for _ in range(2):  # a second signal ends the second try
        strike()
        with pytest.raises(KeyboardInterrupt) as caught:
            SHRINK[operation](pool)
        strike.check(caught)
        stats = pool.stats
        assert supplier.taken == 0
        assert stats.physical_bytes == stats.retiring_bytes == supplier.out_bytes == PAGE
        assert (stats.used_bytes, stats.unreturned_bytes) == (0, 0)
    if operation in ("close", "exit"):
        with pytest.raises(growpool.PoolStateError, match="'patient' is closed"):
            pool.malloc(1)
    busy.release()
    SHRINK[operation](pool)
    assert supplier.out == []
    pool.close()
    assert pool.is_closed


def test_a_signal_that_ends_a_with_block_shows_the_body(
    supplier: Supplier, strike: Striker, busy: Busy
) -> None:
    body = ZeroDivisionError("body")
    with pytest.raises(KeyboardInterrupt) as caught, Pool(busy.device, backing=supplier) as pool:
        busy.work(pool.malloc(PAGE, busy.stream))
        strike()
        raise body
    assert caught.value is strike.raised[0]
    assert caught.value.__context__ is body
    busy.release()
    pool.close()
    assert supplier.out == []


def test_a_lower_limit_waits_for_nobody(supplier: Supplier, busy: Busy) -> None:
    with Pool(busy.device, backing=supplier) as pool:
        address = pool.malloc(PAGE, busy.stream)
        busy.work(address)
        pool.free(address)
        waits = pool.stats.wait_count
        result = pool.set_limit(0)
        assert (result.overage_bytes, result.deferred_bytes) == (PAGE, PAGE)
        assert pool.stats.wait_count == waits
        assert supplier.taken == 0
        busy.release()
        pool.drain()
        assert supplier.out == []


@pytest.mark.parametrize("operation", ["resize", "decommit", "decommit_many"])
def test_a_signal_ends_the_wait_of_a_shrink(
    supplier: Supplier, strike: Striker, busy: Busy, operation: str
) -> None:
    """The size is the new one then, and what was waited for goes back later."""
    with Pool(busy.device, backing=supplier, chunk_size=PAGE) as pool:
        growable = pool.growable(4 * PAGE, stream=busy.stream)
        sparse = pool.range(4 * PAGE, stream=busy.stream)
        if operation == "resize":
            growable.resize(2 * PAGE)
            busy.work(growable.handle)
        else:
            sparse.commit_many([(0, PAGE), (2 * PAGE, PAGE)])
            busy.work(sparse.handle)
        strike()
        with pytest.raises(KeyboardInterrupt) as caught:
            if operation == "resize":
                growable.resize(0)
            elif operation == "decommit":
                sparse.decommit(0, 4 * PAGE)
            else:
                sparse.decommit_many([(2 * PAGE, PAGE), (0, PAGE)])
        strike.check(caught)
        assert (growable.size, sparse.committed) == (0, [])
        assert supplier.out_bytes == 2 * PAGE == pool.stats.retiring_bytes
        busy.release()
        pool.drain()
        assert supplier.out == []


@pytest.mark.parametrize("operation", SHRINK)
def test_a_signal_ends_the_wait_for_another_threads_callback(
    supplier: Supplier, strike: Striker, operation: str
) -> None:
    inside, go = threading.Event(), threading.Event()

    def free(chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
        inside.set()
        assert go.wait(30)
        supplier.free(chunk, size, device, stream)

    pool = Pool("host", alloc=supplier.alloc, free=free)
    pool.free(pool.malloc(PAGE))
    thread = threading.Thread(target=pool.trim)
    thread.start()
    inside.wait()
    before = figures(pool)
    strike()
    with pytest.raises(KeyboardInterrupt) as caught:
        SHRINK[operation](pool)
    strike.check(caught)
    assert figures(pool) == before
    go.set()
    SHRINK[operation](pool)
    assert supplier.out == []
    thread.join()
    pool.close()


@pytest.mark.parametrize("operation", ["close", "exit"])
def test_a_signal_ends_the_wait_for_another_threads_growth(
    supplier: Supplier, strike: Striker, operation: str
) -> None:
    inside, go = threading.Event(), threading.Event()
    errors: list[str] = []

    def alloc(size: int, device: int, stream: int) -> growpool.Chunk | None:
        inside.set()
        assert go.wait(30)
        return supplier.alloc(size, device, stream)

    def grow() -> None:
        try:
            pool.malloc(PAGE)
        except growpool.PoolStateError as error:
            errors.append(error.reason)

    pool = Pool("host", alloc=alloc, free=supplier.free)
    thread = threading.Thread(target=grow)
    thread.start()
    inside.wait()
    strike()
    with pytest.raises(KeyboardInterrupt) as caught:
        SHRINK[operation](pool)
    strike.check(caught)
    assert not pool.is_closed
    go.set()
    SHRINK[operation](pool)
    thread.join()
    assert pool.is_closed
    assert errors == ["closed"]


def test_what_a_handler_raised_is_not_lost_when_the_wait_came_to_its_end(
    supplier: Supplier, strike: Striker
) -> None:
    """The handler itself lets the other thread's callback end, and then raises."""
    inside, go = threading.Event(), threading.Event()

    def free(chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
        inside.set()
        assert go.wait(30)
        supplier.free(chunk, size, device, stream)

    pool = Pool("host", alloc=supplier.alloc, free=free)
    pool.free(pool.malloc(PAGE))
    thread = threading.Thread(target=pool.trim)
    thread.start()
    inside.wait()
    strike.before_raising = lambda: (go.set(), thread.join())
    strike()
    with pytest.raises(KeyboardInterrupt) as caught:
        pool.close()
    strike.check(caught)
    assert pool.is_closed
    assert supplier.out == []


# ---- growing ----------------------------------------------------------------------------------

GROW: dict[str, Callable[[Any, Any, Any], Any]] = {
    "malloc": lambda pool, growable, sparse: pool.malloc(2 * PAGE),
    "allocate": lambda pool, growable, sparse: pool.allocate(2 * PAGE),
    "resize": lambda pool, growable, sparse: growable.resize(2 * PAGE),
    "commit": lambda pool, growable, sparse: sparse.commit(0, 2 * PAGE),
    "commit_many": lambda pool, growable, sparse: sparse.commit_many([(0, PAGE), (3 * PAGE, PAGE)]),
}


@pytest.mark.parametrize("grow", GROW)
def test_a_signal_ends_the_wait_of_a_growth(
    supplier: Supplier, strike: Striker, busy: Busy, grow: str
) -> None:
    """At the limit, another stream's memory has to go first; it retires, and stays retiring."""
    with Pool(busy.device, backing=supplier, chunk_size=PAGE, limit=2 * PAGE) as pool:
        things = (pool, pool.growable(4 * PAGE), pool.range(4 * PAGE))
        addresses = [pool.malloc(PAGE, busy.stream) for _ in range(2)]
        busy.work(addresses[0])
        for address in addresses:
            pool.free(address)
        spaces = pool.stats.address_bytes
        strike()
        with pytest.raises(KeyboardInterrupt) as caught:
            GROW[grow](*things)
        strike.check(caught)
        stats = pool.stats
        assert (stats.physical_bytes, stats.used_bytes) == (2 * PAGE, 0)
        assert (stats.free_bytes + stats.retiring_bytes, stats.address_bytes) == (2 * PAGE, spaces)
        assert (things[1].size, things[2].committed) == (0, [])
        assert (supplier.given, supplier.taken) == (2, 0)
        busy.release()
        GROW[grow](*things)
        assert supplier.out_bytes == 2 * PAGE
        # A block takes idle chunks with it, unless the delivery thread was first to give them back.
        returned = range(3) if grow in ("malloc", "allocate") else (2,)
        assert supplier.taken in returned and supplier.given == supplier.taken + 2


@pytest.mark.parametrize("grow", GROW)
def test_a_signal_ends_a_growths_wait_for_another_threads_callback(
    supplier: Supplier, strike: Striker, grow: str
) -> None:
    inside, go = threading.Event(), threading.Event()

    def free(chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
        inside.set()
        assert go.wait(30)
        supplier.free(chunk, size, device, stream)

    pool = Pool("host", alloc=supplier.alloc, free=free, chunk_size=PAGE, limit=2 * PAGE)
    things = (pool, pool.growable(4 * PAGE), pool.range(4 * PAGE))
    pool.free(pool.malloc(2 * PAGE))
    thread = threading.Thread(target=pool.trim)
    thread.start()
    inside.wait()
    before = figures(pool)
    strike()
    with pytest.raises(KeyboardInterrupt) as caught:
        GROW[grow](*things)
    strike.check(caught)
    assert figures(pool) == before
    go.set()
    thread.join()
    GROW[grow](*things)
    pool.close()


def test_an_interrupted_resize_leaves_the_contents(supplier: Supplier, strike: Striker) -> None:
    """Both ways: a shrink that waits for the tail's work, and a growth back into that tail."""
    release = threading.Event()
    stream, other = growpool.host.Stream(), growpool.host.Stream()
    with Pool("host", backing=supplier, chunk_size=PAGE) as pool:
        growable = pool.growable(8 * PAGE, stream=stream)
        growable.resize(4 * PAGE)
        contents = bytes(range(256)) * (PAGE // 256)
        with memoryview(growable) as view:
            view[:PAGE] = contents
        stream.submit(lambda: release.wait(30))
        strike()
        with pytest.raises(KeyboardInterrupt) as caught:
            growable.resize(PAGE)
        strike.check(caught)
        assert growable.size == PAGE and bytes(memoryview(growable)) == contents
        strike()
        with pytest.raises(KeyboardInterrupt) as caught:
            growable.resize(4 * PAGE, other)  # the addresses are not free yet
        strike.check(caught)
        assert growable.size == PAGE and bytes(memoryview(growable)) == contents
        release.set()
        growable.resize(8 * PAGE, other)
        with memoryview(growable) as view:
            assert view[:PAGE] == contents


# ---- streams and copies -----------------------------------------------------------------------


def test_a_signal_ends_synchronize(strike: Striker) -> None:
    release = threading.Event()
    stream = growpool.host.Stream()
    stream.submit(lambda: release.wait(30))
    strike()
    with pytest.raises(KeyboardInterrupt) as caught:
        stream.synchronize()
    strike.check(caught)
    release.set()
    stream.synchronize()


def test_a_signal_ends_the_with_block_of_a_stream(strike: Striker) -> None:
    release = threading.Event()
    with pytest.raises(KeyboardInterrupt) as caught, growpool.host.Stream() as stream:
        stream.submit(lambda: release.wait(30))
        strike()
    strike.check(caught)
    release.set()
    stream.synchronize()


def test_a_signal_in_forget_stream(supplier: Supplier, strike: Striker, busy: Busy) -> None:
    with Pool(busy.device, backing=supplier) as pool:
        buffer = pool.allocate(PAGE, stream=busy.stream)
        busy.work(buffer.handle)
        strike()
        with pytest.raises(KeyboardInterrupt) as caught:
            pool.forget_stream(busy.stream)
        strike.check(caught)
        busy.release()
        pool.forget_stream(busy.stream)
        buffer.close()


@pytest.mark.parametrize("way", ["copy_from", "copy_to"])
def test_a_signal_ends_the_wait_in_front_of_a_copy(strike: Striker, busy: Busy, way: str) -> None:
    """Nothing was copied, and the memory is not pinned any more."""
    with Pool(busy.device) as pool:
        buffer = pool.allocate(PAGE, stream=busy.stream)
        busy.work(buffer.handle)
        other = bytearray(b"late" * (PAGE // 4))
        strike()
        with pytest.raises(KeyboardInterrupt) as caught:
            getattr(buffer, way)(other)
        strike.check(caught)
        assert other[:4] == b"late"
        other += b"!"  # BufferError while it is exported
        busy.release()
        if busy.device == "host":
            assert bytes(memoryview(buffer)[:1]) == b"\x01"  # the work's, not the copy's
        buffer.close()


def test_a_fill_waits_for_nobody(busy: Busy) -> None:
    with Pool(busy.device) as pool:
        buffer = pool.allocate(PAGE, stream=busy.stream)
        busy.work(buffer.handle)
        waits = pool.stats.wait_count
        buffer.fill(3)
        assert pool.stats.wait_count == waits
        busy.release()


# ---- what other pools left --------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["trim", "drain", "close"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_signal_ends_the_wait_for_pools_that_were_let_go(
    sim: Any, supplier: Supplier, strike: Striker, operation: str, count: int, busy: bool
) -> None:
    """An explicit call also closes pools whose memory has users that growpool cannot see.

    A signal that ended the wait of a busy pool has ended that one too.
    """
    sim.set_wait_completes(False)
    stream = sim.stream()
    for _ in range(count):
        dropped = Pool(sim.device, backing=supplier, name="dropped")
        buffer = dropped.allocate(PAGE, stream=stream)
        buffer.__dlpack__()
        del dropped, buffer
    gc.collect()
    eventually(lambda: sim.left_pools() == count)
    pool, worker = Pool(sim.device), Pool(sim.device)
    sim.launch(stream, worker.malloc(PAGE, stream), PAGE)
    if busy:
        address = pool.malloc(PAGE, stream)
        sim.launch(stream, address, PAGE)
        pool.free(address)
        pool.trim(wait=False)
    strike()
    with pytest.raises(KeyboardInterrupt) as caught:
        getattr(pool, operation)()
    strike.check(caught)
    assert pool.is_closed == (operation == "close" and not busy)
    assert (len(supplier.out), sim.left_pools()) == (count, count)
    sim.complete_all()
    sim.set_wait_completes(True)
    worker.trim()
    assert (supplier.out, sim.left_pools()) == ([], 0)
    worker.close()
    pool.close()


# ---- callbacks --------------------------------------------------------------------------------


@pytest.mark.parametrize("grow", GROW)
def test_a_signal_inside_alloc(supplier: Supplier, strike: Striker, grow: str) -> None:
    """It is an exception of alloc: the growth is undone."""
    struck = False

    def alloc(size: int, device: int, stream: int) -> growpool.Chunk | None:
        nonlocal struck
        if supplier.given == 2 and not struck:
            struck = True
            strike()
            eventually(lambda: False)  # until it strikes
        return supplier.alloc(size, device, stream)

    with Pool("host", alloc=alloc, free=supplier.free, chunk_size=PAGE) as pool:
        things = (pool, pool.growable(4 * PAGE), pool.range(4 * PAGE))
        pool.malloc(PAGE)
        with pytest.raises(KeyboardInterrupt) as caught:
            GROW[grow](*things)
        strike.check(caught)
        assert (pool.stats.physical_bytes, supplier.out_bytes) == (PAGE, PAGE)
        assert (things[1].size, things[2].committed) == (0, [])
        GROW[grow](*things)


@pytest.mark.parametrize("operation", ["trim", "close", "exit", "return_unreturned"])
def test_a_signal_inside_free(supplier: Supplier, strike: Striker, operation: str) -> None:
    """It is an exception of free: the chunk is unreturned, and the other one is given back."""
    calls = 0
    fails = operation == "return_unreturned"

    def free(chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
        nonlocal calls
        if fails:
            raise OSError
        calls += 1
        if calls == 1:
            strike()
            eventually(lambda: False)  # until it strikes
        supplier.free(chunk, size, device, stream)

    pool = Pool("host", alloc=supplier.alloc, free=free, chunk_size=PAGE)
    pool.free(pool.malloc(2 * PAGE))
    if fails:
        with pytest.warns(growpool.ReleaseWarning):
            pool.trim()
        fails = False
    act = SHRINK.get(operation, Pool.return_unreturned)
    with pytest.raises(KeyboardInterrupt) as caught:
        act(pool)
    strike.check(caught)
    assert len(pool.unreturned) == 1
    assert pool.stats.unreturned_bytes == pool.stats.physical_bytes == PAGE
    assert pool.return_unreturned() == PAGE
    assert supplier.out == []
    pool.close()


# ---- handlers ---------------------------------------------------------------------------------


def test_control_c_is_a_keyboard_interrupt(supplier: Supplier, busy: Busy) -> None:
    """As Python delivers it, with its own handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.get_ident()
    try:
        with Pool(busy.device, backing=supplier) as pool:
            address = pool.malloc(PAGE, busy.stream)
            busy.work(address)
            pool.free(address)
            waits = pool.stats.wait_count

            def press() -> None:
                eventually(lambda: pool.stats.wait_count > waits)
                signal.pthread_kill(main, signal.SIGINT)

            thread = threading.Thread(target=press)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                pool.trim()
            thread.join()
            assert pool.stats.retiring_bytes == PAGE
            busy.release()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("inner", ["trim", "drain", "close"])
def test_a_handler_inside_a_wait_cannot_wait_for_it(strike: Striker, inner: str) -> None:
    """It would wait for the very operation that it interrupted; it is told so instead.

    A handler that raises nothing does not end the wait.
    """
    stream = growpool.host.Stream()
    release = threading.Event()
    answers: list[object] = []
    with Pool("host") as pool:
        address = pool.malloc("4 MiB", stream)
        stream.submit(release.wait)
        pool.free(address)

        def handler(*unused: object) -> None:
            try:
                answers.append(getattr(pool, inner)())
            except RuntimeError as error:
                answers.append(error)
            release.set()

        signal.signal(signal.SIGALRM, handler)
        strike()
        assert pool.trim() == 4 << 20
    assert len(answers) == 1 and isinstance(answers[0], RuntimeError)
    assert "signal handler" in str(answers[0])
