# SPDX-License-Identifier: Apache-2.0
"""Backing objects: Python ones, the built-in ones, and compositions of both."""

from __future__ import annotations

import gc
from typing import Any

import growpool
import pytest
from helpers import PAGE, Supplier, eventually

Pool = growpool.Pool


def test_an_object_with_the_two_methods(supplier: Supplier) -> None:
    with Pool("host", backing=supplier) as pool:
        pool.allocate(1000)
        assert supplier.given == 1


def test_the_methods_are_looked_up_once_and_the_object_lives() -> None:
    backing: Any = Supplier()
    out = backing.out
    with Pool("host", backing=backing) as pool:
        backing.alloc = None
        del backing
        gc.collect()
        pool.allocate(1000)
        assert len(out) == 1
    assert out == []


@pytest.mark.parametrize("attribute", ["alloc", "free"])
def test_a_backing_with_one_method_is_refused(attribute: str) -> None:
    backing = type("Half", (), {attribute: lambda *_: None})()
    with pytest.raises(TypeError, match="has no"):
        Pool("host", backing=backing)


def test_device_backing() -> None:
    backing = growpool.DeviceBacking()
    with Pool("host", backing=backing) as pool:
        view = memoryview(pool.allocate(1000))
        view[:] = b"x" * 1000
        view.release()
    chunk = backing.alloc(PAGE, "host")
    assert (chunk.size, chunk.device) == (PAGE, "host")
    backing.free(chunk, PAGE, -1, 0)
    with pytest.raises(TypeError, match="unexpected|at most"):
        growpool.DeviceBacking(1)  # type: ignore[call-arg]


