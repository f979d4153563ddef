# SPDX-License-Identifier: Apache-2.0
"""Growables: the address and the contents stay, whatever the size does."""

from __future__ import annotations

import random
import threading
from typing import Any

import growpool
import pytest
from helpers import MIB, PAGE, Supplier, run_quietly

Pool = growpool.Pool


def test_growing_and_shrinking(pool: Pool, supplier: Supplier) -> None:
    growable = pool.growable("1 GiB")
    address = growable.handle
    assert (growable.size, growable.max_size, growable.physical_bytes) == (0, 1 << 30, 0)
    assert (growable.granularity, address % 512) == (PAGE, 0)
    assert pool.stats.physical_bytes == 0
    for size in (1, PAGE, 3 * PAGE + 17, 100 * PAGE, 64 * PAGE, PAGE + 1, 5, 0, 7 * PAGE):
        result = growable.resize(size)
        assert isinstance(result, growpool.ReleaseResult)
        assert (growable.size, growable.nbytes, growable.handle) == (size, size, address)
        assert growable.physical_bytes == pool.stats.physical_bytes == supplier.out_bytes
        assert growable.physical_bytes >= size
    growable.close()
    pool.drain()
    assert supplier.out == []
    assert growable.handle == 0


def test_sizes_as_text(pool: Pool) -> None:
    growable = pool.growable("64 MiB", stream=None)
    growable.resize("32 MiB")
    assert growable.size == 32 * MIB
    growable.resize(size="1 KiB", stream=None, wait=True)
    assert growable.size == 1024


