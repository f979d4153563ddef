# SPDX-License-Identifier: Apache-2.0
"""Chunks between processes by descriptor, and memory for network cards."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import growpool
import pytest
from helpers import PAGE, run_quietly

Chunk = growpool.Chunk
Pool = growpool.Pool
SIZE = 2 * PAGE

# What gp__sim_set_rdma() takes.
WORKS, ABSENT, NO_CREATE, SMALL_ONLY, NO_ACCESS = range(5)


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture
def shared() -> Iterator[growpool.Chunk]:
    """An exportable chunk on the host; no descriptor of the test is left."""
    before = len(descriptors())
    chunk = Chunk.create(SIZE, "host", handle_type="posix_fd")
    yield chunk
    chunk.close()
    assert len(descriptors()) == before


def pool_of(chunk: growpool.Chunk, **options: Any) -> Pool:
    """A pool that has this chunk and no other."""
    chunks = [chunk]
    return Pool(
        chunk.device,
        alloc=lambda size, device, stream: chunks.pop() if chunks else None,
        free=lambda chunk, size, device, stream: chunks.append(chunk),
        chunk_size=chunk.size,
        **options,
    )


# ---- one process ----


def test_an_exported_chunk_and_its_import_are_one_memory(shared: growpool.Chunk) -> None:
    assert shared.handle_type == "posix_fd"
    assert shared.gpu_direct_rdma is False
    fd = shared.export_fd()
    assert not os.get_inheritable(fd)
    imported = Chunk.from_fd(fd, SIZE, "host")
    os.close(fd)
    assert imported.handle_type is None
    assert (imported.size, imported.device) == (SIZE, "host")
    with pool_of(shared) as ours, pool_of(imported) as theirs:
        one, other = ours.allocate(SIZE), theirs.allocate(SIZE)
        assert one.handle != other.handle
        with memoryview(one) as view:
            view[:] = b"a" * SIZE
        with memoryview(other) as view:
            assert bytes(view) == b"a" * SIZE
            view[-4:] = b"back"
        with memoryview(one) as view:
            assert bytes(view[-4:]) == b"back"
        fd = shared.export_fd()  # in use is no obstacle
        os.close(fd)
        one.close()
        other.close()
    imported.close()


def test_contents_survive_a_trim(shared: growpool.Chunk) -> None:
    with pool_of(shared) as pool:
        for turn in range(3):
            buffer = pool.allocate(SIZE)
            with memoryview(buffer) as view:
                assert turn == 0 or view[0] == turn - 1
                view[0] = turn
            buffer.close()
            assert pool.trim() == SIZE


def test_a_descriptor_like_object_will_do(shared: growpool.Chunk) -> None:
    with os.fdopen(shared.export_fd(), "rb") as file:
        Chunk.from_fd(file, "4 MiB", "host").close()
        assert not file.closed


@pytest.mark.parametrize("size", [PAGE, 2 * SIZE])
def test_another_size(shared: growpool.Chunk, sim: Any, size: int) -> None:
    fd = shared.export_fd()
    with pytest.raises(ValueError, match="exact size"):
        Chunk.from_fd(fd, size, "host")
    os.close(fd)
    simulated = Chunk.create(SIZE, sim.device, handle_type="posix_fd")
    fd = simulated.export_fd()
    with pytest.raises(ValueError, match="exact size"):
        Chunk.from_fd(fd, size, sim.device)
    os.close(fd)
    simulated.close()
    assert sim.state.chunk_count == 0
    assert sim.state.reservation_count == 0


def test_only_what_was_made_for_it_is_exported(shared: growpool.Chunk) -> None:
    with pytest.raises(ValueError, match="handle_type='posix_fd'"):
        Chunk.create(PAGE, "host").export_fd()
    fd = shared.export_fd()
    imported = Chunk.from_fd(fd, SIZE, "host")
    os.close(fd)
    with pytest.raises(ValueError, match="imported"):
        imported.export_fd()
    imported.close()
    shared.close()
    with pytest.raises(growpool.PoolStateError) as caught:
        shared.export_fd()
    assert caught.value.reason == "closed"


def test_what_is_no_chunk(sim: Any) -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(PAGE)
        with pytest.raises(ValueError, match="no exported chunk"):
            Chunk.from_fd(file, PAGE, "host")
        with pytest.raises(growpool.DriverError) as caught:
            Chunk.from_fd(file, PAGE, sim.device)
        assert caught.value.code == 999
        fd = os.dup(file.fileno())
    os.close(fd)
    with pytest.raises(ValueError, match="no open file descriptor"):
        Chunk.from_fd(fd, PAGE, "host")


@pytest.mark.parametrize("fd", [True, "3", 1.5, None, object()])
def test_descriptors_of_other_types(fd: Any) -> None:
    with pytest.raises(TypeError, match="file descriptor|fileno"):
        Chunk.from_fd(fd, PAGE, "host")


@pytest.mark.parametrize("fd", [-1, -7])
def test_negative_descriptors(fd: int) -> None:
    with pytest.raises(ValueError, match="negative"):
        Chunk.from_fd(fd, PAGE, "host")


@pytest.mark.parametrize(
    ("handle_type", "error"),
    [("fabric", ValueError), ("", ValueError), (1, TypeError), (True, TypeError), (b"", TypeError)],
)
def test_wrong_handle_types(handle_type: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="None or 'posix_fd'"):
        Chunk.create(PAGE, "host", handle_type=handle_type)


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="missing required argument"):
        Chunk.from_fd(0, PAGE)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="at most 2 positional"):
        Chunk.create(PAGE, "host", "device", "posix_fd")  # type: ignore[misc]
    assert Chunk.create(PAGE, "host", handle_type=None, gpu_direct_rdma=False).handle_type is None


def test_a_device_that_does_not_share(sim: Any) -> None:
    sim.set_sharing(False)
    with pytest.raises(growpool.DriverError, match="cannot share memory"):
        Chunk.create(PAGE, sim.device, handle_type="posix_fd")
    with pytest.raises(growpool.DriverError, match="cannot share memory"):
        Chunk.from_fd(0, PAGE, sim.device)
    Chunk.create(PAGE, sim.device).close()


def test_memory_of_another_device(sims: list[Any]) -> None:
    chunk = Chunk.create(PAGE, sims[0].device, handle_type="posix_fd")
    fd = chunk.export_fd()
    with pytest.raises(ValueError):
        Chunk.from_fd(fd, PAGE, sims[1].device)
    os.close(fd)
    chunk.close()


# ---- network cards ----


@pytest.mark.parametrize(
    ("rule", "works"),
    [(WORKS, True), (ABSENT, False), (NO_CREATE, False), (SMALL_ONLY, False), (NO_ACCESS, False)],
)
def test_memory_for_network_cards_is_a_wish(sim: Any, rule: int, works: bool) -> None:
    sim.set_rdma(rule)
    for _ in range(2):
        chunk = Chunk.create(PAGE, sim.device, gpu_direct_rdma=True)
        assert chunk.gpu_direct_rdma is works
        assert chunk.handle_type is None
        with pool_of(chunk) as pool:
            address = pool.malloc(PAGE)
            sim.launch(0, address, PAGE)
            pool.free(address)
        chunk.close()
    assert sim.state.chunk_count == 0
    assert Chunk.create(PAGE, "host", gpu_direct_rdma=True).gpu_direct_rdma is False


# ---- two processes ----

CHILD = """
import os, socket, sys
import growpool
from helpers import PAGE
from test_chunk_share import SIZE, pool_of
peer = socket.socket(fileno=int(sys.argv[1]))
word, fds, _, _ = socket.recv_fds(peer, 16, 1)
assert word == b"take", word
chunk = growpool.Chunk.from_fd(fds[0], SIZE, "host")
os.close(fds[0])
own = growpool.Chunk.create(SIZE, "host", handle_type="posix_fd")
with pool_of(chunk) as pool, pool_of(own) as mine:
    buffer, other = pool.allocate(SIZE), mine.allocate(SIZE)
    with memoryview(buffer) as view, memoryview(other) as written:
        assert bytes(view) == bytes(range(256)) * (SIZE // 256)
        view[:] = bytes(reversed(range(256))) * (SIZE // 256)
        written[:] = b"child's " * (SIZE // 8)
    fd = own.export_fd()
    socket.send_fds(peer, [b"done"], [fd])
    os.close(fd)
    assert peer.recv(16) == b"over"
    with memoryview(other) as written:
        assert written[0] == 1
peer.close()
"""


def test_two_processes_share_memory_both_ways(shared: growpool.Chunk) -> None:
    ours, theirs = socket.socketpair()
    paths = [Path(growpool.__file__).parent.parent, Path(__file__).parent]
    with ours, theirs, pool_of(shared) as pool:
        ours.settimeout(30)
        child = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", CHILD, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
            stderr=subprocess.PIPE,
        )
        buffer = pool.allocate(SIZE)
        with memoryview(buffer) as view:
            view[:] = bytes(range(256)) * (SIZE // 256)
            fd = shared.export_fd()
            socket.send_fds(ours, [b"take"], [fd])
            os.close(fd)
            theirs.close()  # so that a child that fails is not waited for
            word, fds, _, _ = socket.recv_fds(ours, 16, 1)
            assert word == b"done", child.communicate(timeout=30)
            assert bytes(view) == bytes(reversed(range(256))) * (SIZE // 256)
        imported = Chunk.from_fd(fds[0], SIZE, "host")
        os.close(fds[0])
        with pool_of(imported) as second:
            theirs_too = second.allocate(SIZE)
            with memoryview(theirs_too) as view:
                assert bytes(view) == b"child's " * (SIZE // 8)
                view[0] = 1
                ours.sendall(b"over")
                _, errors = child.communicate(timeout=30)
                assert (child.returncode, errors) == (0, b"")
                assert view[0] == 1  # the memory outlives the process that made it
        imported.close()


def test_a_forked_child_cannot_change_the_parents_bytes(shared: growpool.Chunk) -> None:
    """Ordinary chunks are copied on write; shared ones are not there at all."""
    with pool_of(shared) as pool:
        buffer = pool.allocate(SIZE)
        with memoryview(buffer) as view:
            view[:] = b"p" * SIZE
            process = os.fork()
            if process == 0:
                faulthandler.disable()
                signal.signal(signal.SIGSEGV, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                ctypes.memset(buffer.handle, 0, SIZE)
                os._exit(0)
            status = os.waitpid(process, 0)[1]
            assert os.waitstatus_to_exitcode(status) == -signal.SIGSEGV
            assert bytes(view) == b"p" * SIZE


def test_a_forked_child_is_refused() -> None:
    run_quietly(
        """
        import os, growpool
        from helpers import PAGE
        chunk = growpool.Chunk.create(PAGE, "host", handle_type="posix_fd")
        fd = chunk.export_fd()
        child = os.fork()
        if child == 0:
            code = 0
            for call in (chunk.export_fd, lambda: growpool.Chunk.from_fd(fd, PAGE, "host")):
                try:
                    call()
                    code = 1
                except growpool.PoolStateError as error:
                    code = code or (0 if error.reason == "forked" else 2)
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.close(fd)
        """,
        options=("-W", "ignore::DeprecationWarning"),
    )
