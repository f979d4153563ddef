# SPDX-License-Identifier: Apache-2.0
"""copy_from, copy_to and fill: every pair of memories, sizes, streams, and what is refused."""

from __future__ import annotations

import array
import gc
import threading
from collections.abc import Callable
from typing import Any

import growpool
import numpy
import pytest
from helpers import PAGE, Supplier

Pool = growpool.Pool
SIZE = 4096


def make_growable(pool: Pool) -> Any:
    growable = pool.growable("1 GiB")
    growable.resize(SIZE)
    return growable


def make_range(pool: Pool) -> Any:
    sparse = pool.range(SIZE)
    sparse.commit(0, PAGE)
    return sparse


MAKERS: list[Callable[[Pool], Any]] = [
    lambda pool: pool.allocate(SIZE),
    make_growable,
    make_range,
    lambda pool: pool.allocate(2 * SIZE).view(SIZE, offset=512),
    lambda pool: make_growable(pool).view((4, 256), "float32"),
]


def contents(memory: Any) -> bytes:
    out = bytearray(memory.nbytes)
    memory.copy_to(out)
    return bytes(out)


@pytest.mark.parametrize("source", MAKERS)
@pytest.mark.parametrize("target", MAKERS)
def test_every_pair(pool: Pool, source: Any, target: Any) -> None:
    one, two = source(pool), target(pool)
    one.copy_from(bytes(range(256)) * 16)
    two.copy_from(one)
    assert contents(two) == bytes(range(256)) * 16
    two.fill(7)
    two.copy_to(one)
    assert contents(one) == b"\x07" * SIZE == bytes(memoryview(one).cast("B"))


@pytest.mark.parametrize(
    "source",
    [
        b"x" * SIZE,
        bytearray(b"x" * SIZE),
        memoryview(b"x" * SIZE),
        array.array("b", b"x" * SIZE),
        numpy.frombuffer(b"x" * SIZE, "i4").reshape(4, -1),
    ],
)
def test_bytes_like_sources(pool: Pool, source: Any) -> None:
    buffer = pool.allocate(SIZE)
    buffer.copy_from(source)
    assert contents(buffer) == b"x" * SIZE


