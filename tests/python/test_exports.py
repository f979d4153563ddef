# SPDX-License-Identifier: Apache-2.0
"""Views and exports: pins, closing and dropping in every order, cycles, exit and fork."""

from __future__ import annotations

import ctypes
import gc
import itertools
from collections.abc import Callable
from typing import Any

import growpool
import numpy
import pytest
from dlpack_reader import Taken
from exports_kit import MAKERS, Export, Maker, make_buffer, make_growable, make_range
from helpers import PAGE, Supplier, eventually

Pool = growpool.Pool


HOST_PAIRS = [("dlpack", "memoryview"), ("view", "dlpack"), ("memoryview", "view")]
DEVICE_PAIRS = [("dlpack", "dlpack"), ("view", "dlpack")]


def close_in_order(pool: Pool, memory: Any, pair: tuple[str, str], order: tuple[str, ...]) -> None:
    """Close all four, and be refused exactly while something that is alive forbids it."""
    exports = {name: Export(memory, how) for name, how in zip("xy", pair, strict=True)}
    refused = []
    for event in order:
        if event in exports:
            exports.pop(event).end()
            continue
        target = {"memory": memory, "pool": pool}[event]
        if exports:
            with pytest.raises(BufferError, match="live exports"):
                target.close()
            assert not pool.is_closed
            assert not memory.is_closed
            refused.append(target)
        else:
            target.close()
            assert target.is_closed
    for target in refused:
        target.close()
    assert pool.is_closed
    assert memory.is_closed
    assert pool.stats.physical_bytes == 0


@pytest.mark.parametrize("order", list(itertools.permutations(["pool", "memory", "x", "y"])))
@pytest.mark.parametrize("make", MAKERS)
def test_closing_in_every_order(
    supplier: Supplier, sim: Any, make: Maker, order: tuple[str, ...]
) -> None:
    for pair in HOST_PAIRS:
        pool = Pool("host", backing=supplier)
        close_in_order(pool, make(pool), pair, order)
    for pair in DEVICE_PAIRS:
        pool = Pool(sim.device, backing=supplier)
        close_in_order(pool, make(pool), pair, order)
    assert sim.state.reservation_count == 0


def drop_in_order(
    pool: Pool, make: Maker, pair: tuple[str, str], order: tuple[str, ...], supplier: Supplier
) -> None:
    """Drop all four; the memory stays while an export lives and can be used on the host."""
    held: dict[str, Any] = {"pool": pool, "memory": make(pool)}
    address = held["memory"].handle
    on_host = pool.device == "host"
    del pool
    for name, how in zip("xy", pair, strict=True):
        held[name] = Export(held["memory"], how)
    for event in order:
        gone = held.pop(event)
        if isinstance(gone, Export):
            if gone.how == "dlpack":
                gone.end()
        del gone
        gc.collect()
        if held.keys() & {"x", "y"}:
            assert supplier.out != []
            if on_host:
                ctypes.memset(address, 7, 2 * PAGE)


@pytest.mark.parametrize("order", list(itertools.permutations(["pool", "memory", "x", "y"])))
@pytest.mark.parametrize("make", MAKERS)
def test_dropping_in_every_order(
    supplier: Supplier, sim: Any, make: Maker, order: tuple[str, ...]
) -> None:
    for pair in HOST_PAIRS:
        drop_in_order(Pool("host", backing=supplier), make, pair, order, supplier)
        eventually(lambda: supplier.out == [])
    for pair in DEVICE_PAIRS:
        drop_in_order(Pool(sim.device, backing=supplier), make, pair, order, supplier)
        # What unknown streams may use waits for somebody who answers for captures.
        with Pool(sim.device) as other:
            eventually(lambda: (other.drain(), supplier.out == [])[1])
    eventually(lambda: sim.state.reservation_count == 0)


@pytest.mark.parametrize("order", list(itertools.permutations(["memory", "x", "y"])))
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("pair", HOST_PAIRS)
def test_leaving_a_with_block_in_every_order(
    supplier: Supplier, make: Maker, pair: tuple[str, str], order: tuple[str, ...]
) -> None:
    with pytest.warns(ResourceWarning, match="live exports"):
        with Pool("host", backing=supplier) as pool:
            memory = make(pool)
            exports = {name: Export(memory, how) for name, how in zip("xy", pair, strict=True)}
    assert pool.is_closed
    for call in (lambda: pool.allocate(1), lambda: memory.view(1), memory.__dlpack__):
        with pytest.raises(growpool.PoolStateError):
            call()
    address = exports["x"].thing.tensor.data if pair[0] == "dlpack" else None
    for event in order:
        if event == "memory":
            del memory
        else:
            if address is not None:
                assert supplier.out != []
            exports.pop(event).end()
    eventually(lambda: supplier.out == [])
    pool.close()


# ---- views ----