def test_contents_below_the_new_size_are_untouched(pool: Pool) -> None:
    random.seed(20)
    growable = pool.growable(8 * PAGE)
    expected = b""
    for step in range(40):
        size = random.randrange(0, 8 * PAGE, 4096)
        growable.resize(size, wait=step % 2 == 0)
        with memoryview(growable) as view:
            kept = min(size, len(expected))
            assert view[:kept] == expected[:kept]
            view[kept:] = random.randbytes(4096) * ((size - kept) // 4096)
            expected = bytes(view)


def test_a_cut_chunk_is_kept_and_said(pool: Pool) -> None:
    growable = pool.growable("1 GiB")
    growable.resize(16 * PAGE)
    result = growable.resize(15 * PAGE)
    assert (result.released_bytes, result.kept_bytes) == (0, PAGE)
    assert result == (0, PAGE)
    assert growable.physical_bytes == 16 * PAGE
    assert growable.resize(0).released_bytes == 16 * PAGE
    assert growable.physical_bytes == 0


def test_whole_steps_go(pool: Pool) -> None:
    growable = pool.growable("1 GiB")
    for pages in (4, 8, 16):
        growable.resize(pages * PAGE)
    assert growable.resize(8 * PAGE).released_bytes == 8 * PAGE
    assert growable.resize(4 * PAGE).released_bytes == 4 * PAGE
    assert growable.physical_bytes == 4 * PAGE


def test_chunk_size_makes_it_exact(supplier: Supplier) -> None:
    with Pool("host", backing=supplier, chunk_size=PAGE) as pool:
        growable = pool.growable("1 GiB")
        growable.resize(16 * PAGE)
        result = growable.resize(3 * PAGE + 1)
        assert (result.released_bytes, result.kept_bytes) == (12 * PAGE, 0)
        assert growable.physical_bytes == 4 * PAGE


def test_doubling_asks_for_few_large_chunks(sim: Any) -> None:
    """Each step is one chunk, up to the largest size that a chunk has: 1 GiB."""
    with Pool(sim.device) as pool:
        growable = pool.growable("16 GiB")
        size, expected = 64 * MIB, []
        while size <= 16 << 30:
            before = len(sim.log())
            added = size - growable.size
            growable.resize(size)
            asked = [line for line in sim.log()[before:] if line.startswith("create ")]
            assert len(asked) == max(1, added >> 30)
            assert all(f" bytes={min(added, 1 << 30)} " in line for line in asked), asked
            expected.append(len(asked))
            size *= 2
        assert expected == [1, 1, 1, 1, 1, 1, 2, 4, 8]
        assert pool.stats.chunk_count == 20
        assert growable.physical_bytes == 16 << 30


def test_contents_survive_resizes_that_fail(supplier: Supplier) -> None:
    """No answer, a wrong one, an exception: at every chunk of a step, the contents stay."""
    random.seed(21)

    class Own(Exception):
        pass

    left = -1

    def alloc(size: int, device: int, stream: int) -> Any:
        nonlocal left
        left -= 1
        return failure() if left == 0 else supplier.alloc(size, device, stream)

    def no_memory() -> Any:
        raise MemoryError

    def broken() -> Any:
        raise Own

    with Pool("host", alloc=alloc, free=supplier.free, chunk_size=PAGE) as pool:
        growable = pool.growable(16 * PAGE)
        growable.resize(3 * PAGE - 100)
        contents = random.randbytes(3 * PAGE - 100)
        memoryview(growable)[:] = contents
        cases: list[tuple[Any, type[Exception]]] = [
            (no_memory, growpool.OutOfMemoryError),
            (broken, Own),
            (lambda: "no chunk", TypeError),
        ]
        for how, error in cases:
            failure = how
            for number in range(1, 6):
                left = number
                with pytest.raises(error):
                    growable.resize(8 * PAGE)
                assert growable.size == len(contents)
                assert growable.physical_bytes == 3 * PAGE == supplier.out_bytes
                assert bytes(memoryview(growable)) == contents


def test_without_waiting(sim: Any, supplier: Supplier) -> None:
    stream = sim.stream()
    with Pool(sim.device, backing=supplier) as pool:
        growable = pool.growable("1 GiB", stream=stream)
        growable.resize(4 * PAGE)
        sim.launch(stream, growable.handle, 4 * PAGE)
        result = growable.resize(0, wait=False)
        assert (result.released_bytes, result.kept_bytes) == (4 * PAGE, 0)
        assert supplier.out_bytes == 4 * PAGE == growable.physical_bytes
        sim.complete_all()
        pool.drain()
        assert supplier.out == []


def test_the_tail_waits_for_the_stream_that_is_named(sim: Any) -> None:
    own, other, recorded = sim.stream(), sim.stream(), sim.stream()
    with Pool(sim.device, chunk_size=PAGE) as pool:
        growable = pool.growable("1 GiB", stream=own)
        growable.resize(4 * PAGE)
        growable.record_stream(recorded)
        for stream in (own, other, recorded):
            sim.launch(stream, growable.handle + 2 * PAGE, PAGE)
        sim.set_wait_completes(True)
        growable.resize(PAGE, other)  # the driver's stand-in reports an unmap under work
        assert sim.work_all() == 0
        assert pool.stats.physical_bytes == PAGE


def test_above_the_maximum(pool: Pool) -> None:
    growable = pool.growable(4 * PAGE)
    growable.resize(4 * PAGE)
    with pytest.raises(ValueError, match=f"{4 * PAGE + 1} .* {4 * PAGE} "):
        growable.resize(4 * PAGE + 1)
    assert growable.size == 4 * PAGE


def test_a_limit_stops_growth_and_changes_nothing(supplier: Supplier) -> None:
    with Pool("host", backing=supplier, limit=8 * PAGE) as pool:
        growable = pool.growable("1 GiB")
        growable.resize(6 * PAGE)
        memoryview(growable)[:] = b"k" * (6 * PAGE)
        with pytest.raises(growpool.LimitExceededError):
            growable.resize(9 * PAGE)
        assert (growable.size, growable.physical_bytes) == (6 * PAGE, 6 * PAGE)
        assert bytes(memoryview(growable)) == b"k" * (6 * PAGE)
        growable.resize(8 * PAGE)


def test_addresses_that_are_not_there(pool: Pool) -> None:
    with pytest.raises(growpool.AddressSpaceError):
        pool.growable(1 << 60)
    assert pool.stats.address_bytes == 0


def test_with_blocks_and_closing(pool: Pool) -> None:
    with pool.growable("1 GiB") as growable:
        growable.resize(PAGE)
    assert growable.is_closed
    growable.close()
    for call in (
        lambda: growable.resize(1),
        lambda: growable.record_stream(None),
        lambda: memoryview(growable),
        lambda: growable.view(0),
        lambda: growable.fill(0),
        growable.__enter__,
    ):
        with pytest.raises(growpool.PoolStateError) as caught:
            call()
        assert caught.value.reason == "closed"
    assert "closed" in repr(growable)
    with pytest.raises(BufferError), pool.growable(PAGE) as other:
        other.resize(PAGE)
        view = memoryview(other)
    assert not other.is_closed
    view.release()


def test_the_pool_closes_it(supplier: Supplier) -> None:
    with Pool("host", backing=supplier) as pool:
        growable = pool.growable("1 GiB")
        growable.resize(PAGE)
    assert growable.is_closed
    assert growable.physical_bytes == 0
    with pytest.raises(growpool.PoolStateError):
        growable.resize(0)
    with pytest.raises(growpool.PoolStateError):
        pool.growable(1)
    growable.close()


def test_going_out_of_scope(pool: Pool, supplier: Supplier) -> None:
    growable = pool.growable("1 GiB")
    growable.resize(PAGE)
    del growable
    pool.drain()
    assert supplier.out == []
    assert pool.stats.address_bytes == 0


def test_the_repr(pool: Pool) -> None:
    growable = pool.growable("1 GiB")
    growable.resize("3 MiB")
    assert repr(growable) == (
        f"<growpool.Growable: 3.0 MiB of 1.0 GiB on host at {growable.handle:#x}>"
    )


@pytest.mark.parametrize(
    ("size", "error"),
    [
        (-1, ValueError),
        ("x", ValueError),
        (1.5, TypeError),
        (None, TypeError),
        (True, TypeError),
        (1 << 63, OverflowError),
    ],
)
def test_wrong_sizes(pool: Pool, size: Any, error: type[Exception]) -> None:
    growable = pool.growable(PAGE)
    with pytest.raises(error):
        growable.resize(size)
    with pytest.raises(error):
        pool.growable(size)
    with pytest.raises(error):
        pool.range(size)
    assert growable.size == 0


def test_wrong_arguments(pool: Pool) -> None:
    growable = pool.growable(PAGE)
    wrong: list[Any] = [
        lambda: growable.resize(),
        lambda: growable.resize(1, None, True),
        lambda: growable.resize(1, colour=2),
        lambda: growable.resize(1, "stream"),
        lambda: pool.growable(1, None),
        lambda: pool.growable(1, stream="x"),
    ]
    for call in wrong:
        with pytest.raises(TypeError):
            call()
    for stream in (0xDEAD, -1):
        with pytest.raises(ValueError):
            growable.resize(1, stream)
    closed = growpool.host.Stream()
    closed.close()
    with pytest.raises(ValueError, match="closed"):
        growable.resize(1, closed)

    class Truthless:
        def __bool__(self) -> bool:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        growable.resize(1, wait=Truthless())  # type: ignore[arg-type]
    assert growable.size == 0


# ---- callbacks and threads ----


def test_an_alloc_that_closes_and_drops(supplier: Supplier) -> None:
    """What the callback does to the object while it grows: the growth fails, nothing is lost."""
    held: list[Any] = []

    def alloc(size: int, device: int, stream: int) -> growpool.Chunk | None:
        if held:
            held.pop().close()
        return supplier.alloc(size, device, stream)

    with Pool("host", alloc=alloc, free=supplier.free) as pool:
        growable = pool.growable("1 GiB")
        held.append(growable)
        with pytest.raises(growpool.PoolStateError):
            growable.resize(4 * PAGE)
        assert growable.is_closed


def test_two_resizes_at_once(supplier: Supplier) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def alloc(size: int, device: int, stream: int) -> growpool.Chunk | None:
        inside.set()
        assert go_on.wait(20)
        return supplier.alloc(size, device, stream)

    with Pool("host", alloc=alloc, free=supplier.free) as pool:
        growable = pool.growable("1 GiB")
        thread = threading.Thread(target=growable.resize, args=(4 * PAGE,))
        thread.start()
        assert inside.wait(20)
        with pytest.raises(growpool.PoolStateError) as caught:
            growable.resize(PAGE)
        assert caught.value.reason == "busy"
        go_on.set()
        thread.join()
        assert growable.size == 4 * PAGE


def test_growing_under_live_exports_from_threads(supplier: Supplier) -> None:
    """Readers keep reading what they exported while another thread grows and shrinks."""
    with Pool("host", backing=supplier, chunk_size=PAGE) as pool:
        growable = pool.growable("1 GiB")
        growable.resize(2 * PAGE)
        growable.fill(0x11)
        stop = threading.Event()
        failures: list[str] = []

        def read() -> None:
            while not stop.is_set():
                with growable.view(PAGE) as view:
                    if bytes(memoryview(view)[:: PAGE // 8]) != b"\x11" * 8:
                        failures.append("changed")

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for step in range(80):
            growable.resize((2 + step % 7) * PAGE, wait=step % 2 == 0)
        stop.set()
        for thread in threads:
            thread.join()
        assert failures == []


def test_growables_live_at_exit() -> None:
    run_quietly(
        """
        import growpool, sys
        pool = growpool.Pool("host")
        kept = [pool.growable("1 GiB") for _ in range(20)]
        for i, growable in enumerate(kept):
            growable.resize(i << 20)
        sys.kept = kept
        """
    )


def test_closed_streams_end_a_use(pool: Pool) -> None:
    """A closed stream without work is as good as none; one with work is still waited for."""
    idle, busy = growpool.host.Stream(), growpool.host.Stream()
    release = threading.Event()
    buffer, growable = pool.allocate(PAGE), pool.growable(PAGE)
    growable.resize(PAGE)
    busy.submit(lambda: release.wait(20))
    for stream in (idle, busy):
        stream.close()
    idle.synchronize()
    block = pool.malloc(100)
    pool.free(block, idle)
    growable.close(idle)
    pool.forget_stream(idle)
    pool.forget_stream(idle)
    buffer.close(busy)
    pool.trim(wait=False)
    assert pool.stats.physical_bytes > 0
    release.set()
    busy.synchronize()
    pool.forget_stream(busy)
    pool.trim()
    assert pool.stats.physical_bytes == 0
