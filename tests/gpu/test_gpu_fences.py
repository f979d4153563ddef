# SPDX-License-Identifier: Apache-2.0
"""S1 on hardware: nothing is unmapped, and nothing reused, before the work on it is done.

A latch kernel holds a stream for as long as a test wants. Work that touches the memory waits behind
it, so an unmap that comes too early is an illegal address at the next synchronise.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import growpool
import pytest
from cuda_driver import BLOCKING, NON_BLOCKING, Counter, Gpu, Latch
from gpu_kit import MIB, Supplier, wait_until

pytestmark = pytest.mark.gpu

SIZE = 8 * MIB
LEGACY, LEGACY_BY_NAME, PER_THREAD = 0, 1, 2
# Long enough for a wait that does not wait to show, far below the 20 s of the latch.
A_WHILE = 0.3
AT_ONCE = 5.0

NewStream = Callable[..., int]


def overlaps(first: int, first_size: int, second: int, second_size: int) -> bool:
    return first < second + second_size and second < first + first_size


def free_under_work(
    gpu: Gpu, pool: growpool.Pool, latch: Latch, stream: int, counter: Counter | None = None
) -> int:
    """Allocates, holds the stream, enqueues work on the block behind that, and frees it."""
    address = pool.malloc(SIZE, stream)
    latch.hold(stream)
    gpu.fill(stream, address, SIZE, 1)
    if counter is not None:
        gpu.verify(stream, address, SIZE, 1, counter)
    pool.free(address, stream)
    return address


@pytest.fixture(params=["non_blocking", "blocking", "legacy", "legacy_by_name", "per_thread"])
def stream(request: pytest.FixtureRequest, new_stream: NewStream) -> int:
    match request.param:
        case "non_blocking":
            return new_stream(NON_BLOCKING)
        case "blocking":
            return new_stream(BLOCKING)
        case "legacy":
            return LEGACY
        case "legacy_by_name":
            return LEGACY_BY_NAME
        case _:
            return PER_THREAD


def test_latch_holds_its_stream(gpu: Gpu, latch: Latch, stream: int) -> None:
    """What every test here rests on."""
    latch.hold(stream)
    time.sleep(A_WHILE)
    assert not gpu.is_idle(stream)
    latch.open()
    gpu.synchronize()
    assert gpu.is_idle(stream)


def test_trim_returns_only_after_the_work(
    gpu: Gpu, latch: Latch, supplier: Supplier, stream: int
) -> None:
    with supplier.pool() as pool, ThreadPoolExecutor(1) as executor:
        free_under_work(gpu, pool, latch, stream)
        trimming = executor.submit(pool.trim)
        time.sleep(A_WHILE)
        assert not trimming.done(), "trim returned under a running kernel"
        assert supplier.freed == 0
        latch.open()
        released = trimming.result(timeout=30)
        assert released == supplier.freed_bytes >= SIZE
        assert pool.stats.physical_bytes == 0
        assert pool.stats.wait_count >= 1
    gpu.synchronize()


def test_trim_without_waiting_returns_at_once(
    gpu: Gpu, latch: Latch, supplier: Supplier, stream: int
) -> None:
    with supplier.pool() as pool:
        free_under_work(gpu, pool, latch, stream)
        start = time.monotonic()
        retiring = pool.trim(wait=False)
        assert time.monotonic() - start < AT_ONCE
        assert retiring >= SIZE
        time.sleep(A_WHILE)
        assert supplier.freed == 0, "a chunk went back under a running kernel"
        assert pool.stats.retiring_bytes == retiring
        assert pool.stats.physical_bytes >= retiring
        latch.open()
        # Nobody calls the pool: the reaper sees the fence pass and the chunk is delivered.
        assert wait_until(lambda: supplier.freed_bytes == retiring)
        pool.drain()
        assert pool.stats.retiring_bytes == 0
        assert pool.stats.physical_bytes == 0
    gpu.synchronize()


def test_close_waits_for_the_work(
    gpu: Gpu, latch: Latch, supplier: Supplier, new_stream: NewStream
) -> None:
    pool = supplier.pool()
    free_under_work(gpu, pool, latch, new_stream())
    with ThreadPoolExecutor(1) as executor:
        closing = executor.submit(pool.close)
        time.sleep(A_WHILE)
        assert not closing.done()
        assert supplier.freed == 0
        latch.open()
        closing.result(timeout=30)
    assert supplier.freed == supplier.made
    gpu.synchronize()


def test_close_waits_for_the_work_on_live_blocks(
    gpu: Gpu, latch: Latch, supplier: Supplier, new_stream: NewStream
) -> None:
    pool = supplier.pool()
    stream = new_stream()
    address = pool.malloc(SIZE, stream)
    latch.hold(stream)
    gpu.fill(stream, address, SIZE, 1)
    with ThreadPoolExecutor(1) as executor:
        closing = executor.submit(pool.close)
        time.sleep(A_WHILE)
        assert not closing.done()
        assert supplier.freed == 0
        latch.open()
        closing.result(timeout=30)
    gpu.synchronize()


def test_retiring_memory_is_wanted_again(
    gpu: Gpu, latch: Latch, supplier: Supplier, counter: Counter, new_stream: NewStream
) -> None:
    stream = new_stream()
    with supplier.pool() as pool:
        free_under_work(gpu, pool, latch, stream)
        assert pool.trim(wait=False) >= SIZE
        made = supplier.made
        address = pool.malloc(SIZE, stream)
        assert supplier.made == made, "the pool grew although its own memory was retiring"
        gpu.fill(stream, address, SIZE, 2)
        gpu.verify(stream, address, SIZE, 2, counter)
        time.sleep(A_WHILE)
        assert supplier.freed == 0
        latch.open()
        counter.check()
        time.sleep(A_WHILE)
        assert supplier.freed == 0, "memory in use was given back"
        pool.free(address, stream)


def test_same_stream_reuses_at_once(
    gpu: Gpu, latch: Latch, supplier: Supplier, counter: Counter, new_stream: NewStream
) -> None:
    stream = new_stream()
    with supplier.pool() as pool:
        free_under_work(gpu, pool, latch, stream)
        made = supplier.made
        start = time.monotonic()
        address = pool.malloc(SIZE, stream)
        assert time.monotonic() - start < AT_ONCE
        assert supplier.made == made
        gpu.fill(stream, address, SIZE, 2)
        gpu.verify(stream, address, SIZE, 2, counter)
        latch.open()
        counter.check()
        pool.free(address, stream)


def test_other_stream_gets_other_memory_while_work_is_pending(
    gpu: Gpu, latch: Latch, supplier: Supplier, counter: Counter, new_stream: NewStream
) -> None:
    first, second = new_stream(), new_stream()
    with supplier.pool() as pool:
        held = free_under_work(gpu, pool, latch, first, counter)
        start = time.monotonic()
        address = pool.malloc(SIZE, second)
        assert time.monotonic() - start < AT_ONCE
        assert not overlaps(held, SIZE, address, SIZE)
        gpu.fill(second, address, SIZE, 2)
        gpu.synchronize_stream(second)
        latch.open()
        gpu.verify(second, address, SIZE, 2, counter)
        counter.check()
        pool.free(address, second)


def test_other_stream_waits_when_the_limit_leaves_nothing_else(
    gpu: Gpu, latch: Latch, supplier: Supplier, counter: Counter, new_stream: NewStream
) -> None:
    first, second = new_stream(), new_stream()
    with supplier.pool(limit=SIZE) as pool, ThreadPoolExecutor(1) as executor:
        free_under_work(gpu, pool, latch, first, counter)
        asking = executor.submit(pool.malloc, SIZE, second)
        time.sleep(A_WHILE)
        assert not asking.done(), "memory was handed over under a running kernel"
        latch.open()
        address = asking.result(timeout=30)
        gpu.fill(second, address, SIZE, 2)
        gpu.verify(second, address, SIZE, 2, counter)
        counter.check()
        pool.free(address, second)
        assert pool.stats.peak_physical_bytes <= SIZE


def test_recorded_stream_is_waited_for(
    gpu: Gpu, latch: Latch, supplier: Supplier, new_stream: NewStream
) -> None:
    owner, user = new_stream(), new_stream()
    with supplier.pool() as pool:
        buffer = pool.allocate(SIZE, stream=owner)
        address = buffer.handle
        latch.hold(user)
        gpu.fill(user, address, SIZE, 1)
        buffer.record_stream(user)
        buffer.close()
        other = pool.malloc(SIZE, owner)
        assert not overlaps(address, SIZE, other, SIZE), "the owner took it back under its user"
        pool.free(other, owner)
        assert pool.trim(wait=False) > 0
        time.sleep(A_WHILE)
        assert supplier.made_bytes - supplier.freed_bytes >= SIZE
        latch.open()
        pool.drain()
        assert supplier.freed == supplier.made
    gpu.synchronize()


def test_block_freed_on_another_stream(
    gpu: Gpu, latch: Latch, supplier: Supplier, counter: Counter, new_stream: NewStream
) -> None:
    first, second = new_stream(), new_stream()
    with supplier.pool() as pool:
        address = pool.malloc(SIZE, first)
        latch.hold(first)
        gpu.fill(first, address, SIZE, 1)
        gpu.wait_for(second, first)
        gpu.verify(second, address, SIZE, 1, counter)
        pool.free(address, second)
        pool.trim(wait=False)
        time.sleep(A_WHILE)
        assert supplier.freed == 0
        latch.open()
        pool.drain()
        assert supplier.freed == supplier.made
    counter.check()


@pytest.mark.parametrize("ended", [False, True], ids=["thread_lives", "thread_ended"])
def test_per_thread_stream_freed_on_another_thread(
    gpu: Gpu, latch: Latch, supplier: Supplier, ended: bool
) -> None:
    """Only its own thread can put a fence on it, so its memory has an unknown owner."""
    working, over = threading.Event(), threading.Event()
    addresses: list[int] = []

    def work() -> None:
        addresses.append(pool.malloc(SIZE, PER_THREAD))
        latch.hold(PER_THREAD)
        gpu.fill(PER_THREAD, addresses[0], SIZE, 1)
        working.set()
        if not ended:
            over.wait(60)

    with supplier.pool() as pool, ThreadPoolExecutor(1) as executor:
        thread = threading.Thread(target=work)
        thread.start()
        try:
            assert working.wait(30)
            if ended:
                thread.join(30)
            pool.free(addresses[0])
            trimming = executor.submit(pool.trim)
            time.sleep(A_WHILE)
            assert not trimming.done(), "trim returned under a running kernel"
            assert supplier.freed == 0
            latch.open()
            assert trimming.result(timeout=30) == supplier.freed_bytes >= SIZE
        finally:
            latch.open()
            over.set()
            thread.join(30)
    gpu.synchronize()


def test_allocate_launch_free_with_trims(
    gpu: Gpu, supplier: Supplier, counter: Counter, new_stream: NewStream
) -> None:
    """200 times, in a pool that gives back at once: no fault, right contents."""
    streams = [LEGACY, new_stream(BLOCKING), new_stream(), new_stream()]
    with supplier.pool(limit="512 MiB") as pool:
        for i in range(200):
            stream = streams[i % len(streams)]
            size = (1 + i % 7) * MIB
            address = pool.malloc(size, stream)
            gpu.delay(stream, 50_000 * (i % 3))
            gpu.fill(stream, address, size, i)
            gpu.delay(stream, 20_000 * (i % 5))
            gpu.verify(stream, address, size, i, counter)
            pool.free(address, stream)
            pool.trim(wait=i % 10 == 0)
        counter.check()
        assert supplier.freed > 0
        pool.trim()
        assert pool.stats.physical_bytes == 0


def test_stream_is_destroyed_after_forget_stream(
    gpu: Gpu, latch: Latch, supplier: Supplier
) -> None:
    """The pool lets go of the stream only when its work is done, and never touches it again."""
    stream = gpu.create_stream()
    with supplier.pool() as pool, ThreadPoolExecutor(1) as executor:
        alive = pool.malloc(SIZE, stream)
        free_under_work(gpu, pool, latch, stream)
        forgetting = executor.submit(pool.forget_stream, stream)
        time.sleep(A_WHILE)
        assert not forgetting.done()
        latch.open()
        forgetting.result(timeout=30)
        gpu.destroy_stream(stream)
        pool.trim()
        pool.free(alive)
        pool.trim()
        assert pool.stats.physical_bytes == 0
    gpu.synchronize()


def test_new_streams_with_old_handles_are_new(
    gpu: Gpu, supplier: Supplier, counter: Counter
) -> None:
    """Handles come back after a destroy; contents stay right whoever has them now."""
    with supplier.pool(limit="256 MiB") as pool:
        for i in range(40):
            stream = gpu.create_stream()
            address = pool.malloc(SIZE, stream)
            gpu.fill(stream, address, SIZE, i)
            gpu.delay(stream, 100_000)
            gpu.verify(stream, address, SIZE, i, counter)
            pool.free(address, stream)
            if i % 4 == 0:
                pool.trim(wait=False)
            pool.forget_stream(stream)
            gpu.destroy_stream(stream)
        counter.check()
        pool.trim()
        assert pool.stats.physical_bytes == 0