def test_what_a_view_shows(pool: Pool) -> None:
    buffer = pool.allocate(4096)
    view = buffer.view((4, 8), numpy.dtype("int32"), offset="512 B")
    assert (view.shape, view.dtype, view.nbytes) == ((4, 8), "int32", 128)
    assert view.handle == buffer.handle + 512
    assert view.base is buffer
    assert view.pool is pool
    assert (view.device, view.device_id) == ("host", -1)
    assert isinstance(view, growpool.Memory)
    assert repr(view) == "<growpool.View: (4, 8) of int32 on host>"
    with memoryview(view) as memory:
        assert (memory.format, memory.shape, memory.strides) == ("i", (4, 8), (32, 4))
        memory[1, 1] = 77
        assert not memory.readonly
    assert numpy.frombuffer(buffer, "i4", offset=512)[8 + 1] == 77
    inner = view.view(4, "int16", offset=4)
    assert (inner.base, inner.handle) == (buffer, buffer.handle + 516)
    view.close()
    view.close()
    assert view.is_closed
    assert view.handle == 0
    assert "closed" in repr(view)
    with pytest.raises(BufferError):
        buffer.close()
    inner.close()
    buffer.close()


def test_a_view_with_memoryviews_cannot_be_closed(pool: Pool) -> None:
    view = pool.allocate(64).view(8, "int64")
    memory = memoryview(view)
    with pytest.raises(BufferError, match="1 live exports"):
        view.close()
    with pytest.raises(BufferError), view:
        pass
    memory[0] = 1
    memory.release()
    with view as same:
        assert same is view
    assert view.is_closed
    with pytest.raises(growpool.PoolStateError, match="the view is closed"):
        memoryview(view)


def test_views_have_the_order_of_c(pool: Pool) -> None:
    view = pool.allocate(64).view((2, 3), "int8")
    flags = {"C": numpy.asarray(view).flags.c_contiguous, "F": numpy.asarray(view).flags.fnc}
    assert flags == {"C": True, "F": False}
    assert memoryview(view).tobytes("F") != b""
    assert memoryview(pool.allocate(8).view((), "int64")).shape == ()


class Named:
    name = "float32"


class TorchLike:
    def __str__(self) -> str:
        return "torch.bfloat16"


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("<f4", "float32"),
        ("=f8", "float64"),
        ("|u1", "uint8"),
        (">i1", "int8"),
        ("<c16", "complex128"),
        ("torch.int64", "int64"),
        (numpy.dtype("f4"), "float32"),
        (numpy.dtype("?"), "bool"),
        (numpy.complex64, "complex64"),
        (Named(), "float32"),
        (TorchLike(), "bfloat16"),
        (bool, "bool"),
    ],
)
def test_forms_of_dtypes(pool: Pool, dtype: Any, name: str) -> None:
    view = pool.allocate(64).view(1, dtype)
    assert view.dtype == name


@pytest.mark.parametrize(
    "dtype", ["", "float", "f4", ">f4", "float128", "<V2", "|S1", "<f", numpy.dtype(">f4"), float]
)
def test_unknown_dtypes(pool: Pool, dtype: Any) -> None:
    with pytest.raises(ValueError, match="unknown dtype"):
        pool.allocate(64).view(1, dtype)


@pytest.mark.parametrize("dtype", [1, None, object(), 1.5, b"<f4", []])
def test_dtypes_of_other_types(pool: Pool, dtype: Any) -> None:
    with pytest.raises(TypeError, match="dtype must be"):
        pool.allocate(64).view(1, dtype)


class Broken:
    @property
    def name(self) -> str:
        raise ZeroDivisionError


def test_a_dtype_that_raises_is_not_swallowed(pool: Pool) -> None:
    with pytest.raises(ZeroDivisionError):
        pool.allocate(64).view(1, Broken())


@pytest.mark.parametrize(
    ("shape", "error"),
    [
        (-1, ValueError),
        ((2, -3), ValueError),
        (65, ValueError),
        ((8, 9), ValueError),
        ((1,) * 65, ValueError),
        ((1 << 40, 1 << 40), OverflowError),
        (1 << 70, OverflowError),
        ("3", TypeError),
        (True, TypeError),
        (1.5, TypeError),
        ((1, "2"), TypeError),
        ((1, 2.0), TypeError),
        (None, TypeError),
    ],
)
def test_wrong_shapes(pool: Pool, shape: Any, error: type[Exception]) -> None:
    buffer = pool.allocate(64)
    with pytest.raises(error):
        buffer.view(shape)
    buffer.close()


def test_the_message_of_a_view_that_is_too_large(pool: Pool) -> None:
    with pytest.raises(ValueError, match="65 bytes at offset 0 .* 64 bytes"):
        pool.allocate(64).view(65)
    with pytest.raises(ValueError, match="64 bytes at offset 8 .* 64 bytes"):
        pool.allocate(64).view(8, "float64", offset=8)


@pytest.mark.parametrize(
    ("offset", "error"),
    [(-1, ValueError), (2, ValueError), (1 << 70, OverflowError), (1.5, TypeError)],
)
def test_wrong_offsets(pool: Pool, offset: Any, error: type[Exception]) -> None:
    buffer = pool.allocate(64)
    with pytest.raises(error):
        buffer.view(1, "float32", offset=offset)
    buffer.close()


