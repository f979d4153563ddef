# SPDX-License-Identifier: Apache-2.0
"""Exports on hardware: NumPy, PyTorch, CuPy, JAX and Numba take memory and give the bytes back.

Needs those libraries beside the GPU; a missing one is an error, never a skip.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

# JAX would take most of the device's memory on its first use.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")

import growpool
import pytest
from cuda_driver import Gpu, Latch
from gpu_kit import MIB, Supplier, wait_until

# What the libraries say of their own on import is not about growpool.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

COUNT = MIB  # float32 elements
SIZE = 4 * COUNT
NewStream = Callable[..., int]


def let_go() -> None:
    """Has the libraries give back the device memory that they keep for later."""
    gc.collect()
    for name, release in (
        ("torch", lambda torch: torch.cuda.empty_cache()),
        ("cupy", lambda cupy: cupy.get_default_memory_pool().free_all_blocks()),
    ):
        if name in sys.modules:
            release(sys.modules[name])


@pytest.fixture(scope="session", autouse=True)
def warm(gpu: Gpu) -> None:
    """What each library makes on first use is made: contexts, handles, kernels.

    One that is missing fails its own tests alone.
    """
    with growpool.Pool("cuda:0") as pool:
        for name, take in TAKERS.items():
            with contextlib.suppress(ImportError):
                view = pool.allocate(SIZE).view(COUNT, "float32")
                view.fill(0)
                array = take(view)
                assert (read(array) == 0).all()
                if name in WRITERS:
                    write(array, 1.0)
                if name == "torch":
                    assert not bool((array.clone() == 7).all())
                    import torch

                    torch.cuda.Stream()  # the first one makes 32
            view = array = None
            gc.collect()
        gpu.synchronize()
    let_go()


@pytest.fixture(autouse=True)
def nothing_is_cached(device_memory_is_back: None) -> Iterator[None]:
    yield
    let_go()


# ---- how each library takes memory, changes it, and reads it ----


def torch_dlpack(view: growpool.View) -> Any:
    import torch

    return torch.from_dlpack(view)


def torch_interface(view: growpool.View) -> Any:
    import torch

    return torch.as_tensor(view, device="cuda")


def cupy_dlpack(view: growpool.View) -> Any:
    import cupy

    return cupy.from_dlpack(view)


def cupy_interface(view: growpool.View) -> Any:
    import cupy

    return cupy.asarray(view)


def jax_dlpack(view: growpool.View) -> Any:
    import jax.dlpack

    return jax.dlpack.from_dlpack(view)


def numba_interface(view: growpool.View) -> Any:
    import numba.cuda

    return numba.cuda.as_cuda_array(view)


TAKERS: dict[str, Callable[[growpool.View], Any]] = {
    "torch": torch_dlpack,
    "torch-interface": torch_interface,
    "cupy": cupy_dlpack,
    "cupy-interface": cupy_interface,
    "jax": jax_dlpack,
    "numba": numba_interface,
}
WRITERS = ("torch", "torch-interface", "cupy", "cupy-interface", "numba")


def read(array: Any) -> Any:
    """The array on the host."""
    import numpy

    if hasattr(array, "copy_to_host"):
        return array.copy_to_host()
    if hasattr(array, "cpu"):
        return array.cpu().numpy()
    if hasattr(array, "get"):
        return array.get()
    return numpy.asarray(array)


def write(array: Any, value: float) -> None:
    import numpy

    if hasattr(array, "copy_to_device"):
        array.copy_to_device(numpy.full(COUNT, value, "f4"))
    else:
        array[:] = value


def address_of(array: Any) -> int:
    if hasattr(array, "data_ptr"):
        return int(array.data_ptr())
    if hasattr(array, "unsafe_buffer_pointer"):
        return int(array.unsafe_buffer_pointer())
    return int(array.__cuda_array_interface__["data"][0])


def numbers() -> Any:
    import numpy

    return numpy.arange(COUNT, dtype="f4") * 0.5


# ---- each library ----


@pytest.mark.parametrize("name", TAKERS)
@pytest.mark.parametrize("kind", ["buffer", "growable", "range"])
def test_the_same_bytes(gpu: Gpu, supplier: Supplier, name: str, kind: str) -> None:
    wanted = numbers()
    with supplier.pool() as pool:
        memory: Any
        if kind == "buffer":
            memory = pool.allocate(SIZE)
        elif kind == "growable":
            memory = pool.growable("1 GiB")
            memory.resize(SIZE)
        else:
            memory = pool.range("1 GiB")
            memory.commit(0, SIZE)
        view = memory.view(COUNT, "float32")
        view.copy_from(wanted)
        array = TAKERS[name](view)
        assert address_of(array) == memory.handle
        assert (read(array) == wanted).all()
        with pytest.raises(BufferError):
            memory.close()
        if name in WRITERS:
            write(array, 2.0)
            gpu.synchronize()
            back = bytearray(SIZE)
            memory.view(SIZE).copy_to(back)
            assert bytes(back) == (wanted * 0 + 2).astype("f4").tobytes()
        del array, view
        gc.collect()
        gpu.synchronize()
        memory.close()


@pytest.mark.parametrize("name", ["torch", "cupy", "jax"])
def test_whole_objects_as_bytes(supplier: Supplier, name: str) -> None:
    with supplier.pool() as pool:
        buffer = pool.allocate(4096)
        buffer.copy_from(bytes(range(256)) * 16)
        array = TAKERS[name](buffer)  # type: ignore[arg-type]
        assert read(array).tobytes() == bytes(range(256)) * 16
        del array
        gc.collect()
        buffer.close()


def test_bfloat16_by_torch(supplier: Supplier) -> None:
    import torch

    with supplier.pool() as pool:
        tensor = torch.from_dlpack(pool.allocate(4096).view((32, 64), torch.bfloat16))
        assert (tensor.dtype, tuple(tensor.shape)) == (torch.bfloat16, (32, 64))
        tensor.fill_(1.5)
        assert bool((tensor == 1.5).all())
        del tensor


def test_numpy_on_the_host() -> None:
    import numpy

    with growpool.Pool("host") as pool:
        buffer = pool.allocate(SIZE)
        array = numpy.from_dlpack(buffer.view(COUNT, "float32"))
        array[:] = numbers()
        assert (numpy.frombuffer(buffer, "f4") == numbers()).all()
        del array


# ---- streams ----


def test_the_consumer_waits_for_the_owner(gpu: Gpu, new_stream: NewStream, latch: Latch) -> None:
    """What the owner's stream writes after a latch is what a tensor of another stream sees."""
    import torch

    stream = new_stream()
    with growpool.Pool("cuda:0") as pool:
        buffer = pool.allocate(SIZE, stream)
        buffer.fill(0)
        gpu.synchronize_stream(stream)
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            # The clone's memory is at hand: asking the driver for it would wait for the latch.
            spare = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
            del spare
        gpu.synchronize()
        latch.hold(stream)
        buffer.fill(7)
        with torch.cuda.stream(other):
            tensor = torch.from_dlpack(buffer)
            seen = tensor.clone()
        assert not other.query()
        latch.open()
        other.synchronize()
        assert bool((seen == 7).all())
        del tensor, seen
        gc.collect()
        gpu.synchronize()


