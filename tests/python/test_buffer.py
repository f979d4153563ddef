# SPDX-License-Identifier: Apache-2.0
"""Buffers: the buffer protocol, exports that pin, and what that means for closing."""

from __future__ import annotations

import ctypes
import gc
import warnings

import growpool
import pytest
from helpers import MIB, PAGE, Supplier, eventually

Pool = growpool.Pool


def test_buffer_protocol(pool: Pool) -> None:
    buffer = pool.allocate(1000)
    with memoryview(buffer) as view:
        assert (view.format, view.itemsize, view.nbytes, view.readonly) == ("B", 1, 1000, False)
        assert view.obj is buffer
        view[:] = bytes(range(250)) * 4
    assert ctypes.string_at(buffer.handle, 4) == bytes(range(4))


def test_numpy_sees_the_memory(pool: Pool) -> None:
    numpy = pytest.importorskip("numpy")
    buffer = pool.allocate(4 * MIB)
    array = numpy.frombuffer(buffer, dtype="i4")
    assert array.ctypes.data == buffer.handle
    array[:] = 7
    assert array.sum() == 7 * MIB


def test_attributes(pool: Pool) -> None:
    buffer = pool.allocate("1 MiB")
    assert (buffer.size, buffer.nbytes) == (MIB, MIB)
    assert (buffer.device, buffer.device_id) == ("host", -1)
    assert buffer.is_host_accessible
    assert not buffer.is_device_accessible
    assert buffer.pool is pool


def test_live_exports_pin_the_buffer_and_the_pool(pool: Pool) -> None:
    buffer = pool.allocate(1000)
    first, second = memoryview(buffer), memoryview(buffer)
    for _ in range(2):
        with pytest.raises(BufferError, match="export"):
            buffer.close()
        with pytest.raises(BufferError, match="export"):
            pool.close()
        assert not buffer.is_closed
        assert not pool.is_closed
    first.release()
    with pytest.raises(BufferError):
        buffer.close()
    second[0] = 1
    second.release()
    buffer.close()
    assert buffer.is_closed


def test_pinned_memory_is_not_trimmed(pool: Pool) -> None:
    buffer = pool.allocate(PAGE)
    view = memoryview(buffer)
    pool.trim()
    view[:] = bytes(PAGE)
    view.release()


def test_an_export_keeps_buffer_and_pool_alive(supplier: Supplier) -> None:
    view = memoryview(Pool("host", backing=supplier).allocate(PAGE))
    gc.collect()
    view[:] = b"x" * PAGE
    assert supplier.out != []
    view.release()
    del view
    eventually(lambda: supplier.out == [])


def test_the_with_block_of_a_pool_with_exports(supplier: Supplier) -> None:
    with (
        pytest.warns(ResourceWarning, match="has live exports"),
        Pool("host", backing=supplier, name="late") as pool,
    ):
        view = memoryview(pool.allocate(1000))
    assert pool.is_closed
    with pytest.raises(growpool.PoolStateError):
        pool.allocate(1)
    view[:] = b"x" * 1000
    assert supplier.out != []
    view.release()
    eventually(lambda: supplier.out == [])
    pool.close()
    assert pool.stats.physical_bytes == 0


def test_exports_never_mask_the_bodys_exception(supplier: Supplier) -> None:
    with warnings.catch_warnings(), pytest.raises(ZeroDivisionError):
        warnings.simplefilter("ignore", ResourceWarning)
        with Pool("host", backing=supplier) as pool:
            view = memoryview(pool.allocate(1000))
            raise ZeroDivisionError
    view.release()
    eventually(lambda: supplier.out == [])


def test_the_with_block_of_a_buffer(pool: Pool) -> None:
    with pool.allocate(1000) as buffer:
        assert pool.stats.used_bytes == 1024
    assert buffer.is_closed
    with pytest.raises(BufferError), pool.allocate(1000) as buffer:
        view = memoryview(buffer)
    assert not buffer.is_closed
    view.release()
    buffer.close()


def test_going_out_of_scope_frees(pool: Pool) -> None:
    buffer = pool.allocate(1000)
    assert pool.stats.used_bytes == 1024
    del buffer
    assert pool.stats.used_bytes == 0


def test_memory_that_the_cpu_cannot_read_has_no_buffer_protocol(sim: object) -> None:
    with Pool(sim.device) as pool:  # type: ignore[attr-defined]
        buffer = pool.allocate(1000)
        assert not buffer.is_host_accessible
        with pytest.raises(BufferError, match="CPU"):
            memoryview(buffer)