def test_bytes_like_targets(pool: Pool) -> None:
    buffer = pool.allocate(SIZE)
    buffer.fill(0x41)
    targets: list[Any] = [bytearray(SIZE), array.array("d", bytes(SIZE)), numpy.zeros(SIZE // 8)]
    for target in targets:
        buffer.copy_to(target)
        assert bytes(memoryview(target).cast("B")) == b"A" * SIZE


def test_parts(pool: Pool) -> None:
    buffer = pool.allocate(16)
    buffer.fill(0x2E)
    buffer.copy_from(b"abc", offset=0)
    buffer.copy_from(b"xyz", offset=13)
    buffer.copy_from(pool.allocate(0), offset=16)
    out = bytearray(4)
    buffer.copy_to(out, offset="12 B")
    assert (contents(buffer), bytes(out)) == (b"abc..........xyz", b".xyz")
    buffer.view(8, offset=4).copy_from(b"--", offset=2)
    assert contents(buffer) == b"abc...--.....xyz"


def test_a_range_by_its_committed_parts(pool: Pool) -> None:
    sparse = pool.range(64 * PAGE)
    sparse.fill(1)  # nothing is committed
    sparse.commit_many([(0, PAGE), (8 * PAGE, 2 * PAGE)])
    sparse.fill(0x61)
    assert contents(sparse.view(2 * PAGE, offset=8 * PAGE)) == b"a" * (2 * PAGE)
    assert contents(sparse.view(PAGE)) == b"a" * PAGE
    sparse.copy_from(b"page", offset=9 * PAGE)
    assert contents(sparse.view(4, offset=9 * PAGE)) == b"page"
    for call in (
        lambda: sparse.copy_from(b"page", offset=PAGE),
        lambda: sparse.copy_from(bytes(8), offset=10 * PAGE - 4),
        lambda: sparse.copy_to(bytearray(64), offset=7 * PAGE),
    ):
        with pytest.raises(ValueError, match="not all committed"):
            call()


@pytest.mark.parametrize("size", [0, 1, SIZE - 1, SIZE + 1])
def test_sizes_must_match(pool: Pool, size: int) -> None:
    buffer = pool.allocate(SIZE)
    for call in (
        lambda: buffer.copy_from(bytes(size)),
        lambda: buffer.copy_to(bytearray(size)),
        lambda: buffer.copy_from(pool.allocate(size)),
        lambda: buffer.copy_to(pool.allocate(size)),
    ):
        with pytest.raises(ValueError, match=f"{SIZE} bytes and the other side {size}"):
            call()


def test_parts_must_fit(pool: Pool) -> None:
    buffer = pool.allocate(SIZE)
    for offset in (SIZE - 3, SIZE, SIZE + 1, 1 << 62):
        with pytest.raises(ValueError, match=f"4 bytes at offset {offset} .* {SIZE} bytes"):
            buffer.copy_from(b"four", offset=offset)
    with pytest.raises(ValueError, match="negative"):
        buffer.copy_to(bytearray(4), offset=-1)
    with pytest.raises(TypeError, match="offset"):
        buffer.copy_to(bytearray(4), offset=1.5)  # type: ignore[arg-type]


def test_empty_memory(pool: Pool) -> None:
    empty = pool.allocate(0)
    empty.copy_from(b"")
    empty.copy_to(bytearray())
    empty.copy_from(pool.growable(PAGE))
    empty.fill(3)
    pool.growable(0).fill(3)


@pytest.mark.parametrize("other", [1, None, "text", [1], object()])
def test_things_without_memory(pool: Pool, other: Any) -> None:
    buffer = pool.allocate(SIZE)
    for call in (buffer.copy_from, buffer.copy_to):
        with pytest.raises(TypeError, match="buffer protocol"):
            call(other)


def test_memory_that_cannot_be_used(pool: Pool) -> None:
    buffer = pool.allocate(SIZE)
    with pytest.raises((BufferError, TypeError, ValueError)):
        buffer.copy_to(bytes(SIZE))
    with pytest.raises((BufferError, ValueError)):
        buffer.copy_from(numpy.zeros((64, 128), "u1")[:, ::2])
    with pytest.raises((BufferError, ValueError)):
        buffer.copy_from(numpy.zeros((64, 64), "u1").T)
    closed = pool.allocate(SIZE)
    closed.close()
    for call in (
        lambda: buffer.copy_from(closed),
        lambda: buffer.copy_to(closed),
        lambda: closed.copy_from(buffer),
        lambda: closed.copy_to(bytearray(SIZE)),
        lambda: closed.fill(1),
    ):
        with pytest.raises(growpool.PoolStateError, match="closed"):
            call()
    buffer.close()


def test_overlaps_are_refused(pool: Pool) -> None:
    buffer = pool.allocate(SIZE)
    with pytest.raises(ValueError, match="overlap"):
        buffer.copy_from(buffer)
    with pytest.raises(ValueError, match="overlap"):
        buffer.copy_from(buffer.view(64, offset=32), offset=0)
    with pytest.raises(ValueError, match="overlap"):
        buffer.view(64).copy_to(memoryview(buffer)[63:127])
    buffer.view(64).copy_to(memoryview(buffer)[64:128])
    buffer.copy_from(buffer.view(64, offset=64), offset=0)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (-1, ValueError),
        (256, ValueError),
        (1 << 70, OverflowError),
        ("1", TypeError),
        (1.0, TypeError),
        (None, TypeError),
        (True, TypeError),
        (b"a", TypeError),
    ],
)
def test_wrong_values(pool: Pool, value: Any, error: type[Exception]) -> None:
    for memory in (pool.allocate(8), make_growable(pool), make_range(pool)):
        with pytest.raises(error):
            memory.fill(value)


def test_wrong_arguments(pool: Pool) -> None:
    buffer = pool.allocate(4)
    wrong: list[Any] = [
        lambda: buffer.fill(),
        lambda: buffer.fill(1, None, 2),
        lambda: buffer.fill(1, "stream"),
        lambda: buffer.copy_from(),
        lambda: buffer.copy_from(b"four", None, 0),
        lambda: buffer.copy_from(b"four", "stream"),
        lambda: buffer.copy_to(),
        lambda: buffer.copy_to(bytearray(4), None, 0),
        lambda: buffer.copy_to(bytearray(4), object()),
    ]
    for call in wrong:
        with pytest.raises(TypeError):
            call()
    with pytest.raises(ValueError):
        buffer.fill(1, 0xDEAD)
    buffer.close()  # no pin was left behind


# ---- streams ----


def test_copies_run_in_the_order_of_a_host_stream(pool: Pool) -> None:
    release = threading.Event()
    with growpool.host.Stream() as stream:
        one, two = pool.allocate(SIZE), pool.allocate(SIZE)
        two.fill(0)
        stream.submit(lambda: release.wait(20))
        one.fill(5, stream)
        two.copy_from(one, stream)
        assert bytes(memoryview(two)[:4]) == b"\0\0\0\0"
        one.close()  # the pool waits for the stream that was named
        pool.trim(wait=False)
        release.set()
        stream.synchronize()
        assert bytes(memoryview(two)) == b"\x05" * SIZE


def test_copies_with_python_memory_wait(pool: Pool) -> None:
    with growpool.host.Stream() as stream:
        buffer = pool.allocate(SIZE, stream)
        view = memoryview(buffer)
        stream.submit(lambda: view.__setitem__(slice(0, 4), b"work"))
        out = bytearray(SIZE)
        buffer.copy_to(out)  # the buffer's own stream
        assert out[:4] == b"work"
        source = bytearray(b"z" * SIZE)
        buffer.copy_from(source, stream)
        source[:] = bytes(SIZE)
        assert bytes(view) == b"z" * SIZE
        view.release()


