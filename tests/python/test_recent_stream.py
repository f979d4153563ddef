# SPDX-License-Identifier: Apache-2.0
"""A pool looks first whether a block is for the stream of last time: never to be mistaken."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import growpool
import pytest
from growpool import Pool

MIB = 1 << 20


@pytest.fixture
def pool(sim: Any) -> Any:
    with Pool(sim.device, chunk_size=2 * MIB) as pool:
        yield pool


class Named:
    """A stream object of another library."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


def test_what_a_stream_freed_it_gets_back_however_it_is_named(pool: Pool, sim: Any) -> None:
    stream = sim.stream()
    first = pool.malloc(MIB, stream)
    for name in (stream, Named(stream), Named(stream), stream):
        pool.free(first, name)
        assert pool.malloc(MIB, name) == first
        pool.free(first)
        assert pool.malloc(MIB, name) == first


def test_a_handle_that_names_another_stream_now_is_noticed(pool: Pool, sim: Any) -> None:
    handle = sim.stream()
    address = pool.malloc(MIB, handle)
    sim.launch(handle, address, MIB)
    pool.free(address)
    sim.stream_destroy(handle)
    assert sim.stream() == handle
    again = pool.malloc(MIB, handle)  # the simulator objects if this is memory at work
    assert again != address
    pool.free(again, handle)
    assert pool.snapshot()["segments"][0]["spans"]
    sim.complete_all()


def test_a_free_names_its_last_use(pool: Pool, sim: Any) -> None:
    one, other = sim.stream(), sim.stream()
    address = pool.malloc(MIB, one)
    pool.free(address)
    assert pool.malloc(MIB, one) == address
    sim.launch(other, address, MIB)
    pool.free(address, other)
    assert pool.malloc(MIB, one) != address
    sim.complete_all()


def test_a_stream_that_was_forgotten_is_met_anew(pool: Pool, sim: Any) -> None:
    stream = sim.stream()
    pool.free(pool.malloc(MIB, stream))
    pool.forget_stream(stream)
    address = pool.malloc(MIB, stream)
    pool.free(address, stream)
    assert pool.malloc(MIB, stream) == address


def test_a_closed_stream_is_not_taken_for_what_it_was() -> None:
    with Pool("host") as pool:
        stream = growpool.host.Stream()
        pool.free(pool.malloc(MIB, stream), stream)
        address = pool.malloc(MIB, stream)
        stream.close()
        with pytest.raises(ValueError, match="closed"):
            pool.malloc(MIB, stream)
        pool.free(address, stream)
        assert pool.stats.used_bytes == 0


def test_the_first_object_of_a_stream_is_kept_though_an_int_came_before(
    pool: Pool, sim: Any
) -> None:
    handle = sim.stream()
    pool.free(pool.malloc(MIB, handle))
    named = Named(handle)
    alive = weakref.ref(named)
    pool.free(pool.malloc(MIB, named))
    del named
    gc.collect()
    assert alive() is not None
    pool.forget_stream(handle)
    gc.collect()
    assert alive() is None


def test_a_stream_that_begins_to_capture_gets_memory_of_its_graph(pool: Pool, sim: Any) -> None:
    stream = sim.stream()
    address = pool.malloc(MIB, stream)
    pool.free(address)
    sim.launch(stream, address, MIB)
    sim.capture_begin(stream, 0)
    captured = pool.malloc(MIB, stream)
    assert captured != address
    pool.free(captured, stream)
    assert sim.capture_end(stream)


def test_a_handle_that_closes_the_pool_is_told_so(sim: Any) -> None:
    pool = Pool(sim.device)
    handle = sim.stream()
    pool.free(pool.malloc(MIB, handle))

    class Closes:
        @property
        def cuda_stream(self) -> int:
            pool.close()
            return handle

    with pytest.raises(growpool.PoolStateError, match="closed"):
        pool.malloc(MIB, Closes())  # type: ignore[arg-type]


def test_a_buffer_that_is_dropped_is_had_again(pool: Pool, sim: Any) -> None:
    stream = sim.stream()
    first = pool.allocate(MIB, stream)
    address = first.handle
    del first
    second = pool.allocate(MIB, stream)
    assert second.handle == address
    second.close()
    second.close()
    third = pool.allocate(MIB, stream)
    assert third.handle == address
    with pytest.raises(ValueError, match="buffer"):
        pool.free(address)
    assert pool.stats.used_bytes == MIB
    third.close()
    block = pool.malloc(MIB, stream)  # another kind, so another way
    with pytest.raises(ValueError, match="freed already|no live block"):
        pool.free(block + 512)
    pool.free(block)
    assert pool.stats.used_bytes == 0
