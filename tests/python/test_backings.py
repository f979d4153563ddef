# SPDX-License-Identifier: Apache-2.0
"""Backing objects: Python ones, the built-in ones, and compositions of both."""

from __future__ import annotations

import gc
import weakref
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


class Passing:
    """Python between a pool and a backing: the chunks are the inner one's."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def alloc(self, size: int, device: int, stream: int) -> Any:
        return self.inner.alloc(size, device, stream)

    def free(self, chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
        self.inner.free(chunk, size, device, stream)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_python_may_pass_on_what_a_caching_backing_gave(layers: int) -> None:
    """Each layer gets the very object that it gave, and nothing is held longer than it is used."""
    given: list[int] = []
    taken: list[int] = []

    class Inner:
        def alloc(self, size: int, device: int, stream: int) -> growpool.Chunk:
            chunk = growpool.Chunk.create(size, device)
            given.append(id(chunk))
            return chunk  # nobody here keeps it

        def free(self, chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
            taken.append(id(chunk))
            dead.append(weakref.ref(chunk))

    dead: list[weakref.ref[growpool.Chunk]] = []
    backing: Any = Inner()
    caches = []
    for _ in range(layers):
        caches.append(growpool.CachingBacking(backing, keep="1 GiB"))
        backing = Passing(caches[-1])
    with Pool("host", backing=backing, chunk_size=PAGE) as pool:
        for _ in range(3):
            pool.allocate(3 * PAGE).close()
            assert pool.trim() == 3 * PAGE
    assert len(given) == 3
    for cache in reversed(caches):
        assert cache.trim() == 3 * PAGE
    assert sorted(taken) == sorted(given)
    assert [reference() for reference in dead] == [None] * 3


def test_a_cached_chunk_that_is_answered_twice_is_refused(supplier: Supplier) -> None:
    caching = growpool.CachingBacking(supplier, keep="1 GiB")
    chunk = caching.alloc(PAGE, "host")
    twice = Supplier()
    with Pool("host", alloc=lambda *_: chunk, free=caching.free, chunk_size=PAGE) as pool:
        with pytest.raises(ValueError, match="a pool holds already"):
            pool.allocate(2 * PAGE)
        assert caching.cached_bytes == PAGE
        with Pool("host", alloc=lambda *_: chunk, free=twice.free, chunk_size=PAGE) as other:
            twice.out.append(chunk)
            other.allocate(PAGE)
            with pytest.raises(ValueError, match="a pool holds already"):
                pool.allocate(PAGE)
    # The cache kept it while it was lent: it is the inner backing's again.
    caching.trim()


@pytest.mark.parametrize("chunk_size", [PAGE, 4 * PAGE], ids=["kept", "too large to keep"])
def test_where_a_chunk_is_whose_inner_free_raised(supplier: Supplier, chunk_size: int) -> None:
    """With the cache, or unreturned: the warning names both ways to try again."""
    failing = True

    class Inner:
        alloc = supplier.alloc

        def free(self, chunk: growpool.Chunk, *rest: int) -> None:
            if failing:
                raise OSError("no")
            supplier.free(chunk, *rest)

    caching = growpool.CachingBacking(Inner(), keep=PAGE)
    with Pool("host", backing=caching, chunk_size=chunk_size) as pool:
        pool.allocate(2 * chunk_size).close()
        with pytest.warns(growpool.ReleaseWarning, match="trim.. of the CachingBacking or return"):
            pool.trim()
        assert caching.cached_bytes + pool.stats.unreturned_bytes == supplier.out_bytes
        failing = False
        pool.return_unreturned()
        caching.trim()
        assert supplier.out == []


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("str", TypeError, "must return a growpool.Chunk or None, not str"),
        ("size", ValueError, f"of {4 * PAGE} bytes on host, which has another size"),
        ("closed", ValueError, "which is closed"),
    ],
)
def test_wrong_answers_inside_a_cache(
    supplier: Supplier, kind: str, error: type[Exception], text: str
) -> None:
    """Whoever asks, a pool or Python; the chunk stays the inner backing's."""
    chunk = growpool.Chunk.create((4 if kind == "size" else 1) * PAGE, "host")
    if kind == "closed":
        chunk.close()

    class Inner:
        free = supplier.free

        def alloc(self, *_: int) -> Any:
            return kind if kind == "str" else chunk

    caching = growpool.CachingBacking(Inner(), keep="1 GiB")
    with Pool("host", backing=caching, chunk_size=PAGE) as pool:
        for ask in (lambda: pool.malloc(PAGE), lambda: caching.alloc(PAGE, "host")):
            with pytest.raises(error, match=text) as caught:
                ask()
            assert "the alloc of the backing inside a CachingBacking" in str(caught.value)
        assert pool.stats.physical_bytes == 0
    assert caching.cached_bytes == 0
    assert not chunk.is_in_use
    chunk.close()
