# SPDX-License-Identifier: Apache-2.0
"""The simulated device: streams that finish only when told, captures, driver errors."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import growpool
import pytest
from helpers import PAGE, Supplier, eventually

Pool = growpool.Pool


@pytest.fixture
def sim_pool(sim: Any, supplier: Supplier) -> Iterator[Pool]:
    pool = Pool(sim.device, backing=supplier, name="simulated")
    yield pool
    pool.close()
    del pool
    gc.collect()
    state = sim.state
    assert (state.mapping_count, state.reservation_count) == (0, 0)


def test_callbacks_get_device_and_stream(sim: Any, sim_pool: Pool, supplier: Supplier) -> None:
    stream = sim.stream()
    sim_pool.allocate(1000, stream=stream)
    assert supplier.calls[0][2:] == (sim.device_id, stream)


def test_cross_stream_reuse_waits_for_the_ticket(sim: Any, sim_pool: Pool) -> None:
    sim.set_wait_completes(False)
    first, second = sim.stream(), sim.stream()
    address = sim_pool.malloc(PAGE, first)
    sim.launch(first, address, PAGE)
    sim_pool.free(address)
    other = sim_pool.malloc(PAGE, second)
    assert other != address
    assert sim_pool.malloc(PAGE, first) == address
    sim_pool.free(address)
    sim_pool.free(other)
    sim.complete_all()
    sim.set_wait_completes(True)


def test_trim_without_waiting_under_pending_work(
    sim: Any, sim_pool: Pool, supplier: Supplier
) -> None:
    sim.set_wait_completes(False)
    stream = sim.stream()
    buffer = sim_pool.allocate(4 * PAGE, stream=stream)
    sim.launch(stream, buffer.handle, 4 * PAGE)
    buffer.close()
    assert sim_pool.trim(wait=False) == 4 * PAGE
    assert sim_pool.stats.retiring_bytes == 4 * PAGE
    assert supplier.taken == 0
    # The reaper records its fence behind the work; complete what comes until everything is back.
    eventually(lambda: sim.complete_all() or supplier.out == [])
    sim.set_wait_completes(True)


def test_a_retiring_chunk_that_is_wanted_again_comes_back(
    sim: Any, sim_pool: Pool, supplier: Supplier
) -> None:
    sim.set_wait_completes(False)
    stream = sim.stream()
    address = sim_pool.malloc(4 * PAGE, stream)
    sim.launch(stream, address, 4 * PAGE)
    sim_pool.free(address)
    sim_pool.trim(wait=False)
    eventually(lambda: sim.pending_all() >= 2)  # the fence is recorded
    again = sim_pool.malloc(4 * PAGE, stream)
    assert supplier.given in (1, 2)
    sim_pool.free(again)
    sim.complete_all()
    sim.set_wait_completes(True)


def test_trim_waits_for_streams(sim: Any, sim_pool: Pool, supplier: Supplier) -> None:
    streams = [sim.stream() for _ in range(3)]
    buffer = sim_pool.allocate(PAGE, stream=streams[0])
    for stream in streams[1:]:
        buffer.record_stream(stream)
    for stream in streams:
        sim.launch(stream, buffer.handle, PAGE)
    buffer.close()
    sim_pool.trim()
    assert supplier.out == []
    assert sim_pool.stats.wait_count >= 1


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_a_capture_grows_the_pool_and_its_graph_keeps_the_memory(
    sim: Any, sim_pool: Pool, supplier: Supplier, mode: int
) -> None:
    stream = sim.stream()
    sim.capture_begin(stream, mode)
    buffer = sim_pool.allocate(PAGE, stream=stream)
    assert supplier.given == 1
    address = buffer.handle
    buffer.close()
    assert sim_pool.malloc(PAGE, stream) == address
    sim_pool.free(address, stream)
    assert sim_pool.trim() == 0
    with pytest.raises(growpool.CaptureError, match="graph"):
        sim_pool.close()
    assert sim.capture_end(stream)  # the simulated graph is destroyed at once
    assert sim_pool.trim() == PAGE


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_a_capture_survives_growth_and_trims_elsewhere(sim: Any, sim_pool: Pool, mode: int) -> None:
    capturing, working = sim.stream(), sim.stream()
    sim.capture_begin(capturing, mode)
    for _ in range(3):
        buffer = sim_pool.allocate(4 * PAGE, stream=working)
        sim.launch(working, buffer.handle, PAGE)
        buffer.close()
        sim_pool.trim()
    assert sim.capture_end(capturing)


def test_a_trim_that_would_need_a_capturing_stream(
    sim: Any, sim_pool: Pool, supplier: Supplier
) -> None:
    stream = sim.stream()
    buffer = sim_pool.allocate(PAGE, stream=stream)
    sim.launch(stream, buffer.handle, PAGE)
    buffer.close()
    sim.capture_begin(stream, 0)
    before = sim_pool.stats
    for call in (sim_pool.trim, sim_pool.close):
        with pytest.raises(growpool.CaptureError):
            call()
    after = sim_pool.stats
    assert (after.physical_bytes, after.retiring_bytes) == (before.physical_bytes, 0)
    assert not sim_pool.is_closed
    assert sim.capture_end(stream)
    sim_pool.trim()
    assert supplier.out == []


def test_forget_stream_before_a_destroy(sim: Any, sim_pool: Pool, supplier: Supplier) -> None:
    stream = sim.stream()
    buffer = sim_pool.allocate(PAGE, stream=stream)
    sim.launch(stream, buffer.handle, PAGE)
    sim_pool.forget_stream(stream)
    sim.stream_destroy(stream)
    again = sim.stream()
    assert again == stream  # the driver hands the handle out again: another stream
    other = sim_pool.allocate(PAGE, stream=again)
    sim.launch(again, other.handle, PAGE)
    buffer.close()
    sim_pool.trim()
    other.close()
    sim_pool.trim()
    assert supplier.out == []


def test_a_handle_handed_out_again_behind_the_pools_back(
    sim: Any, sim_pool: Pool, supplier: Supplier
) -> None:
    stream = sim.stream()
    buffer = sim_pool.allocate(PAGE, stream=stream)
    sim.launch(stream, buffer.handle, PAGE)
    sim.stream_destroy(stream)
    assert sim.stream() == stream  # another stream: the id tells, and the context is fenced instead
    buffer.close()
    sim_pool.trim()
    assert supplier.out == []


def test_the_per_thread_stream_freed_elsewhere(
    sim: Any, sim_pool: Pool, supplier: Supplier
) -> None:
    addresses: list[int] = []

    def work() -> None:
        addresses.append(sim_pool.malloc(PAGE, 2))
        sim.launch(2, addresses[0], PAGE)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    sim_pool.free(addresses[0])
    sim_pool.trim()
    assert supplier.out == []


def test_a_dead_context_lets_everything_go(sim: Any, sim_pool: Pool, supplier: Supplier) -> None:
    stream = sim.stream()
    buffer = sim_pool.allocate(PAGE, stream=stream)
    sim.launch(stream, buffer.handle, PAGE)
    sim.kill_context()
    buffer.close()
    sim_pool.close()
    assert supplier.out == []


def test_device_memory_runs_out(sim: Any, supplier: Supplier) -> None:
    with Pool(sim.device, name="full") as pool:
        sim.set_memory(8 * PAGE)
        kept = pool.allocate(6 * PAGE)
        with pytest.raises(growpool.OutOfMemoryError) as caught:
            pool.allocate(4 * PAGE)
        assert caught.value.size == 4 * PAGE
        assert caught.value.physical == 6 * PAGE
        kept.close()
        pool.allocate(8 * PAGE)


@pytest.mark.filterwarnings("ignore::growpool.ReleaseWarning")
def test_every_failing_driver_call_is_a_clear_error(sim: Any) -> None:
    """One failing driver call at a time: a documented exception, then everything works again."""
    stream = sim.stream()
    allowed = (
        growpool.DriverError,
        growpool.OutOfMemoryError,
        growpool.AddressSpaceError,
        growpool.PoolStateError,
    )
    calls = number = 0
    while number <= calls:
        number += 1
        sim.fail_at(number, False)
        pool = Pool(sim.device, chunk_size=PAGE, address_space=64 * PAGE, name="faulty")
        try:
            buffer = pool.allocate(2 * PAGE, stream=stream)
            sim.launch(stream, buffer.handle, PAGE)
            buffer.close()
            pool.trim()
        except allowed as error:
            assert len(str(error)) > 10
            if isinstance(error, growpool.DriverError):
                assert error.call
                assert error.name
        finally:
            calls = sim.faults()[0]
            sim.fail_at(0, False)
            pool.close()
        pool.return_unreturned()  # where the fault hit the way back
        assert pool.stats.physical_bytes == pool.stats.abandoned_bytes
        assert number < 200
    assert number > 30  # the scenario makes that many driver calls


def test_a_backing_in_c_that_cannot_take_a_chunk_back_warns_too(sim: Any) -> None:
    with Pool(sim.device, chunk_size=PAGE, name="stuck") as pool:
        seen = 0
        for number in range(1, 60):
            pool.allocate(PAGE).close()
            sim.fail_at(number, False)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    pool.trim()
                except growpool.Error:
                    pass
            sim.fail_at(0, False)
            # A fault in the entry to the device, before the backing was asked, is only counted.
            assert len(caught) <= len(pool.unreturned)
            seen += len(caught)
            for warning in caught:
                assert warning.category is growpool.ReleaseWarning
                assert "stuck" in str(warning.message)
            pool.return_unreturned()
            pool.trim()
        assert seen > 0


def test_driver_errors_carry_the_call(sim: Any) -> None:
    with Pool(sim.device, chunk_size=PAGE) as pool:
        found = None
        for number in range(1, 12):
            sim.fail_at(number, False)
            try:
                pool.allocate(PAGE)
            except growpool.DriverError as error:
                found = error
            sim.fail_at(0, False)
            pool.trim()
            if found is not None:
                break
        assert found is not None
        assert found.code != 0
        assert found.call
        assert found.name


def test_python_callbacks_never_run_under_a_lock(sim: Any, supplier: Supplier) -> None:
    """The lock witness of testing builds aborts the process if a callback or a driver call does."""
    with Pool(sim.device, backing=supplier, limit=16 * PAGE) as pool, warnings.catch_warnings():
        buffers = [pool.allocate(PAGE, stream=sim.stream()) for _ in range(8)]
        for buffer in buffers[::2]:
            buffer.close()
        pool.trim(wait=False)
        pool.allocate(4 * PAGE)
        pool.set_limit(4 * PAGE)
        pool.drain()
