# SPDX-License-Identifier: Apache-2.0
"""Chunks between two processes on one GPU, memory for network cards, and peers."""

from __future__ import annotations

import array
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import growpool
import pytest
from cuda_driver import Counter, Gpu, pattern
from gpu_kit import DRIVER_NOISE, MIB, wait_until

pytestmark = pytest.mark.gpu

HERE = Path(__file__).resolve().parent
SIZE = 8 * MIB
Chunk = growpool.Chunk
Pool = growpool.Pool


# -- what both processes use --


def pool_of(chunk: growpool.Chunk) -> Pool:
    """A pool that has this chunk and no other."""
    chunks = [chunk]
    return Pool(
        chunk.device,
        alloc=lambda size, device, stream: chunks.pop() if chunks else None,
        free=lambda chunk, size, device, stream: chunks.append(chunk),
        chunk_size=chunk.size,
    )


def written(gpu: Gpu, address: int, seed: int) -> dict[str, Any]:
    """Fill SIZE bytes by a kernel, to the end, and say with what."""
    gpu.fill(0, address, SIZE, seed)
    gpu.synchronize()
    return {"address": address, "seed": seed}


def holds(gpu: Gpu, address: int, said: dict[str, Any]) -> bool:
    """Whether the bytes here are those that were written at an address of the other process."""
    expected = array.array("I", pattern(said["address"], SIZE // 4, said["seed"])).tobytes()
    return gpu.read(address, SIZE) == expected


def tell(peer: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    socket.send_fds(peer, [json.dumps(message).encode()], fds)


def hear(peer: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next message; an empty one when the other process has ended."""
    data, fds, _, _ = socket.recv_fds(peer, 4096, 4)
    return json.loads(data or b"{}"), fds


CHILD = """
import os, socket, sys
import growpool
from cuda_driver import Gpu
from test_gpu_share import SIZE, hear, holds, pool_of, tell, written
peer = socket.socket(fileno=int(sys.argv[1]))
gpu = Gpu()
said, fds = hear(peer)
chunk = growpool.Chunk.from_fd(fds[0], SIZE, "cuda:0")
os.close(fds[0])
own = growpool.Chunk.create(SIZE, "cuda:0", handle_type="posix_fd")
with pool_of(chunk) as pool, pool_of(own) as mine:
    address, other = pool.malloc(SIZE), mine.malloc(SIZE)
    assert holds(gpu, address, said), "not what the parent wrote"
    back, made = written(gpu, address, 22), written(gpu, other, 33)
    fd = own.export_fd()
    tell(peer, {"back": back, "made": made}, [fd])
    os.close(fd)
    said, _ = hear(peer)
    assert holds(gpu, other, said), "not what the parent wrote into the child's chunk"
    pool.free(address)
    mine.free(other)
peer.close()
"""


@pytest.fixture
def child() -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    """The other process, and a socket to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(60)
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stderr=subprocess.PIPE,
    )
    theirs.close()  # a child that ends early is then heard as an empty message
    yield ours, process
    ours.close()
    if process.poll() is None:
        process.kill()
    process.communicate(timeout=60)


# -- two processes --


def test_two_processes_share_memory_both_ways(
    gpu: Gpu, child: tuple[socket.socket, subprocess.Popen[bytes]]
) -> None:
    peer, process = child
    before = gpu.free_memory()
    chunk = Chunk.create(SIZE, "cuda:0", handle_type="posix_fd")
    assert chunk.handle_type == "posix_fd"
    with pool_of(chunk) as pool:
        address = pool.malloc(SIZE)
        fd = chunk.export_fd()
        assert not os.get_inheritable(fd)
        tell(peer, written(gpu, address, 11), [fd])
        os.close(fd)
        said, fds = hear(peer)
        assert said, process.communicate(timeout=60)[1].decode()
        assert holds(gpu, address, said["back"])

        imported = Chunk.from_fd(fds[0], SIZE, "cuda:0")
        os.close(fds[0])
        assert imported.handle_type is None
        with pytest.raises(ValueError, match="imported"):
            imported.export_fd()
        with pool_of(imported) as second:
            other = second.malloc(SIZE)
            assert holds(gpu, other, said["made"])
            last = written(gpu, other, 44)
            tell(peer, last)
            errors = process.communicate(timeout=60)[1].decode()
            assert (process.returncode, errors) == (0, "")
            assert holds(gpu, other, last)  # outlives the process that made it
            second.free(other)
        imported.close()
        pool.free(address)
    chunk.close()
    assert wait_until(lambda: before - gpu.free_memory() < DRIVER_NOISE, 5)


def test_a_descriptor_keeps_the_memory_alive(gpu: Gpu) -> None:
    chunk = Chunk.create(SIZE, "cuda:0", handle_type="posix_fd")
    with pool_of(chunk) as pool:
        address = pool.malloc(SIZE)
        said = written(gpu, address, 5)
        pool.free(address)
    fd = chunk.export_fd()
    chunk.close()
    imported = Chunk.from_fd(fd, SIZE, "cuda:0")
    os.close(fd)
    with pool_of(imported) as pool:
        address = pool.malloc(SIZE)
        assert holds(gpu, address, said)
        pool.free(address)
    imported.close()


def test_host_memory_is_shared_as_such(gpu: Gpu) -> None:
    """The importer learns where the memory lives: the CPU reads it at the device's addresses."""
    chunk = Chunk.create(SIZE, "cuda:0", location="host", handle_type="posix_fd")
    fd = chunk.export_fd()
    imported = Chunk.from_fd(fd, SIZE, "cuda:0")
    os.close(fd)
    with pool_of(chunk) as pool, pool_of(imported) as second:
        address, other = pool.malloc(SIZE), second.malloc(SIZE)
        said = written(gpu, address, 6)
        assert holds(gpu, other, said)
        expected = array.array("I", pattern(address, 1024, 6)).tobytes()
        assert ctypes.string_at(other, 4096) == expected
        pool.free(address)
        second.free(other)
    imported.close()
    chunk.close()


# -- what is refused --


@pytest.mark.parametrize("size", [SIZE // 2, 2 * SIZE, SIZE + 2 * MIB])
def test_another_size_is_found_out(gpu: Gpu, size: int) -> None:
    before = gpu.free_memory()
    chunk = Chunk.create(SIZE, "cuda:0", handle_type="posix_fd")
    fd = chunk.export_fd()
    for _ in range(20):
        with pytest.raises(ValueError, match="give the exact size"):
            Chunk.from_fd(fd, size, "cuda:0")
    Chunk.from_fd(fd, SIZE, "cuda:0").close()
    os.close(fd)
    chunk.close()
    assert wait_until(lambda: before - gpu.free_memory() < DRIVER_NOISE, 5)


def test_what_is_no_chunk(gpu: Gpu) -> None:
    with open("/dev/null", "rb") as file, pytest.raises(growpool.DriverError) as caught:
        Chunk.from_fd(file, SIZE, "cuda:0")
    assert caught.value.call == "cuMemImportFromShareableHandle"
    host = Chunk.create(SIZE, "host", handle_type="posix_fd")
    fd = host.export_fd()
    with pytest.raises(growpool.DriverError):
        Chunk.from_fd(fd, SIZE, "cuda:0")
    os.close(fd)
    with pytest.raises(ValueError, match="no open file descriptor"):
        Chunk.from_fd(fd, SIZE, "cuda:0")
    with pytest.raises(ValueError, match="handle_type='posix_fd'"):
        Chunk.create(SIZE, "cuda:0").export_fd()


# -- network cards, peers --


@pytest.mark.parametrize("handle_type", [None, "posix_fd"])
@pytest.mark.parametrize("location", ["device", "host"])
def test_memory_for_network_cards_works_in_a_pool(
    gpu: Gpu,
    counter: Counter,
    handle_type: Any,
    location: Any,
) -> None:
    """A wish: whether it came true is the machine's business, that the chunk works is ours."""
    chunk = Chunk.create(
        SIZE, "cuda:0", location=location, handle_type=handle_type, gpu_direct_rdma=True
    )
    print(f"gpu_direct_rdma in {location} memory: {chunk.gpu_direct_rdma}")
    assert chunk.handle_type == handle_type
    with pool_of(chunk) as pool:
        address = pool.malloc(SIZE)
        gpu.fill(0, address, SIZE, 7)
        gpu.verify(0, address, SIZE, 7, counter)
        counter.check()
        pool.free(address)
    if handle_type is not None:
        fd = chunk.export_fd()
        imported = Chunk.from_fd(fd, SIZE, "cuda:0")
        os.close(fd)
        imported.close()
    chunk.close()


def test_a_pool_is_no_peer_of_its_own(gpu: Gpu, counter: Counter) -> None:
    with Pool("cuda:0", peers=["cuda:0", 0]) as pool:
        assert pool.peers == ()
        address = pool.malloc(SIZE)
        gpu.fill(0, address, SIZE, 8)
        gpu.verify(0, address, SIZE, 8, counter)
        counter.check()
        pool.free(address)
    with pytest.raises(ValueError, match="host cannot be a peer of a pool on cuda:0"):
        Pool("cuda:0", peers=["host"])


def test_the_current_context_is_as_it_was(gpu: Gpu) -> None:
    """Making, sharing and importing chunks needs no current context and leaves none behind."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            assert gpu.current_context() == 0  # the main thread may have one from other libraries
            share()
            assert gpu.current_context() == 0
            with gpu.current():
                share()
                assert gpu.current_context() == gpu.context.value
        except BaseException as failure:
            failures.append(failure)

    def share() -> None:
        chunk = Chunk.create(SIZE, "cuda:0", handle_type="posix_fd", gpu_direct_rdma=True)
        fd = chunk.export_fd()
        Chunk.from_fd(fd, SIZE, "cuda:0").close()
        os.close(fd)
        chunk.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures, failures
