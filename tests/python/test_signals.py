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
