# SPDX-License-Identifier: Apache-2.0
"""Pools against the driver's own figures: what is taken, what comes back, and who may reach it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import growpool
import pytest
from cuda_driver import Counter, Gpu, pattern
from gpu_kit import DRIVER_NOISE, MIB, Supplier, wait_until

pytestmark = pytest.mark.gpu

GIB = 1024 * MIB
NewStream = Callable[..., int]


def near(measured: int, expected: int, tolerance: int = 4 * MIB) -> bool:
    return abs(measured - expected) <= tolerance


# -- figures --


def test_physical_bytes_agree_with_the_driver(gpu: Gpu, supplier: Supplier) -> None:
    before = gpu.free_memory()
    with supplier.pool() as pool:
        assert pool.stats.physical_bytes == 0
        addresses = [pool.malloc(size * MIB) for size in (1, 100, 64, 300, 2)]
        stats = pool.stats
        assert stats.physical_bytes == supplier.made_bytes >= 467 * MIB
        assert stats.used_bytes >= 467 * MIB
        assert near(before - gpu.free_memory(), stats.physical_bytes)
        for address in addresses[1:4]:
            pool.free(address)
        released = pool.trim()
        assert released == stats.physical_bytes - pool.stats.physical_bytes > 0
        assert near(before - gpu.free_memory(), pool.stats.physical_bytes)
        assert pool.trim() == 0
    assert near(gpu.free_memory(), before)


def test_memory_is_back_after_many_pools(gpu: Gpu) -> None:
    """64 times over: a creation reference that nobody drops would show."""
    before = gpu.free_memory()
    for _ in range(64):
        with growpool.Pool("cuda:0") as pool:
            pool.malloc(64 * MIB)
            pool.free(pool.malloc(32 * MIB))
    assert near(gpu.free_memory(), before)


def test_chunks_that_python_drops_are_released(gpu: Gpu) -> None:
    before = gpu.free_memory()
    chunks = [growpool.Chunk.create(32 * MIB, "cuda:0") for _ in range(4)]
    assert near(before - gpu.free_memory(), 128 * MIB)
    chunks.pop().close()
    assert near(before - gpu.free_memory(), 96 * MIB)
    del chunks
    assert near(gpu.free_memory(), before)


def test_free_callback_that_forgets_releases(gpu: Gpu) -> None:
    before = gpu.free_memory()

    def alloc(size: int, device: int, stream: int) -> growpool.Chunk:
        return growpool.Chunk.create(size, device)

    with growpool.Pool("cuda:0", alloc=alloc, free=lambda *unused: None) as pool:
        pool.free(pool.malloc(128 * MIB))
        assert pool.trim() >= 128 * MIB
        assert near(gpu.free_memory(), before)


# -- limits --


def test_limit_holds_and_reports(gpu: Gpu, supplier: Supplier) -> None:
    with supplier.pool(limit="64 MiB") as pool:
        first = pool.malloc(64 * MIB)
        with pytest.raises(growpool.LimitExceededError) as caught:
            pool.malloc(2 * MIB)
        assert caught.value.limit == 64 * MIB
        assert caught.value.size == 2 * MIB
        assert caught.value.physical == 64 * MIB
        pool.set_limit("66 MiB")
        second = pool.malloc(2 * MIB)
        result = pool.set_limit("32 MiB")
        assert result.limit == 32 * MIB
        assert result.physical_bytes == 66 * MIB
        assert result.overage_bytes == 34 * MIB
        pool.free(first)
        pool.free(second)
        pool.trim()
        assert pool.stats.peak_physical_bytes <= 66 * MIB


def test_more_than_the_device_is_out_of_memory(gpu: Gpu) -> None:
    """Asked for in one piece, so that nothing is taken on the way to the refusal."""
    size = (gpu.memory_info()[1] // GIB + 2) * GIB
    before = gpu.free_memory()
    with pytest.raises(growpool.OutOfMemoryError) as caught:
        growpool.Chunk.create(size, "cuda:0")
    assert "CUDA_ERROR_OUT_OF_MEMORY" in str(caught.value)
    with growpool.Pool("cuda:0", chunk_size=size, address_space=2 * size) as pool:
        with pytest.raises(growpool.OutOfMemoryError) as refused:
            pool.malloc(MIB)
        assert not isinstance(refused.value, growpool.LimitExceededError)
        assert pool.stats.physical_bytes == 0
    assert near(gpu.free_memory(), before)


def test_out_of_memory_inside_a_callback_is_a_refusal(gpu: Gpu) -> None:
    huge = (gpu.memory_info()[1] // GIB + 2) * GIB
    asked: list[int] = []

    def alloc(size: int, device: int, stream: int) -> growpool.Chunk:
        asked.append(size)
        return growpool.Chunk.create(huge, device)

    with growpool.Pool("cuda:0", alloc=alloc, free=lambda *unused: None) as pool:
        with pytest.raises(growpool.OutOfMemoryError) as caught:
            pool.malloc(64 * MIB)
        assert isinstance(caught.value.__cause__, growpool.OutOfMemoryError)
        assert 1 <= len(asked) <= 12
        assert pool.stats.physical_bytes == 0


def test_callback_without_memory_is_asked_a_bounded_number_of_times(
    gpu: Gpu, supplier: Supplier
) -> None:
    asked: list[int] = []

    def alloc(size: int, device: int, stream: int) -> growpool.Chunk | None:
        asked.append(size)
        return supplier.alloc(size, device, stream) if size <= 16 * MIB else None

    with growpool.Pool("cuda:0", alloc=alloc, free=supplier.free) as pool:
        address = pool.malloc(64 * MIB)  # halved until the callback agrees
        assert sum(size > 16 * MIB for size in asked) <= 12
        gpu.fill(0, address, 64 * MIB, 3)
        gpu.synchronize()
        pool.free(address)


# -- who may reach the memory --


def test_host_numa_memory_is_shared_with_the_cpu(gpu: Gpu, counter: Counter) -> None:
    before = gpu.free_memory()
    words = MIB // 4
    with growpool.Pool("cuda:0", backing=growpool.HostNumaBacking()) as pool:
        address = pool.malloc(MIB)
        assert near(gpu.free_memory(), before), "it is host memory, not the device's"
        gpu.fill(0, address, MIB, 77)
        gpu.synchronize()
        seen = (ctypes.c_uint32 * words).from_address(address)
        assert list(seen) == pattern(address, words, 77)
        for i, value in enumerate(pattern(address, words, 78)):
            seen[i] = value
        gpu.verify(0, address, MIB, 78, counter)
        counter.check()
        del seen
        pool.free(address)
        assert pool.trim() >= MIB


def test_caching_backing_keeps_and_gives_back(gpu: Gpu) -> None:
    before = gpu.free_memory()
    cache = growpool.CachingBacking(growpool.DeviceBacking(), keep="64 MiB")
    with growpool.Pool("cuda:0", backing=cache) as pool:
        pool.free(pool.malloc(64 * MIB))
        assert pool.trim() >= 64 * MIB
        assert pool.stats.physical_bytes == 0
        assert cache.cached_bytes == 64 * MIB
        assert near(before - gpu.free_memory(), 64 * MIB), "kept by the backing"
        address = pool.malloc(64 * MIB)
        assert cache.cached_bytes == 0
        assert near(before - gpu.free_memory(), 64 * MIB), "and used again"
        pool.free(address)
        pool.trim()
        assert cache.trim() == 64 * MIB
        assert near(gpu.free_memory(), before)
    assert cache.cached_bytes == 0


def test_two_pools_share_a_caching_backing(gpu: Gpu) -> None:
    """Chunks travel from one pool to the other at other addresses, with access set anew."""
    cache = growpool.CachingBacking(growpool.DeviceBacking(), keep="64 MiB")
    for seed in range(4):
        with growpool.Pool("cuda:0", backing=cache) as pool:
            address = pool.malloc(32 * MIB)
            gpu.fill(0, address, 32 * MIB, seed)
            pool.free(address)
    gpu.synchronize()
    assert cache.trim() == 32 * MIB


def test_works_where_no_context_is_current(gpu: Gpu) -> None:
    """A fresh thread has no context, and has none afterwards; callbacks have the pool's."""
    seen: list[int] = []
    failures: list[BaseException] = []

    def alloc(size: int, device: int, stream: int) -> growpool.Chunk:
        seen.append(gpu.current_context())
        return growpool.Chunk.create(size, device)

    def free(chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
        seen.append(gpu.current_context())

    def work() -> None:
        try:
            assert gpu.current_context() == 0
            with growpool.Pool("cuda:0", alloc=alloc, free=free) as pool:
                address = pool.malloc(8 * MIB)
                assert gpu.current_context() == 0
                gpu.fill(0, address, 8 * MIB, 1)
                pool.free(address)
                assert pool.trim() >= 8 * MIB
            assert gpu.current_context() == 0
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert not failures, failures
    assert len(seen) >= 2
    assert set(seen) == {gpu.context.value}
    gpu.synchronize()


def test_stream_objects_are_understood(gpu: Gpu, supplier: Supplier, new_stream: NewStream) -> None:
    handle = new_stream()

    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, handle

    class Torch:
        cuda_stream = handle

    class CuPy:
        ptr = handle

    with supplier.pool() as pool:
        address = pool.malloc(MIB, handle)
        pool.free(address, handle)
        made = supplier.made
        for stream in (Protocol(), Torch(), CuPy()):
            pool.free(pool.malloc(MIB, stream), stream)
        assert supplier.made == made, "they name one stream, so its memory is used again"
        pool.forget_stream(handle)


def test_own_stream_fills_and_copies(gpu: Gpu, supplier: Supplier) -> None:
    with supplier.pool() as pool, growpool.cuda.Stream("cuda:0") as stream:
        buffer = pool.allocate(MIB, stream=stream)
        copy = pool.allocate(MIB, stream=stream)
        stream.fill(buffer, 0xAB, MIB)
        stream.copy(copy, buffer, MIB)
        stream.synchronize()
        assert gpu.read(copy.handle, MIB) == b"\xab" * MIB
        buffer.close()
        copy.close()
        pool.forget_stream(stream)


# -- wrong arguments --


def test_wrong_streams_are_refused(supplier: Supplier) -> None:
    with supplier.pool() as pool:
        wrongs: list[Any] = ["0", 1.5, object(), True, growpool.host.Stream()]
        for wrong in wrongs:
            with pytest.raises(TypeError):
                pool.malloc(MIB, wrong)
        for wrong_int in (-1, 1 << 64):
            with pytest.raises((ValueError, OverflowError)):
                pool.malloc(MIB, wrong_int)
        assert pool.stats.physical_bytes == 0


def test_wrong_answers_are_refused(supplier: Supplier) -> None:
    held = growpool.Chunk.create(2 * MIB, "cuda:0")
    closed = growpool.Chunk.create(2 * MIB, "cuda:0")
    closed.close()
    host = growpool.Chunk.create(2 * MIB, "host")
    wrong_size = growpool.Chunk.create(4 * MIB, "cuda:0")
    answers: list[tuple[Any, type[Exception]]] = [
        (held.handle, TypeError),
        ("chunk", TypeError),
        (closed, ValueError),
        (host, ValueError),
        (wrong_size, ValueError),
    ]
    for answer, error in answers:
        with growpool.Pool(
            "cuda:0",
            alloc=lambda *unused, answer=answer: answer,
            free=lambda *unused: None,
            chunk_size=2 * MIB,
        ) as pool:
            with pytest.raises(error):
                pool.malloc(MIB)
            assert pool.stats.physical_bytes == 0
    for chunk in (held, host, wrong_size):
        assert not chunk.is_closed and not chunk.is_in_use


def test_foreign_pointers_are_refused(gpu: Gpu, supplier: Supplier) -> None:
    with supplier.pool() as pool, supplier.pool() as other:
        address, foreign = pool.malloc(MIB), other.malloc(MIB)
        for wrong in (foreign, address + 512, 4096):
            with pytest.raises(ValueError):
                pool.free(wrong)
        pool.free(address)
        with pytest.raises(ValueError):
            pool.free(address)
        other.free(foreign)


def test_devices_that_do_not_exist() -> None:
    with pytest.raises(growpool.Error):
        growpool.Pool("cuda:99")
    with pytest.raises(ValueError):
        growpool.Pool("cuda:x")


def test_availability_is_told() -> None:
    assert growpool.is_cuda_available() is True
    assert growpool.cuda_unavailable_reason() in (None, "")


def test_suite_would_see_a_leak(gpu: Gpu) -> None:
    """The check around every test is worth nothing unless it can fail."""
    before = gpu.free_memory()
    chunk = growpool.Chunk.create(2 * DRIVER_NOISE, "cuda:0")
    assert not wait_until(lambda: gpu.free_memory() >= before - DRIVER_NOISE, 0.1)
    chunk.close()
