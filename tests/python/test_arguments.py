# SPDX-License-Identifier: Apache-2.0
"""What bad input gets, and every accepted form of sizes, devices and streams."""

from __future__ import annotations

from typing import Any

import growpool
import pytest
from helpers import MIB, PAGE, Supplier

Pool = growpool.Pool


# ---- sizes ----


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("17", 17),
        ("17 B", 17),
        ("1KB", 1000),
        ("2 MB", 2_000_000),
        ("3 gb", 3_000_000_000),
        ("1 TB", 10**12),
        ("1 KiB", 1024),
        (" 8 GiB ", 8 << 30),
        ("1.5 MiB", 3 * MIB // 2),
        (".5 kib", 512),
        ("0.1 KiB", 102),
        ("2 TiB", 2 << 40),
        (4096, 4096),
    ],
)
def test_limits_as_numbers_and_text(text: Any, value: int) -> None:
    with Pool("host", limit=text) as pool:
        assert pool.limit == value


@pytest.mark.parametrize("size", [-1, "-1", "-8 GiB", -(1 << 70)])
def test_negative_sizes(pool: Pool, size: Any) -> None:
    for call in (pool.allocate, pool.malloc, pool.trim, pool.set_limit):
        with pytest.raises(ValueError, match="negative"):
            call(size)


@pytest.mark.parametrize("size", [1 << 63, 1 << 64, 10**40, "9000000000 GiB", "1" * 40])
def test_sizes_beyond_every_address(pool: Pool, size: Any) -> None:
    for call in (pool.allocate, pool.malloc, pool.trim, pool.set_limit):
        with pytest.raises(OverflowError):
            call(size)


@pytest.mark.parametrize("size", ["", "GiB", "8 XiB", "1e6", "0x10", "1 2", "8GiB!", "1.2.3", "½"])
def test_text_that_is_no_size(pool: Pool, size: str) -> None:
    for call in (pool.allocate, pool.malloc, pool.trim, pool.set_limit):
        with pytest.raises(ValueError, match="8 GiB"):
            call(size)


@pytest.mark.parametrize("size", [1.5, True, [], b"8", object()])
def test_sizes_of_other_types(pool: Pool, size: Any) -> None:
    for call in (pool.allocate, pool.malloc, pool.trim, pool.set_limit):
        with pytest.raises(TypeError, match="must be an int or text"):
            call(size)


def test_size_none_is_no_size(pool: Pool) -> None:
    with pytest.raises(TypeError):
        pool.malloc(None)  # type: ignore[arg-type]


def test_index_objects_are_sizes(pool: Pool) -> None:
    numpy = pytest.importorskip("numpy")
    address = pool.malloc(numpy.int64(1000))
    pool.free(address)


def test_huge_but_addressable_size_is_an_address_space_error(pool: Pool) -> None:
    before = pool.stats
    with pytest.raises(growpool.AddressSpaceError, match="address"):
        pool.malloc(1 << 50)
    assert pool.stats.physical_bytes == before.physical_bytes


def test_size_zero_is_a_valid_empty_object(pool: Pool) -> None:
    with pool.allocate(0) as buffer:
        assert (buffer.size, buffer.nbytes, buffer.handle) == (0, 0, 0)
        assert bytes(memoryview(buffer)) == b""
        assert not buffer.is_closed
        buffer.record_stream(None)
    assert buffer.is_closed
    assert pool.malloc(0) == 0
    pool.free(0)
    assert pool.stats.physical_bytes == 0


# ---- the constructor ----


def test_alloc_and_free_belong_together(supplier: Supplier) -> None:
    with pytest.raises(TypeError, match="both alloc and free"):
        Pool("host", alloc=supplier.alloc)
    with pytest.raises(TypeError, match="both alloc and free"):
        Pool("host", free=supplier.free)
    with pytest.raises(TypeError, match="not both"):
        Pool("host", alloc=supplier.alloc, free=supplier.free, backing=supplier)
    with pytest.raises(TypeError, match="callable"):
        Pool("host", alloc=1, free=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="alloc"):
        Pool("host", backing=object())  # type: ignore[arg-type]


