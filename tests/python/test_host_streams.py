# SPDX-License-Identifier: Apache-2.0
"""Host streams: order, exceptions, and pools that wait for work that is still running."""

from __future__ import annotations

import ctypes
import functools
import gc
import threading
import time
import weakref

import growpool
import pytest
from helpers import PAGE, Supplier, eventually

Pool = growpool.Pool
Stream = growpool.host.Stream


class Gate:
    """Work that touches memory once it is let through, and tells when it did."""

    def __init__(self, address: int, size: int) -> None:
        self._address, self._size = address, size
        self._open = threading.Event()
        self.touched = False

    def __call__(self) -> None:
        assert self._open.wait(20)
        ctypes.memset(self._address, 7, self._size)
        self.touched = True

    def open(self) -> None:
        self._open.set()


def test_work_runs_in_order_on_another_thread() -> None:
    seen: list[object] = []
    with Stream() as stream:
        for number in range(100):
            stream.submit(functools.partial(seen.append, number))
        stream.submit(lambda: seen.append(threading.get_ident()))
        stream.synchronize()
        assert seen[:-1] == list(range(100))
        assert seen[-1] != threading.get_ident()
    assert stream.is_closed


def test_ids_differ_and_stay() -> None:
    streams = [Stream() for _ in range(5)]
    assert len({stream.id for stream in streams}) == 5
    assert 0 not in {stream.id for stream in streams}
    one = streams[0]
    number = one.id
    one.close()
    assert one.id == number
    assert Stream().id not in {stream.id for stream in streams}


def test_an_exception_is_raised_at_synchronize_once() -> None:
    mine = ZeroDivisionError("mine")

    def work() -> None:
        raise mine

    stream = Stream()
    stream.submit(work)
    with pytest.raises(ZeroDivisionError) as caught:
        stream.synchronize()
    assert caught.value is mine
    stream.synchronize()
    stream.submit(work)
    stream.close()
    with pytest.raises(ZeroDivisionError):
        stream.synchronize()


def test_the_with_block_waits_and_raises() -> None:
    with pytest.raises(ZeroDivisionError), Stream() as stream:
        stream.submit(lambda: 1 / 0)
    assert stream.is_closed


def test_what_is_not_callable() -> None:
    with Stream() as stream, pytest.raises(TypeError, match="callable"):
        stream.submit(1)  # type: ignore[arg-type]


def test_synchronize_on_its_own_worker() -> None:
    with pytest.raises(RuntimeError, match="own worker"), Stream() as stream:
        stream.submit(stream.synchronize)


def test_close_lets_submitted_work_run() -> None:
    done = threading.Event()
    stream = Stream()
    stream.submit(lambda: time.sleep(0.05))
    stream.submit(done.set)
    stream.close()
    assert done.wait(20)


def test_a_dropped_stream_lets_submitted_work_run() -> None:
    done = threading.Event()
    stream = Stream()
    stream.submit(lambda: time.sleep(0.05))
    stream.submit(done.set)
    del stream
    gc.collect()
    assert done.wait(20)


def test_trim_waits_for_running_work(pool: Pool, supplier: Supplier) -> None:
    stream = Stream()
    buffer = pool.allocate(PAGE, stream=stream)
    gate = Gate(buffer.handle, PAGE)
    stream.submit(gate)
    buffer.close()
    threading.Timer(0.1, gate.open).start()
    pool.trim()
    assert gate.touched
    assert supplier.out == []
    assert pool.stats.wait_count >= 1
    stream.close()


def test_trim_without_waiting_leaves_running_work_alone(pool: Pool, supplier: Supplier) -> None:
    stream = Stream()
    buffer = pool.allocate(PAGE, stream=stream)
    gate = Gate(buffer.handle, PAGE)
    stream.submit(gate)
    buffer.close()
    assert pool.trim(wait=False) >= PAGE
    assert pool.stats.retiring_bytes >= PAGE
    time.sleep(0.05)
    assert supplier.taken == 0
    gate.open()
    pool.drain()
    assert gate.touched
    assert supplier.out == []
    stream.close()