def test_a_worker_does_not_wait_for_itself(pool: Pool) -> None:
    caught: list[BaseException] = []
    with growpool.host.Stream() as stream:
        buffer = pool.allocate(4, stream)

        def work() -> None:
            try:
                buffer.copy_from(b"four")
            except RuntimeError as error:
                caught.append(error)
            buffer.copy_from(b"four", 0)

        stream.submit(work)
        stream.synchronize()
        assert contents(buffer) == b"four"
    assert len(caught) == 1


def test_two_pools_both_learn_of_the_stream(sim: Any, supplier: Supplier) -> None:
    stream = sim.stream()
    one = Pool(sim.device, backing=supplier)
    two = Pool(sim.device, backing=supplier)
    source, target = one.allocate(SIZE), two.allocate(SIZE)
    target.copy_from(source, stream)
    assert sim.work_all() == 1
    sim.set_wait_completes(True)
    source.close()
    one.trim()  # an unmap under the copy would be a violation
    assert sim.work_all() == 0
    source = one.allocate(SIZE)
    source.copy_to(target, stream)
    target.close()
    two.trim()
    assert sim.work_all() == 0
    one.close()
    two.close()


def test_fills_and_copies_are_owners(sim: Any) -> None:
    stream = sim.stream()
    sim.set_wait_completes(True)
    with Pool(sim.device) as pool:
        for memory in (pool.allocate(PAGE), make_growable(pool), make_range(pool)):
            memory.fill(1, stream)
            memory.copy_from(bytes(memory.nbytes), stream)
            memory.fill(2, stream)
            assert sim.work_all() == 1
            memory.close()
            pool.trim()
            assert sim.work_all() == 0


def test_host_and_device(sim: Any, pool: Pool) -> None:
    """The copy between the two runs on the device's stream, whichever side is asked."""
    sim.set_wait_completes(True)
    stream = sim.stream()
    with Pool(sim.device) as device_pool:
        device, host = device_pool.allocate(SIZE), pool.allocate(SIZE)
        for call in (
            lambda: device.copy_from(host, stream),
            lambda: device.copy_to(host),
            lambda: host.copy_from(device, stream),
            lambda: host.copy_to(device),
            lambda: device.copy_from(bytes(SIZE)),
            lambda: device.copy_to(bytearray(SIZE), stream),
        ):
            before = len([line for line in sim.log() if "copy " in line])
            call()
            assert len([line for line in sim.log() if "copy " in line]) == before + 1
            assert sim.work_all() == 0
        with pytest.raises(ValueError):
            device.copy_from(bytes(SIZE), 0xDEAD0000)
        host.close()


def test_two_devices(sim: Any) -> None:
    with Pool(sim.device) as one, Pool("sim:999") as two:
        with pytest.raises(ValueError, match=f"between {sim.device} and sim:999"):
            one.allocate(8).copy_from(two.allocate(8))


def test_a_captured_stream_takes_no_copy_that_must_wait(sim: Any) -> None:
    stream = sim.stream()
    with Pool(sim.device) as pool:
        buffer, other = pool.allocate(SIZE), pool.allocate(SIZE)
        sim.capture_begin(stream, 0)
        with pytest.raises(growpool.CaptureError):
            buffer.copy_from(bytes(SIZE), stream)
        with pytest.raises(growpool.CaptureError):
            buffer.copy_to(bytearray(SIZE), stream)
        buffer.copy_from(other, stream)
        buffer.fill(1, stream)
        assert sim.capture_end(stream)
        assert sim.work_all() == 0
        gc.collect()


def test_a_driver_that_refuses(sim: Any) -> None:
    with Pool(sim.device) as pool:
        buffer, other = pool.allocate(SIZE), pool.allocate(SIZE)
        for call in (lambda: buffer.fill(1), lambda: buffer.copy_from(other)):
            sim.fail_at(1, True)
            with pytest.raises(growpool.Error):
                call()
            sim.fail_at(0, False)
        buffer.close()  # no pin was left behind


def test_both_ends_are_pinned_while_they_are_used(sim: Any) -> None:
    """Asking the stream for its handle runs Python code, which tries to close the memory."""
    with Pool(sim.device) as pool:
        buffer, other = pool.allocate(SIZE), pool.allocate(SIZE)
        refused: list[BaseException] = []

        class Stream:
            @property
            def ptr(self) -> int:
                for memory in (buffer, other, pool):
                    try:
                        memory.close()
                    except BufferError as error:
                        refused.append(error)
                return 0

        buffer.copy_from(other, Stream())
        assert len(refused) == 3
        other.close()
        buffer.fill(1, Stream())
        assert len(refused) == 5
        sim.complete_all()
        buffer.close()