def test_unknown_arguments() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        Pool("host", colour=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="at most 1 positional"):
        Pool("host", None)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="name must be text"):
        Pool("host", name=7)  # type: ignore[arg-type]
    with Pool("host") as pool:
        with pytest.raises(TypeError, match="missing required argument 'size'"):
            pool.malloc()  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="two values for argument 'size'"):
            pool.malloc(1, size=2)  # type: ignore[misc]


@pytest.mark.parametrize("chunk_size", [1, PAGE - 1, PAGE // 2, PAGE + 4096, 0])
def test_chunk_size_below_or_off_granularity(chunk_size: int) -> None:
    with pytest.raises(ValueError, match="chunk_size"):
        Pool("host", chunk_size=chunk_size)


def test_chunk_size_fixes_every_chunk(supplier: Supplier) -> None:
    with Pool("host", alloc=supplier.alloc, free=supplier.free, chunk_size=2 * PAGE) as pool:
        pool.allocate(5 * PAGE)
        assert {size for _, size, _, _ in supplier.calls} == {2 * PAGE}


def test_address_space_is_a_parameter(supplier: Supplier) -> None:
    with Pool("host", alloc=supplier.alloc, free=supplier.free, address_space=8 * PAGE) as pool:
        pool.malloc(4 * PAGE)
        assert pool.stats.address_bytes <= 8 * PAGE
        with pytest.raises(growpool.AddressSpaceError):
            pool.malloc(64 * PAGE)


def test_refused_addresses_are_halved_and_then_an_error(sim: Any) -> None:
    # The simulated device reserves 16 TiB in all: 64 TiB must be halved until it fits.
    with Pool(sim.device, address_space="64 TiB") as pool:
        pool.malloc(PAGE)
        assert PAGE <= pool.stats.address_bytes <= 16 << 40
        with pytest.raises(growpool.AddressSpaceError, match="address"):
            pool.malloc(32 << 40)
    assert sim.state.reserved_bytes == 0


# ---- devices ----


class HasDeviceId:
    device_id = -1


class TorchCpu:
    type = "cpu"
    index = None


class HasId:
    def __init__(self, number: Any) -> None:
        self.id = number


@pytest.mark.parametrize("device", ["host", "cpu", HasDeviceId(), TorchCpu(), HasId(-1)])
def test_forms_of_the_host(device: Any) -> None:
    with Pool(device) as pool:
        assert (pool.device, pool.device_id) == ("host", -1)


@pytest.mark.parametrize("device", ["", "tpu:0", "cuda:", "cuda:-1", "cuda:x", "HOST", "sim", -1])
def test_unknown_devices(device: Any) -> None:
    with pytest.raises(ValueError, match="unknown device"):
        Pool(device)


@pytest.mark.parametrize("device", ["cuda:99", 99, HasId(99)])
def test_gpus_that_do_not_exist(device: Any) -> None:
    with pytest.raises(growpool.DriverError):
        Pool(device)


@pytest.mark.parametrize("device", [True, 1.5, object(), b"host", HasId("x"), HasId(True)])
def test_devices_of_other_types(device: Any) -> None:
    with pytest.raises(TypeError, match="device must"):
        Pool(device)


def test_an_attribute_that_raises_is_not_swallowed() -> None:
    class Broken:
        @property
        def device_id(self) -> int:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Pool(Broken())


# ---- streams ----


class Protocol:
    """A stream by protocol, as CUDA libraries have them."""

    def __init__(self, handle: Any, version: Any = 0) -> None:
        self._answer = (version, handle)

    def __cuda_stream__(self) -> Any:
        return self._answer


class Torch:
    def __init__(self, handle: Any) -> None:
        self.cuda_stream = handle


class Cupy:
    def __init__(self, handle: Any) -> None:
        self.ptr = handle


def test_stream_protocols(sim: Any) -> None:
    handle = sim.stream()
    with Pool(sim.device, name="streams") as pool:
        address = pool.malloc(1000, handle)
        ids = {span["stream"] for span in pool.snapshot()["segments"][0]["spans"]} - {0}
        pool.free(address)
        for stream in (Protocol(handle), Torch(handle), Cupy(handle)):
            address = pool.malloc(1000, stream)
            found = {s["stream"] for s in pool.snapshot()["segments"][0]["spans"]} - {0}
            assert found == ids
            pool.free(address, stream)


def test_handles_zero_and_one_are_one_stream(sim: Any) -> None:
    with Pool(sim.device) as pool:
        first = pool.malloc(1000, 0)
        pool.free(first)
        for stream in (1, None):
            assert pool.malloc(1000, stream) == first
            pool.free(first)


@pytest.mark.parametrize(
    "stream",
    [Protocol(0, 1), Protocol("x"), Protocol(None), "stream", 1.5, True, object(), Torch("x")],
)
def test_stream_objects_that_are_not_understood(sim: Any, stream: Any) -> None:
    with Pool(sim.device) as pool:
        with pytest.raises(TypeError):
            pool.malloc(1000, stream)
        address = pool.malloc(1000)
        with pytest.raises(TypeError):
            pool.free(address, stream)
        pool.free(address)


def test_streams_of_another_kind_of_device(sim: Any) -> None:
    with growpool.host.Stream() as host_stream, Pool(sim.device) as pool, Pool("host") as host:
        with pytest.raises(TypeError, match=r"growpool\.host\.Stream"):
            pool.malloc(1000, host_stream)
        for stream in (Protocol(5), Torch(5), Cupy(5)):
            with pytest.raises(TypeError, match="pool on host"):
                host.malloc(1000, stream)


def test_handles_that_are_no_stream(sim: Any) -> None:
    with Pool(sim.device) as pool, Pool("host") as host:
        for any_pool in (pool, host):
            with pytest.raises(ValueError, match="stream"):
                any_pool.malloc(1000, 0xDEAD0000)
            with pytest.raises(ValueError, match="negative"):
                any_pool.malloc(1000, -5)
            with pytest.raises(OverflowError):
                any_pool.malloc(1000, 1 << 80)


def test_closed_host_stream(pool: Pool) -> None:
    stream = growpool.host.Stream()
    stream.close()
    stream.close()
    assert stream.is_closed
    with pytest.raises(ValueError, match="closed"):
        pool.malloc(1000, stream)
    with pytest.raises(growpool.PoolStateError, match="closed"):
        stream.submit(print)


def test_cuda_stream_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="needs a GPU"):
        growpool.cuda.Stream("host")
    if not growpool.is_cuda_available():
        with pytest.raises(growpool.DriverError):
            growpool.cuda.Stream()


# ---- pointers ----


def test_foreign_pointers(pool: Pool) -> None:
    address = pool.malloc(1000)
    with Pool("host") as other:
        foreign = other.malloc(1000)
        with pytest.raises(ValueError, match="no live block"):
            pool.free(foreign)
        other.free(foreign)
    for wrong in (address + 1, address + 512, 12345, (1 << 64) - 1, 1 << 80, -1):
        with pytest.raises(ValueError):
            pool.free(wrong)
    no_pointers: list[Any] = ["x", 1.5, None, True]
    for thing in no_pointers:
        with pytest.raises(TypeError):
            pool.free(thing)
    pool.free(address)
    with pytest.raises(ValueError):
        pool.free(address)


def test_free_of_a_buffers_address(pool: Pool) -> None:
    buffer = pool.allocate(1000)
    with pytest.raises(ValueError, match="Buffer|buffer|object"):
        pool.free(buffer.handle)
    assert not buffer.is_closed
    memoryview(buffer)[:] = bytes(1000)
    buffer.close()


# ---- after close ----


def test_use_after_close(supplier: Supplier) -> None:
    pool = Pool("host", alloc=supplier.alloc, free=supplier.free, name="done")
    buffer = pool.allocate(1000)
    address = pool.malloc(1000)
    stream = growpool.host.Stream()
    pool.close()
    pool.close()
    assert pool.is_closed
    assert buffer.is_closed
    assert buffer.handle == 0
    buffer.close()
    calls: list[Any] = [
        lambda: pool.malloc(1),
        lambda: pool.allocate(1),
        lambda: pool.free(address),
        pool.trim,
        pool.drain,
        lambda: pool.set_limit(1),
        lambda: pool.forget_stream(stream),
        lambda: buffer.record_stream(stream),
        lambda: memoryview(buffer),
        pool.__enter__,
        buffer.__enter__,
    ]
    for call in calls:
        with pytest.raises(growpool.PoolStateError) as caught:
            call()
        assert caught.value.reason == "closed"
    assert pool.stats.physical_bytes == 0
    assert pool.snapshot() == {"segments": [], "chunks": []}
    assert pool.unreturned == []
    assert "closed" in repr(pool)
    assert "closed" in repr(buffer)


def test_a_limit_below_use_is_legal(pool: Pool, supplier: Supplier) -> None:
    buffer = pool.allocate(4 * PAGE)
    idle = pool.allocate(4 * PAGE)
    idle.close()
    result = pool.set_limit(PAGE)
    assert result.limit == PAGE
    assert result.overage_bytes == result.physical_bytes - PAGE
    assert 0 < result.deferred_bytes <= result.overage_bytes
    pool.drain()
    assert pool.stats.physical_bytes == 4 * PAGE == supplier.out_bytes
    with pytest.raises(growpool.LimitExceededError) as caught:
        pool.allocate(PAGE)
    assert (caught.value.size, caught.value.limit) == (PAGE, PAGE)
    assert caught.value.physical == 4 * PAGE
    buffer.close()
    assert pool.set_limit(None).limit is None
    assert pool.limit is None


# ---- chunks ----


def test_chunks() -> None:
    chunk = growpool.Chunk.create("4 MiB", "host")
    assert (chunk.size, chunk.device, chunk.device_id) == (4 * MIB, "host", -1)
    assert not chunk.is_closed
    assert not chunk.is_in_use
    assert "4.0 MiB on host, idle" in repr(chunk)
    chunk.close()
    chunk.close()
    assert chunk.is_closed
    assert growpool.Chunk.create(PAGE, -1).device == "host"
    with pytest.raises(TypeError):
        growpool.Chunk()


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE + 1])
def test_chunk_sizes_off_granularity(size: int) -> None:
    with pytest.raises(ValueError):
        growpool.Chunk.create(size, "host")


def test_chunk_location() -> None:
    with pytest.raises(ValueError, match="location"):
        growpool.Chunk.create(PAGE, "host", location="moon")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="location"):
        growpool.Chunk.create(PAGE, "host", location=1)  # type: ignore[arg-type]


def test_a_chunk_in_use_cannot_be_closed(pool: Pool, supplier: Supplier) -> None:
    pool.allocate(1000)
    (chunk,) = supplier.out
    assert chunk.is_in_use
    with pytest.raises(growpool.PoolStateError) as caught:
        chunk.close()
    assert caught.value.reason == "in_use"


def test_the_host_has_no_handles_to_adopt() -> None:
    with pytest.raises(ValueError, match="adopt"):
        growpool.Chunk.from_handle(4096, PAGE, "host")
    no_handles: list[Any] = ["x", 1.5, True]
    for wrong in no_handles:
        with pytest.raises(TypeError):
            growpool.Chunk.from_handle(wrong, PAGE, "host")