def test_other_memory_goes_while_one_stream_works(pool: Pool, supplier: Supplier) -> None:
    busy, idle = Stream(), Stream()
    first = pool.allocate(8 * PAGE, stream=busy)
    second = pool.allocate(8 * PAGE, stream=idle)
    gate = Gate(first.handle, 8 * PAGE)
    busy.submit(gate)
    second.close()
    pool.trim()
    assert supplier.out_bytes < 16 * PAGE
    assert not gate.touched
    gate.open()
    busy.synchronize()
    first.close()


def test_record_stream(pool: Pool, supplier: Supplier) -> None:
    maker, user = Stream(), Stream()
    buffer = pool.allocate(PAGE, stream=maker)
    buffer.record_stream(user)
    gate = Gate(buffer.handle, PAGE)
    user.submit(gate)
    buffer.close()
    assert pool.malloc(PAGE, maker) != 0  # not the same memory: user still works on it
    threading.Timer(0.1, gate.open).start()
    pool.trim()
    assert gate.touched


def test_memory_crosses_streams_only_after_its_work(pool: Pool, supplier: Supplier) -> None:
    first, second = Stream(), Stream()
    address = pool.malloc(4 * PAGE, first)
    gate = Gate(address, 4 * PAGE)
    first.submit(gate)
    pool.free(address)
    other = pool.malloc(4 * PAGE, second)
    assert other != address
    gate.open()
    first.synchronize()
    pool.free(other)
    pool.close()
    assert gate.touched


def test_a_free_on_another_stream(pool: Pool, supplier: Supplier) -> None:
    """free(ptr, stream) names the stream of the last use: that one is waited for."""
    maker, user = Stream(), Stream()
    address = pool.malloc(PAGE, maker)
    gate = Gate(address, PAGE)
    user.submit(gate)
    pool.free(address, user)
    threading.Timer(0.1, gate.open).start()
    pool.trim()
    assert gate.touched


def test_close_waits_for_every_stream(supplier: Supplier) -> None:
    streams = [Stream() for _ in range(4)]
    pool = Pool("host", backing=supplier)
    gates = []
    for stream in streams:
        buffer = pool.allocate(PAGE, stream=stream)
        gates.append(Gate(buffer.handle, PAGE))
        stream.submit(gates[-1])
    for gate in gates:
        threading.Timer(0.05, gate.open).start()
    pool.close()
    assert all(gate.touched for gate in gates)
    assert supplier.out == []


def test_forget_stream_waits_and_lets_the_object_go(pool: Pool) -> None:
    stream = Stream()
    pool.allocate(1000, stream=stream)
    gate = Gate(0, 0)
    stream.submit(gate)
    reference = weakref.ref(stream)
    threading.Timer(0.05, gate.open).start()
    pool.forget_stream(stream)
    assert gate.touched
    del stream, gate
    eventually(lambda: gc.collect() >= 0 and reference() is None)


def test_a_pool_keeps_its_streams_alive(pool: Pool) -> None:
    stream = Stream()
    pool.allocate(1000, stream=stream)
    reference = weakref.ref(stream)
    del stream
    gc.collect()
    assert reference() is not None
    pool.close()
    eventually(lambda: gc.collect() >= 0 and reference() is None)


def test_the_stream_may_be_given_as_its_id(pool: Pool) -> None:
    with Stream() as stream:
        address = pool.malloc(1000, stream.id)
        pool.free(address, stream)


def test_a_worker_may_use_pools(pool: Pool) -> None:
    with Stream() as stream:

        def work() -> None:
            for _ in range(50):
                pool.allocate(PAGE, stream=stream).close()

        stream.submit(work)
        stream.synchronize()
    pool.trim()
    assert pool.stats.used_bytes == 0
