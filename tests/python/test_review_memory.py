# SPDX-License-Identifier: Apache-2.0
"""Promises of memory objects that were broken: each test is named after its promise."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import growpool
import pytest
from helpers import PAGE, run_quietly

Pool = growpool.Pool
ROOT = Path(__file__).resolve().parents[2]
SIZE = 4096


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool("host") as pool:
        yield pool


# ---- Python code in the middle of a call ----


class Swap:
    """As an offset it ends a buffer and puts another one at the same address."""

    def __init__(self, pool: Pool, buffer: growpool.Buffer) -> None:
        self.pool = pool
        self.buffer = buffer
        self.new: growpool.Buffer | None = None

    def __index__(self) -> int:
        address = self.buffer.handle
        self.buffer.close()
        self.new = self.pool.allocate(SIZE)
        self.new.fill(7)
        assert self.new.handle == address
        return 0


def test_a_copy_never_writes_into_memory_that_took_the_place_of_its_own(pool: Pool) -> None:
    swap = Swap(pool, pool.allocate(SIZE))
    with pytest.raises(growpool.PoolStateError):
        swap.buffer.copy_from(b"x" * SIZE, offset=swap)
    assert swap.new is not None
    assert bytes(memoryview(swap.new)) == b"\7" * SIZE


def test_a_copy_never_reads_from_memory_that_took_the_place_of_its_own(pool: Pool) -> None:
    swap = Swap(pool, pool.allocate(SIZE))
    target = bytearray(SIZE)
    with pytest.raises(growpool.PoolStateError):
        swap.buffer.copy_to(target, offset=swap)
    assert target == bytes(SIZE)


def test_a_copy_fits_into_a_growable_as_large_as_it_is_then(pool: Pool) -> None:
    growable = pool.growable(PAGE)
    growable.resize(100)

    class Shrink:
        def __index__(self) -> int:
            growable.resize(10)
            return 50

    with pytest.raises(ValueError, match="10 bytes"):
        growable.copy_from(b"x" * 50, offset=Shrink())


# ---- a device that fails ----


def test_no_copy_outlives_the_hold_on_memory_that_no_pool_guards(sim: Any) -> None:
    """Whichever driver call fails: a copy that was enqueued keeps the other side."""
    with Pool(sim.device) as pool:
        buffer, stream = pool.allocate(SIZE), sim.stream()
        buffer.fill(1, stream)
        late = 0
        for call in range(1, 100):
            sim.complete_all()
            target = bytearray(SIZE)
            references, before = sys.getrefcount(target), len(sim.log())
            sim.fail_at(call, True)
            failed = False
            try:
                buffer.copy_to(target, stream)
            except growpool.DriverError:
                failed = True
            sim.fail_at(0, False)
            held = sys.getrefcount(target) > references
            copied = [line for line in sim.log()[before:] if line.startswith("copy handle")]
            if copied and copied[0].endswith("ok") and sim.work_all() > 0:
                assert held
                late += 1
            if not failed:
                assert not held
                break
        assert late > 0


# ---- objects that are not whole yet: the collector shows them ----


def test_no_view_is_seen_before_it_is_whole() -> None:
    run_quietly(
        """
        import gc, growpool

        class Three:
            def __index__(self):
                for item in gc.get_objects():
                    if type(item) is growpool.View:
                        repr(item), item.dtype, item.shape, item.base
                return 3

        class Dtype:
            @property
            def name(self):
                Three().__index__()
                return "int16"

        with growpool.Pool("host") as pool, pool.allocate(64) as buffer:
            with buffer.view((Three(), 2), Dtype()) as view:
                assert (view.shape, view.dtype) == ((3, 2), "int16")
        """
    )


def test_a_pool_that_is_being_made_can_be_looked_at() -> None:
    run_quietly(
        """
        import gc, growpool

        seen = []

        class Garbage:
            def __init__(self):
                self.cycle = self

            def __del__(self):
                for item in gc.get_objects():
                    if type(item) is growpool.Pool:
                        seen.append((repr(item), item.device, item.device_id, item.peers))

        for threshold in range(1, 60):
            gc.collect()
            Garbage()
            gc.set_threshold(threshold)
            pool = growpool.Pool("host", name="whole")
            gc.set_threshold(0)
            pool.close()
            del pool
        """
    )


def test_a_chunk_has_one_object_even_if_a_collection_asks_for_it_meanwhile(sim: Any) -> None:
    """CPython 3.11 collects while it makes an object."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", growpool.ReleaseWarning)
        for call in range(1, 100):  # until the release of the chunk is what fails
            pool = Pool(sim.device)
            pool.allocate(SIZE).close()
            sim.fail_at(call, True)
            try:
                pool.trim()
            except growpool.Error:
                pass
            sim.fail_at(0, False)
            if pool.stats.unreturned_bytes > 0:
                break
            pool.close()
    seen: list[list[growpool.Chunk]] = []

    class Garbage:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            seen.append(pool.unreturned)

    kept = gc.get_threshold()
    try:
        for threshold in range(1, 40):
            gc.set_threshold(0)
            seen.clear()
            gc.collect()
            Garbage()
            gc.set_threshold(threshold)
            chunks = pool.unreturned
            gc.set_threshold(0)
            gc.collect()
            assert len(chunks) == 1
            assert seen and all(other[0] is chunks[0] for other in seen)
            del chunks
            seen.clear()
    finally:
        gc.set_threshold(*kept)
    pool.return_unreturned()
    pool.close()