def test_odd_views_of_views(pool: Pool) -> None:
    odd = pool.allocate(64).view(8, offset=1)
    with pytest.raises(ValueError, match="no multiple"):
        odd.view(1, "int16")


def test_bfloat16_needs_dlpack(pool: Pool) -> None:
    view = pool.allocate(64).view(4, "bfloat16")
    with pytest.raises(BufferError, match="DLPack"):
        memoryview(view)
    taken = Taken(view.__dlpack__())
    assert taken.type == (4, 16, 1)
    taken.delete()


def test_views_on_the_host_have_no_cuda_array_interface(pool: Pool) -> None:
    view = pool.allocate(64).view(4)
    assert not hasattr(view, "__cuda_array_interface__")
    with pytest.raises(AttributeError, match="GPU"):
        view.__cuda_array_interface__  # noqa: B018


def test_views_of_uncommitted_parts(pool: Pool) -> None:
    sparse = pool.range(4 * PAGE)
    sparse.commit(PAGE, PAGE)
    with pytest.raises(ValueError, match="not all committed"):
        sparse.view(PAGE + 1, offset=PAGE)
    view = sparse.view(PAGE, offset=PAGE)
    with pytest.raises(BufferError, match="live exports"):
        sparse.decommit(0, 2 * PAGE)
    sparse.commit(0, 4 * PAGE)
    sparse.decommit(2 * PAGE, 2 * PAGE)
    view.fill(3)
    assert bytes(memoryview(view)) == b"\x03" * PAGE
    view.close()
    sparse.decommit(0, 2 * PAGE)


def test_views_pin_what_they_show_of_a_growable(pool: Pool) -> None:
    growable = pool.growable("1 GiB")
    growable.resize(8 * PAGE)
    view = growable.view(PAGE, offset=2 * PAGE)
    growable.resize(3 * PAGE)
    with pytest.raises(BufferError, match="live exports"):
        growable.resize(2 * PAGE)
    assert growable.size == 3 * PAGE
    growable.resize(100 * PAGE)
    assert view.handle == growable.handle + 2 * PAGE
    with pytest.raises(BufferError):
        growable.close()
    view.close()
    growable.close()


def test_no_memory_object_is_made_by_hand() -> None:
    for kind in (growpool.Buffer, growpool.Growable, growpool.Range, growpool.View):
        with pytest.raises(TypeError):
            kind()
    with pytest.raises(TypeError):
        growpool.Memory()

    class Mine(growpool.Memory):
        pass

    with pytest.raises(TypeError):
        Mine()
    with pytest.raises(TypeError):
        object.__new__(Mine)


def test_leaving_a_with_block_under_exports_of_a_device(sim: Any, supplier: Supplier) -> None:
    """The streams of exported memory are unknown: the last close() may wait for them."""
    with pytest.warns(ResourceWarning, match="live exports"):
        with Pool(sim.device, backing=supplier) as pool:
            taken = Taken(make_growable(pool).__dlpack__())
            view = make_buffer(pool).view(10)
    with pytest.raises(BufferError, match="2 live exports"):
        pool.close()
    taken.delete()
    view.close()
    pool.close()
    assert supplier.out == []
    assert sim.state.reservation_count == 0


def test_a_stream_object_that_closes_what_it_is_for(sim: Any, supplier: Supplier) -> None:
    class Stream:
        """Asking it for its handle runs code of the user's."""

        def __init__(self, close: Callable[[], None]) -> None:
            self.close = close

        @property
        def ptr(self) -> int:
            self.close()
            return 0

    calls: list[Callable[[Any, Any], Any]] = [
        lambda memory, stream: memory.__dlpack__(stream=stream),
        lambda memory, stream: memory.record_stream(stream),
        lambda memory, stream: memory.close(stream),
        lambda memory, stream: memory.pool.growable(1, stream=stream),
        lambda memory, stream: memory.pool.range(1, stream=stream),
    ]
    changes: dict[Any, Callable[[Any, Any], Any]] = {
        make_growable: lambda memory, stream: memory.resize(PAGE, stream),
        make_range: lambda memory, stream: memory.decommit(0, PAGE, stream),
    }
    for make in MAKERS:
        for call in [*calls, *([changes[make]] if make in changes else [])]:
            for whole in (False, True):
                with Pool(sim.device, backing=supplier) as pool:
                    memory = make(pool)
                    stream = Stream(pool.close if whole else memory.close)
                    harmless = call in calls[2:] and not whole
                    if harmless:
                        call(memory, stream)
                    else:
                        with pytest.raises(growpool.PoolStateError):
                            call(memory, stream)


def test_a_dtype_that_closes_the_memory(pool: Pool) -> None:
    buffer = pool.allocate(64)

    class Dtype:
        @property
        def name(self) -> str:
            buffer.close()
            return "int8"

    with pytest.raises(growpool.PoolStateError):
        buffer.view(1, Dtype())
