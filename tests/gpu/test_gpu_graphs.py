# SPDX-License-Identifier: Apache-2.0
"""Memory of captures on hardware: a graph replays over it when it likes; nobody else gets it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import growpool
import pytest
from cuda_driver import BLOCKING, GLOBAL, RELAXED, THREAD_LOCAL, Capture, Counter, CudaError, Gpu
from gpu_kit import MIB, Supplier, wait_until

pytestmark = pytest.mark.gpu

SIZE = 4 * MIB
NewStream = Callable[..., int]


@pytest.fixture(params=[GLOBAL, THREAD_LOCAL, RELAXED], ids=["global", "thread_local", "relaxed"])
def mode(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def pool(supplier: Supplier, new_stream: NewStream) -> Iterator[growpool.Pool]:
    with supplier.pool(chunk_size=SIZE) as pool:
        yield pool


def write_and_check(gpu: Gpu, stream: int, address: int, seed: int, counter: Counter) -> None:
    gpu.fill(stream, address, SIZE, seed)
    gpu.verify(stream, address, SIZE, seed, counter)


def scribble(gpu: Gpu, pool: growpool.Pool, stream: int, count: int) -> list[int]:
    """Takes and overwrites memory as others would; the addresses that they got."""
    blocks = [pool.malloc(SIZE, stream) for _ in range(count)]
    for block in blocks:
        gpu.fill(stream, block, SIZE, 999)
    for block in blocks:
        pool.free(block, stream)
    return blocks


def test_a_graph_replays_over_memory_of_its_capture(
    gpu: Gpu,
    pool: growpool.Pool,
    supplier: Supplier,
    counter: Counter,
    new_stream: NewStream,
    mode: int,
) -> None:
    captured, other = new_stream(), new_stream()
    pool.free(pool.malloc(SIZE, captured), captured)  # lies ready, with work of its own pending
    capture = Capture(gpu, captured, mode)
    first = pool.malloc(SIZE, captured)  # grows inside the capture, or takes what has passed
    write_and_check(gpu, captured, first, 1, counter)
    second = pool.malloc(SIZE, captured)
    write_and_check(gpu, captured, second, 2, counter)
    gpu.verify(captured, first, SIZE, 1, counter)
    pool.free(second, captured)
    third = pool.malloc(SIZE, captured)
    assert third == second  # reused inside the capture
    write_and_check(gpu, captured, third, 3, counter)
    pool.free(third, captured)
    pool.free(first, captured)
    capture.end()
    for _ in range(10):
        capture.launch(captured)
        assert not {first, second} & set(scribble(gpu, pool, other, 4))
        pool.trim()
        capture.launch(other)
    counter.expected *= 20  # launches
    counter.check()
    with pytest.raises(growpool.CaptureError):
        pool.close()
    capture.close()
    gpu.synchronize()
    assert wait_until(lambda: pool.trim() > 0 or pool.stats.physical_bytes == 0)
    assert wait_until(lambda: pool.trim() == 0 and pool.stats.physical_bytes == 0)
    assert supplier.made == supplier.freed


def test_memory_stays_until_the_last_launch_has_completed(
    gpu: Gpu, pool: growpool.Pool, counter: Counter, new_stream: NewStream, latch: object
) -> None:
    captured = new_stream()
    capture = Capture(gpu, captured, RELAXED)
    block = pool.malloc(SIZE, captured)
    write_and_check(gpu, captured, block, 5, counter)
    pool.free(block, captured)
    capture.end()
    latch.hold(captured)  # type: ignore[attr-defined]
    capture.launch(captured)
    capture.close()  # the graph is gone, and a launch of it has not begun
    assert block not in scribble(gpu, pool, new_stream(), 3)
    latch.open()  # type: ignore[attr-defined]
    gpu.synchronize()
    counter.check()
    assert wait_until(lambda: (pool.trim(), pool.stats.physical_bytes)[1] == 0)


def test_a_stream_is_met_while_it_captures(
    gpu: Gpu, pool: growpool.Pool, counter: Counter, new_stream: NewStream, mode: int
) -> None:
    captured = new_stream()
    capture = Capture(gpu, captured, mode)
    block = pool.malloc(SIZE, captured)
    write_and_check(gpu, captured, block, 6, counter)
    capture.end()
    capture.launch(captured)
    gpu.fill(captured, block, SIZE, 7)  # the block is alive, and used outside the graph too
    pool.free(block, captured)
    counter.check()
    capture.close()
    assert wait_until(lambda: (pool.trim(), pool.stats.physical_bytes)[1] == 0)


def test_another_thread_allocates_while_this_one_captures(
    gpu: Gpu, pool: growpool.Pool, counter: Counter, new_stream: NewStream, mode: int
) -> None:
    captured, other = new_stream(), new_stream()
    capture = Capture(gpu, captured, mode)
    mine = pool.malloc(SIZE, captured)
    write_and_check(gpu, captured, mine, 1, counter)
    got: list[list[int]] = []
    thread = threading.Thread(target=lambda: got.append(scribble(gpu, pool, other, 5)))
    thread.start()
    thread.join()
    assert mine not in got[0]
    capture.end()
    capture.launch(captured)
    counter.check()
    capture.close()
    pool.free(mine, captured)


def test_two_captures_at_once(
    gpu: Gpu, pool: growpool.Pool, counter: Counter, new_stream: NewStream
) -> None:
    streams = [new_stream(), new_stream()]
    captures = [Capture(gpu, stream, RELAXED) for stream in streams]
    blocks = []
    for round_ in range(3):
        for seed, stream in enumerate(streams):
            block = pool.malloc(SIZE, stream)
            write_and_check(gpu, stream, block, 10 * round_ + seed, counter)
            pool.free(block, stream)
            blocks.append(block)
    assert len(set(blocks)) == 2 and blocks[0] == blocks[2] != blocks[1] == blocks[3]
    for capture in captures:
        capture.end()
    for _ in range(5):
        for capture, stream in zip(captures, streams, strict=True):
            capture.launch(stream)
    words = counter.expected // 2  # of each capture
    counter.expected = 5 * 2 * words
    counter.check()
    captures[0].close()
    gpu.synchronize()
    assert wait_until(lambda: (pool.trim(), pool.stats.physical_bytes)[1] == SIZE)
    captures[1].launch(streams[0])
    counter.expected += words
    counter.check()
    captures[1].close()
    gpu.synchronize()
    assert wait_until(lambda: (pool.trim(), pool.stats.physical_bytes)[1] == 0)


def test_an_aborted_capture_gives_its_memory_back(
    gpu: Gpu, pool: growpool.Pool, new_stream: NewStream, mode: int
) -> None:
    captured = new_stream()
    capture = Capture(gpu, captured, mode)
    pool.free(pool.malloc(SIZE, captured), captured)
    with pytest.raises(CudaError):
        gpu.synchronize_stream(captured)  # invalidates it
    with pytest.raises(growpool.CaptureError):
        pool.malloc(SIZE, captured)
    with pytest.raises(CudaError):
        capture.end()
    assert wait_until(lambda: (pool.trim(), pool.stats.physical_bytes)[1] == 0)
    pool.free(pool.malloc(SIZE, captured), captured)


def test_a_blocking_stream_captures_beside_legacy_memory(
    gpu: Gpu, pool: growpool.Pool, counter: Counter, new_stream: NewStream, mode: int
) -> None:
    captured = new_stream(BLOCKING)
    legacy = pool.malloc(SIZE)
    gpu.fill(0, legacy, SIZE, 1)
    pool.free(legacy)
    capture = Capture(gpu, captured, mode)
    block = pool.malloc(SIZE, captured)
    assert block != legacy  # its work cannot be asked about now
    write_and_check(gpu, captured, block, 8, counter)
    pool.free(block, captured)
    with pytest.raises(growpool.CaptureError):
        pool.trim()
    capture.end()
    capture.launch(captured)
    counter.check()
    capture.close()


def test_a_growable_grows_inside_a_capture(
    gpu: Gpu, pool: growpool.Pool, counter: Counter, new_stream: NewStream, mode: int
) -> None:
    captured = new_stream()
    with pool.growable(8 * SIZE, stream=captured) as growable:
        growable.resize(SIZE)
        gpu.fill(captured, growable.handle, SIZE, 1)
        capture = Capture(gpu, captured, mode)
        growable.resize(2 * SIZE)
        write_and_check(gpu, captured, growable.handle + SIZE, 2, counter)
        with pytest.raises(growpool.CaptureError):
            growable.resize(0)
        assert growable.size == 2 * SIZE
        capture.end()
        capture.launch(captured)
        gpu.verify(captured, growable.handle, SIZE, 1, counter)
        counter.check()
        capture.close()
        assert growable.resize(0).released_bytes == 2 * SIZE


def test_a_dropped_pool_waits_for_its_graphs(
    gpu: Gpu, supplier: Supplier, counter: Counter, new_stream: NewStream
) -> None:
    captured = new_stream()
    pool = supplier.pool(chunk_size=SIZE)
    capture = Capture(gpu, captured, RELAXED)
    block = pool.malloc(SIZE, captured)
    write_and_check(gpu, captured, block, 4, counter)
    capture.end()
    del pool
    for _ in range(3):
        capture.launch(captured)
    counter.expected *= 3
    counter.check()
    assert supplier.freed == 0
    capture.close()
    gpu.synchronize()
    assert wait_until(lambda: supplier.freed == supplier.made == 1)
