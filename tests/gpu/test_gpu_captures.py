# SPDX-License-Identifier: Apache-2.0
"""S3 on hardware: growing, trimming and refusing never invalidate somebody's stream capture."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import growpool
import pytest
from cuda_driver import BLOCKING, GLOBAL, RELAXED, THREAD_LOCAL, Capture, Counter, Gpu
from gpu_kit import MIB, Supplier

pytestmark = pytest.mark.gpu

SIZE = 4 * MIB
NewStream = Callable[..., int]


@pytest.fixture(params=[GLOBAL, THREAD_LOCAL, RELAXED], ids=["global", "thread_local", "relaxed"])
def mode(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def target(gpu: Gpu, device_memory_is_back: None) -> Iterator[int]:
    """Memory of the graph's own, made before any capture: cuMemAlloc is not allowed in one."""
    address = gpu.allocate(SIZE)
    yield address
    gpu.release(address)


def finish(
    gpu: Gpu, capture: Capture, stream: int, target: int, seed: int, counter: Counter
) -> None:
    """Ends the capture, which raises if it was invalidated, and runs what it recorded."""
    gpu.verify(stream, target, SIZE, seed, counter)
    capture.end()
    capture.launch(stream)
    counter.check()
    capture.close()


def test_capture_survives_growth_and_trims(
    gpu: Gpu, supplier: Supplier, counter: Counter, new_stream: NewStream, target: int, mode: int
) -> None:
    captured, other = new_stream(), new_stream()
    with supplier.pool(limit="256 MiB") as pool:
        capture = Capture(gpu, captured, mode)
        gpu.fill(captured, target, SIZE, 5)
        for i in range(1, 5):
            address = pool.malloc(i * SIZE, other)
            gpu.fill(other, address, i * SIZE, i)
            pool.free(address, other)
            assert pool.trim() >= i * SIZE
            address = pool.malloc(i * SIZE, other)
            gpu.fill(other, address, i * SIZE, i)
            pool.free(address, other)
            pool.trim(wait=False)
        pool.drain()
        assert supplier.made == supplier.freed >= 8
        finish(gpu, capture, captured, target, 5, counter)


def test_capture_survives_a_limit_and_its_reclaim(
    gpu: Gpu, supplier: Supplier, counter: Counter, new_stream: NewStream, target: int, mode: int
) -> None:
    """The ladder's waits, too, are made in relaxed mode."""
    captured, first, second = new_stream(), new_stream(), new_stream()
    with supplier.pool(limit=4 * SIZE) as pool:
        capture = Capture(gpu, captured, mode)
        gpu.fill(captured, target, SIZE, 6)
        address = pool.malloc(4 * SIZE, first)
        gpu.delay(first, 10_000_000)
        gpu.fill(first, address, 4 * SIZE, 1)
        pool.free(address, first)
        address = pool.malloc(4 * SIZE, second)
        with pytest.raises(growpool.LimitExceededError):
            pool.malloc(SIZE, first)
        pool.free(address, second)
        finish(gpu, capture, captured, target, 6, counter)


def test_capture_survives_create_and_close_of_a_pool(
    gpu: Gpu, supplier: Supplier, counter: Counter, new_stream: NewStream, target: int, mode: int
) -> None:
    captured, other = new_stream(), new_stream()
    capture = Capture(gpu, captured, mode)
    gpu.fill(captured, target, SIZE, 7)
    with supplier.pool() as pool:
        address = pool.malloc(SIZE, other)
        gpu.fill(other, address, SIZE, 1)
        buffer = pool.allocate(SIZE, stream=other)
        buffer.close()
    finish(gpu, capture, captured, target, 7, counter)


def test_capture_on_a_blocking_stream_survives_legacy_trims(
    gpu: Gpu, supplier: Supplier, counter: Counter, new_stream: NewStream, target: int, mode: int
) -> None:
    """The legacy stream answers every question with an error meanwhile, and asking one wrongly
    invalidates the capture even in relaxed mode."""
    captured = new_stream(BLOCKING)
    with supplier.pool() as pool:
        freed_before, freed_inside = pool.malloc(SIZE), pool.malloc(SIZE)
        gpu.fill(0, freed_before, SIZE, 1)
        gpu.fill(0, freed_inside, SIZE, 1)
        pool.free(freed_before)
        gpu.synchronize()
        capture = Capture(gpu, captured, mode)
        gpu.fill(captured, target, SIZE, 8)
        pool.free(freed_inside)
        # The legacy stream is part of no capture, so what it gets is an ordinary block.
        pool.free(pool.malloc(SIZE))
        pool.allocate(SIZE).close()
        physical = pool.stats.physical_bytes
        with pytest.raises(growpool.CaptureError):
            pool.trim()
        assert pool.stats.physical_bytes == physical
        try:
            pool.trim(wait=False)
        except growpool.CaptureError:
            pass  # either answer is right: deferring to the reaper, or refusing
        time.sleep(0.3)  # the reaper must leave the stream alone as well
        assert supplier.freed == 0
        finish(gpu, capture, captured, target, 8, counter)
        pool.trim()
        assert pool.stats.physical_bytes == 0


def test_trim_that_needs_the_capturing_stream_changes_nothing(
    gpu: Gpu, supplier: Supplier, counter: Counter, new_stream: NewStream, target: int, mode: int
) -> None:
    captured = new_stream()
    with supplier.pool() as pool:
        address = pool.malloc(SIZE, captured)
        gpu.fill(captured, address, SIZE, 1)
        pool.free(address, captured)
        gpu.synchronize()
        capture = Capture(gpu, captured, mode)
        gpu.fill(captured, target, SIZE, 9)
        before = pool.stats
        with pytest.raises(growpool.CaptureError):
            pool.trim()
        assert pool.stats.physical_bytes == before.physical_bytes
        assert pool.stats.free_bytes == before.free_bytes
        assert supplier.freed == 0
        finish(gpu, capture, captured, target, 9, counter)
        assert pool.trim() == supplier.freed_bytes > 0


def test_close_that_needs_the_capturing_stream_changes_nothing(
    gpu: Gpu, supplier: Supplier, counter: Counter, new_stream: NewStream, target: int
) -> None:
    captured = new_stream()
    pool = supplier.pool()
    address = pool.malloc(SIZE, captured)
    capture = Capture(gpu, captured, GLOBAL)
    gpu.fill(captured, target, SIZE, 3)
    with pytest.raises(growpool.CaptureError):
        pool.close()
    finish(gpu, capture, captured, target, 3, counter)
    gpu.fill(captured, address, SIZE, 4)  # the block is alive still
    gpu.verify(captured, address, SIZE, 4, counter)
    counter.check()
    pool.close()


def test_callback_runs_in_relaxed_mode(
    gpu: Gpu, supplier: Supplier, counter: Counter, new_stream: NewStream, target: int
) -> None:
    """A callback may wait for a stream of its own while another captures in global mode."""
    captured, other, own = new_stream(), new_stream(), new_stream()

    def alloc(size: int, device: int, stream: int) -> growpool.Chunk:
        gpu.synchronize_stream(own)
        return supplier.alloc(size, device, stream)

    with growpool.Pool("cuda:0", alloc=alloc, free=supplier.free) as pool:
        capture = Capture(gpu, captured, GLOBAL)
        gpu.fill(captured, target, SIZE, 1)
        pool.free(pool.malloc(SIZE, other), other)
        pool.trim()
        finish(gpu, capture, captured, target, 1, counter)