# ---- streams ----


@pytest.mark.parametrize("own", [False, True])
def test_both_pools_of_a_copy_keep_its_stream_alive(sim: Any, own: bool) -> None:
    class Stream:
        def __init__(self) -> None:
            self.ptr = sim.stream()

    stream = Stream()
    alive = weakref.ref(stream)
    with Pool(sim.device) as lead, Pool(sim.device) as second:
        to = lead.allocate(SIZE, stream if own else None)
        source = second.allocate(SIZE)
        to.copy_from(source, None if own else stream)
        del stream
        lead.close()
        gc.collect()
        assert alive() is not None, "the second pool may still ask the driver about it"
        second.close()
        gc.collect()
        assert alive() is None


def test_memory_of_a_forgotten_stream_can_be_exported(sim: Any) -> None:
    own, consumer = sim.stream(), sim.stream()
    with Pool(sim.device) as pool:
        sparse = pool.range(PAGE, stream=own)
        sparse.commit(0, PAGE)
        buffer = pool.allocate(SIZE, own)
        pool.forget_stream(own)
        sim.stream_destroy(own)
        for memory in (buffer, sparse):
            for stream in (None, consumer, -1):
                assert "dltensor" in repr(memory.__dlpack__(stream=stream))
            with pytest.raises(ValueError, match="forgotten"):
                memory.fill(1)


def test_the_cuda_array_interface_never_names_a_forgotten_stream(tmp_path: Path) -> None:
    library = tmp_path / "libcuda.so"
    sources = sorted(map(str, (ROOT / "tests" / "support").glob("fake_cuda*.c")))
    flags = "-std=c11 -D_GNU_SOURCE -fPIC -shared -pthread".split()
    folders = [f"-I{ROOT / folder}" for folder in ("", "backing", "sync", "vmm")]
    subprocess.run(["gcc", *flags, *folders, *sources, "-o", str(library)], check=True)
    run_quietly(
        f"""
        import os
        os.environ["GROWPOOL_CUDA_LIBRARY"] = {str(library)!r}
        import growpool

        stream = growpool.cuda.Stream()
        with growpool.Pool("cuda:0") as pool:
            growable = pool.growable(64, stream=stream)
            growable.resize(64)
            views = [memory.view(8) for memory in (pool.allocate(64, stream), growable)]
            for view in views:
                assert view.__cuda_array_interface__["stream"] == stream.handle
            pool.forget_stream(stream)
            stream.close()
            for view in views:
                assert view.__cuda_array_interface__["stream"] is None
                view.__dlpack__()
                view.close()
        """
    )


# ---- arguments ----


def test_text_with_a_nul_is_not_what_stands_before_it(pool: Pool) -> None:
    buffer = pool.allocate(64)
    with pytest.raises(ValueError, match="unknown dtype"):
        buffer.view(4, "float32\0 or not")
    with pytest.raises(ValueError, match="unknown device"):
        Pool("host\0 or not")
    with pytest.raises(ValueError, match="NUL"):
        Pool("host", name="left\0right")


def test_a_type_error_of_the_caller_is_not_replaced(pool: Pool) -> None:
    class Mine(TypeError):
        pass

    def items() -> Iterator[int]:
        yield 0
        raise Mine

    sparse = pool.range(PAGE)
    sparse.commit(0, PAGE)
    with pytest.raises(Mine):
        sparse.view(items())
    with pytest.raises(Mine):
        sparse.commit_many([items()])


def test_an_int_of_thousands_of_digits_is_a_type_error_where_no_int_belongs(pool: Pool) -> None:
    buffer, sparse, huge = pool.allocate(64), pool.range(PAGE), 10**5000
    with pytest.raises(TypeError, match="pair"):
        sparse.commit_many([huge])  # type: ignore[list-item]
    for name in ("max_version", "dl_device"):
        for wrong in (huge, (huge, "x")):
            with pytest.raises(TypeError, match="tuple of two ints"):
                buffer.__dlpack__(**{name: wrong})  # type: ignore[arg-type]
