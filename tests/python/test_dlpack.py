# SPDX-License-Identifier: Apache-2.0
"""DLPack: what a capsule says, the stream rules, and deleters wherever and whenever they run."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import growpool
import numpy
import pytest
from dlpack_reader import Taken
from helpers import PAGE, Supplier, eventually

Pool = growpool.Pool

CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "complex": 5, "bool": 6}


def kind_and_bits(dtype: str) -> tuple[int, int]:
    if dtype == "bool":
        return CODES["bool"], 8
    name = dtype.rstrip("0123456789")
    return CODES[name], int(dtype[len(name) :])


DTYPES = (
    ["bool", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"]
    + [f"int{bits}" for bits in (8, 16, 32, 64)]
    + [f"uint{bits}" for bits in (8, 16, 32, 64)]
)


# ---- what is in the capsule ----


@pytest.mark.parametrize("version", [None, (0, 8), (1, 0), (1, 1), (2, 0)])
def test_versions(pool: Pool, version: Any) -> None:
    buffer = pool.allocate(1000)
    taken = Taken(buffer.__dlpack__(max_version=version))
    assert taken.versioned == (version is not None and version >= (1, 0))
    if taken.versioned:
        assert (taken.managed.major, taken.managed.minor, taken.managed.flags) == (1, 0, 0)
    assert taken.tensor.data == buffer.handle
    assert taken.tensor.byte_offset == 0
    assert (taken.shape, taken.strides, taken.type) == ((1000,), (1,), (1, 8, 1))
    assert taken.device == (1, 0) == buffer.__dlpack_device__()
    taken.delete()
    buffer.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(pool: Pool, dtype: str) -> None:
    buffer = pool.allocate(4096)
    view = buffer.view((2, 3, 4), dtype, offset=512)
    taken = Taken(view.__dlpack__(max_version=(1, 0)))
    assert taken.type == (*kind_and_bits(dtype), 1)
    assert taken.shape == (2, 3, 4)
    assert taken.strides == (12, 4, 1)
    assert taken.tensor.data == buffer.handle + 512
    taken.delete()
    view.close()
    buffer.close()


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "bfloat16"])
def test_numpy_takes_every_dtype(pool: Pool, dtype: str) -> None:
    view = pool.allocate(4096).view((2, 3), dtype)
    array = numpy.from_dlpack(view)
    assert (array.dtype, array.shape) == (numpy.dtype(dtype), (2, 3))
    array[:] = 1
    assert bytes(memoryview(view)) == array.tobytes()


def test_scalars_and_empty_memory(pool: Pool) -> None:
    view = pool.allocate(64).view((), "float64")
    taken = Taken(view.__dlpack__())
    assert (taken.tensor.ndim, taken.shape) == (0, ())
    taken.delete()
    for empty in (pool.allocate(0), pool.growable(0), pool.range(0), pool.growable("1 MiB")):
        taken = Taken(empty.__dlpack__())
        assert (taken.tensor.data, taken.shape) == (None, (0,))
        taken.delete()
    taken = Taken(pool.allocate(8).view((3, 0, 2), "int32").__dlpack__())
    assert (taken.tensor.data, taken.shape) == (None, (3, 0, 2))
    taken.delete()


def test_growables_and_ranges_export_their_bytes(pool: Pool) -> None:
    growable = pool.growable("1 GiB")
    growable.resize(PAGE + 100)
    array = numpy.from_dlpack(growable)
    assert array.shape == (PAGE + 100,)
    array[:] = 5
    with pytest.raises(BufferError):
        growable.resize(PAGE)
    growable.resize(64 * PAGE)
    assert (array == 5).all()
    assert numpy.from_dlpack(growable).shape == (64 * PAGE,)
    del array
    growable.resize(0)
    sparse = pool.range(4 * PAGE)
    sparse.commit(0, 3 * PAGE)
    with pytest.raises(BufferError, match="not all committed"):
        numpy.from_dlpack(sparse)
    sparse.commit(3 * PAGE, PAGE)
    assert numpy.from_dlpack(sparse).shape == (4 * PAGE,)
    sparse.decommit(0, PAGE)


# ---- arguments ----


def test_a_capsule_that_nobody_takes(pool: Pool) -> None:
    buffer = pool.allocate(1000)
    for version in (None, (1, 0)):
        capsule = buffer.__dlpack__(max_version=version)
        with pytest.raises(BufferError):
            buffer.close()
        del capsule
    buffer.close()


def test_other_devices_and_copies_are_refused(pool: Pool) -> None:
    buffer = pool.allocate(10)
    with pytest.raises(BufferError, match="copy_from"):
        buffer.__dlpack__(copy=True)
    with pytest.raises(BufferError, match=r"\(2, 0\).*copy_from"):
        buffer.__dlpack__(dl_device=(2, 0))
    for capsule in (
        buffer.__dlpack__(copy=False, dl_device=(1, 0)),
        buffer.__dlpack__(copy=None, dl_device=None, stream=None, max_version=None),
    ):
        Taken(capsule).delete()
    buffer.close()


@pytest.mark.parametrize(
    "arguments",
    [
        {"copy": 1},
        {"copy": "yes"},
        {"max_version": 1},
        {"max_version": (1,)},
        {"max_version": ("1", 0)},
        {"max_version": [1, 0]},
        {"dl_device": "cpu"},
        {"dl_device": (1, 0, 0)},
        {"dl_device": (1, 0.5)},
        {"shape": 1},
    ],
)
def test_wrong_arguments(pool: Pool, arguments: dict[str, Any]) -> None:
    buffer = pool.allocate(10)
    with pytest.raises(TypeError):
        buffer.__dlpack__(**arguments)
    with pytest.raises(TypeError):
        buffer.__dlpack__(None)  # type: ignore[misc]
    buffer.close()


@pytest.mark.parametrize("stream", [-1, 0, 1, 2, 12345, "x", growpool.host.Stream()])
def test_the_host_has_no_streams_to_order(pool: Pool, stream: Any) -> None:
    buffer = pool.allocate(10)
    with pytest.raises(ValueError, match="stream=None"):
        buffer.__dlpack__(stream=stream)
    buffer.close()


def test_closed_memory_is_not_exported(pool: Pool) -> None:
    objects = [pool.allocate(10), pool.growable(10), pool.range(10), pool.allocate(9).view(9)]
    for closed in objects:
        closed.close()
        with pytest.raises(growpool.PoolStateError, match="closed"):
            closed.__dlpack__()


# ---- streams of a device ----


def owners_at(pool: Pool, address: int) -> int:
    for segment in pool.snapshot()["segments"]:
        for span in segment["spans"]:
            if span["address"] == address:
                return span["owners"]
    raise AssertionError("no such span")


def test_the_consumers_stream_waits_for_the_owners(sim: Any) -> None:
    own, consumer = sim.stream(), sim.stream()
    with Pool(sim.device) as pool:
        buffer = pool.allocate(1000, own)
        sim.launch(own, buffer.handle, 1000)
        taken = Taken(buffer.__dlpack__(stream=consumer))
        assert taken.device == (12, sim.ordinal) == buffer.__dlpack_device__()
        sim.launch(consumer, buffer.handle, 1000)
        sim.complete(consumer, 1)
        assert sim.pending_all() >= 2  # the consumer's work stands behind the owner's
        sim.complete(own, 1)
        sim.complete_all()
        assert sim.work_all() == 0
        assert owners_at(pool, buffer.handle) == 3  # own, consumer, unknown
        taken.delete()
        buffer.close()


@pytest.mark.parametrize("stream", [None, 1])
def test_the_default_is_the_legacy_stream(sim: Any, stream: Any) -> None:
    with Pool(sim.device) as pool:
        own = sim.stream()
        buffer = pool.allocate(1000, own)
        sim.launch(own, buffer.handle, 1000)
        taken = Taken(buffer.__dlpack__(stream=stream))
        sim.launch(0, buffer.handle, 1000)
        sim.complete(0, 1)
        assert sim.pending_all() >= 2
        sim.complete_all()
        assert owners_at(pool, buffer.handle) == 3
        taken.delete()


def test_minus_one_orders_nothing(sim: Any) -> None:
    own = sim.stream()
    with Pool(sim.device) as pool:
        buffer = pool.allocate(1000, own)
        sim.launch(own, buffer.handle, 1000)
        taken = Taken(buffer.__dlpack__(stream=-1))
        assert owners_at(pool, buffer.handle) == 2  # own and unknown
        taken.delete()
        sim.complete_all()


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (0, ValueError),
        (-2, ValueError),
        (-(1 << 80), ValueError),
        (1 << 80, OverflowError),
        (0xDEAD0000, ValueError),
        (True, TypeError),
        ("x", TypeError),
        (1.5, TypeError),
    ],
)
def test_wrong_streams(sim: Any, stream: Any, error: type[Exception]) -> None:
    with Pool(sim.device) as pool:
        buffer = pool.allocate(1000)
        with pytest.raises(error):
            buffer.__dlpack__(stream=stream)
        buffer.close()  # and left no pin behind


def test_a_capturing_stream_is_refused_and_survives(sim: Any) -> None:
    own, consumer = sim.stream(), sim.stream()
    with Pool(sim.device) as pool:
        for captured in (own, consumer):
            buffer = pool.allocate(1000, own)
            sim.capture_begin(captured, 0)
            with pytest.raises(growpool.CaptureError):
                buffer.__dlpack__(stream=consumer)
            assert sim.capture_end(captured)
            buffer.close()


def test_exported_device_memory_is_unknown_to_the_reaper(sim: Any) -> None:
    with Pool(sim.device, chunk_size=PAGE) as pool:
        buffer = pool.allocate(PAGE)
        Taken(buffer.__dlpack__()).delete()
        buffer.close()
        pool.trim(wait=False)
        assert pool.stats.physical_bytes == PAGE  # nobody answers for captures in the background
        pool.trim()
        assert pool.stats.physical_bytes == 0
        assert sim.state.mapped_bytes == 0


# ---- deleters ----


def export_alone(supplier: Supplier, make: Callable[[Pool], Any]) -> Taken:
    """An export whose Python objects are all gone."""
    pool = Pool("host", backing=supplier)
    taken = Taken(make(pool).__dlpack__(max_version=(1, 0)))
    del pool
    gc.collect()
    return taken


def committed(pool: Pool) -> growpool.Range:
    sparse = pool.range(4 * PAGE)
    sparse.commit(0, 4 * PAGE)
    return sparse


def grown(pool: Pool) -> growpool.Growable:
    growable = pool.growable("1 GiB")
    growable.resize(4 * PAGE)
    return growable


KINDS: list[Callable[[Pool], Any]] = [
    lambda pool: pool.allocate(4 * PAGE),
    grown,
    committed,
    lambda pool: pool.allocate(4 * PAGE).view((4, PAGE)),
    lambda pool: grown(pool).view(PAGE, "float16", offset=PAGE),
    lambda pool: committed(pool).view(PAGE, "int16", offset=PAGE),
]


@pytest.mark.parametrize("make", KINDS)
def test_memory_outlives_its_objects(supplier: Supplier, make: Callable[[Pool], Any]) -> None:
    import ctypes

    taken = export_alone(supplier, make)
    assert supplier.out != []
    ctypes.memset(taken.tensor.data, 0x5A, 2 * PAGE)
    assert ctypes.string_at(taken.tensor.data, 2 * PAGE) == b"\x5a" * 2 * PAGE
    taken.delete()
    eventually(lambda: supplier.out == [])


@pytest.mark.parametrize("make", KINDS)
def test_deleters_on_other_threads(supplier: Supplier, make: Callable[[Pool], Any]) -> None:
    exports = [export_alone(supplier, make) for _ in range(8)]
    start = threading.Barrier(4)

    def work(mine: list[Taken]) -> None:
        start.wait(20)
        for taken in mine:
            taken.delete()

    threads = [threading.Thread(target=work, args=(exports[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(lambda: supplier.out == [])


def test_deleters_race_with_allocation_and_close(supplier: Supplier) -> None:
    """Exports of one pool end on one thread while another one uses the pool and a third trims."""
    pool = Pool("host", backing=supplier, chunk_size=PAGE)
    exports = [Taken(pool.allocate(PAGE).__dlpack__()) for _ in range(64)]
    stop = threading.Event()

    def allocate() -> None:
        while not stop.is_set():
            pool.allocate(PAGE).close()

    def trim() -> None:
        while not stop.is_set():
            pool.trim(wait=False)

    threads = [threading.Thread(target=target) for target in (allocate, trim)]
    for thread in threads:
        thread.start()
    for taken in exports:
        taken.delete()
    stop.set()
    for thread in threads:
        thread.join()
    pool.close()
    assert supplier.out == []


def test_a_deleter_inside_a_callback(supplier: Supplier) -> None:
    exports: list[Taken] = []

    def alloc(size: int, device: int, stream: int) -> growpool.Chunk | None:
        while exports:
            exports.pop().delete()
        return supplier.alloc(size, device, stream)

    with Pool("host", alloc=alloc, free=supplier.free) as pool:
        exports += [Taken(pool.allocate(PAGE).__dlpack__()) for _ in range(3)]
        pool.allocate(64 * PAGE).close()
        assert exports == []
        assert pool.stats.used_bytes == 0