def test_device_backing_as_part_of_a_callback() -> None:
    inner = growpool.DeviceBacking()
    sizes: list[int] = []

    class Counting:
        def alloc(self, size: int, device: int, stream: int) -> growpool.Chunk:
            sizes.append(size)
            return inner.alloc(size, device, stream)

        def free(self, chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
            sizes.remove(size)
            inner.free(chunk, size, device, stream)

    with Pool("host", backing=Counting()) as pool:
        pool.allocate(1000)
        assert len(sizes) == 1
    assert sizes == []


def test_host_numa_backing_says_where_it_does_not_work(sim: Any) -> None:
    backing = growpool.HostNumaBacking()
    with Pool("host", backing=backing) as pool:
        try:
            pool.allocate(1000)
        except growpool.DriverError as error:
            assert len(str(error)) > 20


def test_caching_over_python_keeps_and_reuses(supplier: Supplier) -> None:
    caching = growpool.CachingBacking(supplier, keep=8 * PAGE)
    assert (caching.keep, caching.cached_bytes) == (8 * PAGE, 0)
    with Pool("host", backing=caching, chunk_size=2 * PAGE) as pool:
        pool.allocate(4 * PAGE).close()
        assert pool.trim() == 4 * PAGE
        assert caching.cached_bytes == 4 * PAGE
        assert supplier.taken == 0
        pool.allocate(4 * PAGE)
        assert supplier.given == 2
        assert caching.cached_bytes == 0
    assert caching.cached_bytes == 4 * PAGE
    assert caching.trim(2 * PAGE) == 2 * PAGE
    assert caching.trim() == 2 * PAGE
    assert supplier.out == []


def test_caching_gives_the_oldest_back_beyond_its_bound(supplier: Supplier) -> None:
    caching = growpool.CachingBacking(supplier, keep=PAGE)
    with Pool("host", backing=caching, chunk_size=PAGE) as pool:
        pool.allocate(4 * PAGE)
    assert caching.cached_bytes == PAGE
    assert supplier.taken == 3
    caching.trim()


def test_caching_asks_again_after_giving_everything_back(supplier: Supplier) -> None:
    class Small(Supplier):
        def alloc(self, size: int, device: int, stream: int) -> growpool.Chunk | None:
            return None if self.out_bytes + size > 4 * PAGE else super().alloc(size, device, stream)

    small = Small()
    caching = growpool.CachingBacking(small, keep="1 GiB")
    with Pool("host", backing=caching, chunk_size=PAGE) as pool:
        pool.allocate(4 * PAGE).close()
        pool.trim()
    assert caching.cached_bytes == 4 * PAGE
    chunk = caching.alloc(2 * PAGE, "host")
    assert caching.cached_bytes == 0
    caching.free(chunk, 2 * PAGE, "host")
    caching.trim()
    assert small.out == []


def test_caching_over_caching_over_device() -> None:
    inner = growpool.CachingBacking(growpool.DeviceBacking(), keep=64 * PAGE)
    outer = growpool.CachingBacking(inner, keep=PAGE)
    with Pool("host", backing=outer, chunk_size=PAGE) as pool:
        pool.allocate(4 * PAGE)
    assert (outer.cached_bytes, inner.cached_bytes) == (PAGE, 3 * PAGE)
    outer.trim()
    assert inner.cached_bytes == 4 * PAGE
    inner.trim()


def test_a_dropped_caching_backing_gives_back_what_it_keeps(supplier: Supplier) -> None:
    caching = growpool.CachingBacking(supplier, keep="1 GiB")
    with Pool("host", backing=caching) as pool:
        pool.allocate(1000)
    del pool
    assert len(supplier.out) == 1
    del caching
    gc.collect()
    eventually(lambda: supplier.out == [])


def test_a_caching_backing_lives_as_long_as_its_pool(supplier: Supplier) -> None:
    pool = Pool("host", backing=growpool.CachingBacking(supplier, keep="1 GiB"))
    gc.collect()
    pool.allocate(1000)
    pool.close()
    del pool
    gc.collect()
    eventually(lambda: supplier.out == [])


def test_exceptions_pass_a_caching_backing_unchanged(supplier: Supplier) -> None:
    mine = ZeroDivisionError("mine")

    class Raising(Supplier):
        failing = False

        def alloc(self, size: int, device: int, stream: int) -> growpool.Chunk | None:
            if self.failing:
                raise mine
            return super().alloc(size, device, stream)

        def free(self, chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
            if self.failing:
                raise mine
            super().free(chunk, size, device, stream)

    raising = Raising()
    caching = growpool.CachingBacking(raising, keep="1 GiB")
    chunk = caching.alloc(PAGE, "host")
    caching.free(chunk, PAGE, "host")
    raising.failing = True
    with pytest.raises(ZeroDivisionError) as caught:
        caching.trim()
    assert caught.value is mine
    assert caching.cached_bytes == PAGE
    with pytest.raises(ZeroDivisionError) as caught, Pool("host", backing=caching) as pool:
        pool.allocate(64 * PAGE)
    assert caught.value is mine
    raising.failing = False
    assert caching.trim() == PAGE
    assert raising.out == []


def test_memory_errors_pass_as_out_of_memory() -> None:
    def alloc(*_: Any) -> growpool.Chunk:
        raise MemoryError("inner")

    class Empty:
        def __init__(self) -> None:
            self.alloc = alloc

        def free(self, *_: Any) -> None:
            raise AssertionError

    caching = growpool.CachingBacking(Empty(), keep=0)
    with pytest.raises(growpool.OutOfMemoryError) as caught:
        caching.alloc(PAGE, "host")
    assert str(caught.value.__cause__) == "inner"


def test_bad_arguments_of_backings() -> None:
    backing = growpool.DeviceBacking()
    chunk = backing.alloc(PAGE, "host")
    with pytest.raises(ValueError, match="bytes, not"):
        backing.free(chunk, 2 * PAGE, "host")
    with pytest.raises(TypeError, match="must be a growpool.Chunk"):
        backing.free("chunk", PAGE, "host")  # type: ignore[arg-type]
    for size in (0, 1, PAGE + 1):
        with pytest.raises(ValueError):
            backing.alloc(size, "host")
    chunk.close()
    with pytest.raises(ValueError, match="closed"):
        backing.free(chunk, PAGE, "host")
    with pytest.raises(TypeError):
        growpool.CachingBacking(backing)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="negative"):
        growpool.CachingBacking(backing, keep=-1)
    with pytest.raises(TypeError, match="has no alloc"):
        growpool.CachingBacking(object(), keep=1)  # type: ignore[arg-type]


def test_a_chunk_in_use_cannot_be_given_to_a_backing(supplier: Supplier) -> None:
    with Pool("host", backing=supplier) as pool:
        pool.allocate(1000)
        (chunk,) = supplier.out
        with pytest.raises(growpool.PoolStateError) as caught:
            growpool.DeviceBacking().free(chunk, chunk.size, "host")
        assert caught.value.reason == "in_use"


def test_one_backing_for_two_pools(supplier: Supplier) -> None:
    caching = growpool.CachingBacking(supplier, keep="1 GiB")
    with Pool("host", backing=caching, chunk_size=PAGE) as a:
        a.allocate(2 * PAGE)
    with Pool("host", backing=caching, chunk_size=PAGE) as b:
        b.allocate(2 * PAGE)
    assert supplier.given == 2
    caching.trim()


def test_adopted_handles_keep_their_owner(sim: Any) -> None:
    class Owner:
        pass

    first = growpool.Chunk.create(PAGE, sim.device)
    owner = Owner()
    released: list[int] = []
    import weakref

    weakref.finalize(owner, released.append, 1)
    adopted = growpool.Chunk.from_handle(first.handle, PAGE, sim.device, owner=owner)
    del owner
    gc.collect()
    assert released == []
    assert adopted.handle == first.handle
    del adopted
    assert released == [1]
    first.close()
    assert sim.state.unreleased_count == 0
