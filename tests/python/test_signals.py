# SPDX-License-Identifier: Apache-2.0
"""Waits notice signals; what was retiring stays retiring, and the same call goes on afterwards."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import growpool
import pytest
from helpers import PAGE, Supplier


class Alarm(Exception):
    pass


@pytest.fixture
def alarm() -> Iterator[Callable[[float], None]]:
    """Arms a timer whose handler raises Alarm."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, handler)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds) and None
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("operation", ["trim", "drain", "close"])
def test_a_signal_ends_a_wait(
    supplier: Supplier, alarm: Callable[[float], None], operation: str
) -> None:
    release = threading.Event()
    stream = growpool.host.Stream()
    pool = growpool.Pool("host", backing=supplier, name="patient")
    buffer = pool.allocate(PAGE, stream=stream)
    address = buffer.handle

    def work() -> None:
        assert release.wait(30)
        ctypes.memset(address, 1, PAGE)

    stream.submit(work)
    buffer.close()
    if operation == "drain":
        pool.trim(wait=False)
    alarm(0.1)
    with pytest.raises(Alarm):
        getattr(pool, operation)()
    assert supplier.taken == 0
    stats = pool.stats
    assert stats.physical_bytes == supplier.out_bytes
    assert stats.used_bytes == 0
    release.set()
    getattr(pool, operation)()
    assert supplier.out == []
    pool.close()
    stream.synchronize()


def test_a_signal_ends_synchronize(alarm: Callable[[float], None]) -> None:
    release = threading.Event()
    stream = growpool.host.Stream()
    stream.submit(lambda: release.wait(30))
    alarm(0.1)
    with pytest.raises(Alarm):
        stream.synchronize()
    release.set()
    stream.synchronize()


def test_a_signal_in_forget_stream(supplier: Supplier, alarm: Callable[[float], None]) -> None:
    release = threading.Event()
    with growpool.Pool("host", backing=supplier) as pool, growpool.host.Stream() as stream:
        buffer = pool.allocate(PAGE, stream=stream)
        stream.submit(lambda: release.wait(30))
        alarm(0.1)
        with pytest.raises(Alarm):
            pool.forget_stream(stream)
        release.set()
        pool.forget_stream(stream)
        buffer.close()


@pytest.mark.parametrize("inner", ["trim", "drain", "close"])
def test_a_handler_inside_a_wait_cannot_wait_for_it(inner: str) -> None:
    """It would wait for the very operation that it interrupted; it is told so instead."""
    stream = growpool.host.Stream()
    release = threading.Event()
    answers: list[object] = []
    with growpool.Pool("host") as pool:
        address = pool.malloc("4 MiB", stream)
        stream.submit(release.wait)
        pool.free(address)

        def handler(*unused: object) -> None:
            try:
                answers.append(getattr(pool, inner)())
            except RuntimeError as error:
                answers.append(error)
            release.set()

        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            assert pool.trim() == 4 << 20
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    assert len(answers) == 1 and isinstance(answers[0], RuntimeError)
    assert "signal handler" in str(answers[0])


def test_what_a_handler_raised_arrives_although_the_wait_was_over(supplier: Supplier) -> None:
    """The close waits for another thread's free, which ends while the handler runs."""
    inside, go_on = threading.Event(), threading.Event()

    def free(chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
        inside.set()
        assert go_on.wait(20)
        supplier.free(chunk, size, device, stream)

    def handler(number: int, frame: FrameType | None) -> None:
        go_on.set()
        other.join(20)
        raise Alarm

    pool = growpool.Pool("host", alloc=supplier.alloc, free=free)
    pool.allocate(PAGE).close()
    other = threading.Thread(target=pool.trim)
    other.start()
    assert inside.wait(20)
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(Alarm):
            pool.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not other.is_alive()
    pool.close()
    assert supplier.taken == 1


@pytest.mark.parametrize("operation", ["resize", "decommit"])
def test_a_signal_ends_the_wait_of_a_shrink(
    supplier: Supplier, alarm: Callable[[float], None], operation: str
) -> None:
    """The size is the new one then, and what was waited for goes back later."""
    release = threading.Event()
    stream = growpool.host.Stream()
    with growpool.Pool("host", backing=supplier) as pool:
        growable, sparse = pool.growable(PAGE, stream=stream), pool.range(PAGE, stream=stream)
        if operation == "resize":
            growable.resize(PAGE)
        else:
            sparse.commit(0, PAGE)
        stream.submit(lambda: release.wait(30))
        alarm(0.1)
        with pytest.raises(Alarm):
            if operation == "resize":
                growable.resize(0)
            else:
                sparse.decommit(0, PAGE)
        assert (growable.size, sparse.committed) == (0, [])
        assert supplier.out_bytes == PAGE == pool.stats.retiring_bytes
        release.set()
        stream.synchronize()
        pool.drain()
        assert supplier.out == []


def test_an_interrupted_resize_leaves_the_contents(
    supplier: Supplier, alarm: Callable[[float], None]
) -> None:
    """Both ways: a shrink that waits for the tail's work, and a growth back into that tail."""
    release = threading.Event()
    stream, other = growpool.host.Stream(), growpool.host.Stream()
    with growpool.Pool("host", backing=supplier, chunk_size=PAGE) as pool:
        growable = pool.growable(8 * PAGE, stream=stream)
        growable.resize(4 * PAGE)
        contents = bytes(range(256)) * (PAGE // 256)
        with memoryview(growable) as view:
            view[:PAGE] = contents
        stream.submit(lambda: release.wait(30))
        alarm(0.1)
        with pytest.raises(Alarm):
            growable.resize(PAGE)
        assert growable.size == PAGE and bytes(memoryview(growable)) == contents
        alarm(0.1)
        with pytest.raises(Alarm):
            growable.resize(4 * PAGE, other)  # the addresses are not free yet
        assert growable.size == PAGE and bytes(memoryview(growable)) == contents
        release.set()
        growable.resize(8 * PAGE, other)
        with memoryview(growable) as view:
            assert view[:PAGE] == contents


def test_a_signal_ends_the_wait_in_front_of_a_copy(alarm: Callable[[float], None]) -> None:
    """Nothing was copied, and the memory is not pinned any more."""
    release = threading.Event()
    stream = growpool.host.Stream()
    with growpool.Pool("host") as pool:
        buffer = pool.allocate(4, stream=stream)
        stream.submit(lambda: release.wait(30))
        source = bytearray(b"late")
        alarm(0.1)
        with pytest.raises(Alarm):
            buffer.copy_from(source)
        source += b"!"  # BufferError while it is exported
        release.set()
        stream.synchronize()
        assert bytes(memoryview(buffer)) != b"late"
        buffer.close()