def test_a_consumer_works_while_the_pool_is_trimmed(
    gpu: Gpu, supplier: Supplier, latch: Latch
) -> None:
    """Work of the consumer's own stream on memory that is let go: nothing is unmapped under it."""
    import torch

    with supplier.pool(chunk_size=8 * MIB) as pool:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            buffer = pool.allocate(8 * MIB)
            tensor = torch.from_dlpack(buffer)
            latch.hold(stream.cuda_stream)
            for value in range(100):
                tensor.fill_(value)
            del tensor
        gc.collect()
        buffer.close()
        done = threading.Event()

        def trim() -> None:
            pool.trim()
            done.set()

        thread = threading.Thread(target=trim)
        thread.start()
        assert not done.wait(0.3)
        assert supplier.freed == 0
        latch.open()
        thread.join(20)
        assert done.is_set()
        assert supplier.freed_bytes == 8 * MIB
        gpu.synchronize()


# ---- growing under a tensor, and outliving ----


@pytest.mark.parametrize("name", TAKERS)
def test_growing_under_a_live_array(gpu: Gpu, supplier: Supplier, name: str) -> None:
    wanted = numbers()
    with supplier.pool() as pool:
        growable = pool.growable("8 GiB")
        growable.resize(SIZE)
        growable.copy_from(wanted)
        array = TAKERS[name](growable.view(COUNT, "float32"))
        for size in (64 * MIB, 512 * MIB, 1 << 30):
            growable.resize(size)
            assert (read(array) == wanted).all()
        growable.resize(SIZE)
        with pytest.raises(BufferError):
            growable.resize(SIZE // 4)
        assert growable.size == SIZE
        assert (read(array) == wanted).all()
        del array
        gc.collect()
        gpu.synchronize()
        growable.resize(0)
        assert growable.physical_bytes == 0


@pytest.mark.parametrize("name", ["torch", "cupy", "jax"])
@pytest.mark.parametrize("kind", ["buffer", "growable"])
def test_an_array_outlives_its_objects(gpu: Gpu, name: str, kind: str) -> None:
    supplier = Supplier()
    pool = supplier.pool()
    memory: Any = pool.allocate(SIZE) if kind == "buffer" else pool.growable("1 GiB")
    if kind == "growable":
        memory.resize(SIZE)
    memory.copy_from(numbers())
    array = TAKERS[name](memory.view(COUNT, "float32"))
    del memory, pool
    gc.collect()
    assert supplier.held
    assert (read(array) == numbers()).all()
    del array
    gc.collect()
    gpu.synchronize()

    def all_back() -> bool:
        # Its streams are unknown: only somebody who answers for captures gives it back.
        with growpool.Pool("cuda:0") as other:
            other.drain()
        return not supplier.held

    assert wait_until(all_back)


def test_tensors_dropped_on_other_threads(gpu: Gpu, supplier: Supplier) -> None:
    import torch

    with supplier.pool() as pool:
        for _ in range(20):
            tensors = [torch.from_dlpack(pool.allocate(MIB)) for _ in range(8)]
            threads = [threading.Thread(target=tensors[i : i + 1].clear) for i in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            tensors.clear()
            pool.trim()
        gc.collect()
        gpu.synchronize()
        pool.trim()
        assert pool.stats.used_bytes == 0


def test_copies(gpu: Gpu, new_stream: NewStream, supplier: Supplier) -> None:
    stream = new_stream()
    wanted = numbers()
    with supplier.pool() as pool, growpool.Pool("host") as host:
        one, two, near = pool.allocate(SIZE, stream), pool.allocate(SIZE), host.allocate(SIZE)
        one.copy_from(wanted)
        two.copy_from(one, stream)
        two.copy_to(near, stream)
        assert bytes(memoryview(near)) == wanted.tobytes()
        near.copy_to(one)
        one.fill(0xAB, stream)
        one.copy_to(near)
        assert bytes(memoryview(near)) == b"\xab" * SIZE
        gpu.synchronize()
