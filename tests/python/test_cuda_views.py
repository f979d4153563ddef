# SPDX-License-Identifier: Apache-2.0
"""What exports say about memory of a GPU, with a stand-in for the driver: no GPU is needed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import run_quietly

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[[str], str]

START = """
import growpool
from dlpack_reader import Taken
stream = growpool.cuda.Stream()
pool = growpool.Pool("cuda:0")
buffer = pool.allocate(4096, stream)
"""
END = "\npool.close(); stream.close()\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run code in a process whose libcuda is the stand-in."""
    library = tmp_path_factory.mktemp("fake") / "libcuda.so"
    sources = sorted((ROOT / "tests" / "support").glob("fake_cuda*.c"))
    flags = "-std=c11 -D_GNU_SOURCE -fPIC -shared -pthread".split()
    folders = [f"-I{ROOT / folder}" for folder in ("", "backing", "sync", "vmm")]
    command = ["gcc", *flags, *folders, *map(str, sources), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return lambda code: run_quietly(
        f"import os\nos.environ['GROWPOOL_CUDA_LIBRARY'] = {os.fspath(library)!r}\n"
        + START
        + code
        + END
    )


def test_the_cuda_array_interface(run: Run) -> None:
    run(
        """
view = buffer.view((4, 8), "float32", offset=512)
assert view.__cuda_array_interface__ == {
    "version": 3, "shape": (4, 8), "typestr": "<f4", "data": (buffer.handle + 512, False),
    "strides": None, "stream": stream.handle,
}, view.__cuda_array_interface__
for given, told in ((None, 1), (0, 1), (1, 1), (2, 2), (stream, stream.handle)):
    for memory in (pool.allocate(64, given), pool.growable(64, stream=given)):
        if isinstance(memory, growpool.Growable):
            memory.resize(64)
        seen = memory.view(8, "complex64").__cuda_array_interface__
        assert (seen["stream"], seen["typestr"]) == (told, "<c8"), (given, seen)
empty = buffer.view((0, 3)).__cuda_array_interface__
assert (empty["data"], empty["shape"]) == ((0, False), (0, 3))
del view
"""
    )


def test_only_open_views_have_it(run: Run) -> None:
    run(
        """
view = buffer.view(8)
assert not hasattr(buffer, "__cuda_array_interface__")
assert not hasattr(buffer.view(4, "bfloat16"), "__cuda_array_interface__")
try:
    buffer.view(4, "bfloat16").__cuda_array_interface__
except AttributeError as error:
    assert "DLPack" in str(error)
view.close()
try:
    view.__cuda_array_interface__
    raise AssertionError
except growpool.PoolStateError as error:
    assert error.reason == "closed"
"""
    )


def test_a_view_pins(run: Run) -> None:
    run(
        """
view = buffer.view(8)
for thing in (buffer, pool):
    try:
        thing.close()
        raise AssertionError
    except BufferError:
        pass
del view
buffer.close()
"""
    )


def test_dlpack(run: Run) -> None:
    run(
        """
assert buffer.__dlpack_device__() == (2, 0)
for given in (None, 1, 2, -1, stream, stream.handle):
    taken = Taken(buffer.__dlpack__(stream=given, dl_device=(2, 0), max_version=(1, 1)))
    assert (taken.device, taken.tensor.data) == ((2, 0), buffer.handle)
    taken.delete()
try:
    buffer.__dlpack__(stream=0)
    raise AssertionError
except ValueError as error:
    assert "ambiguous" in str(error)
try:
    memoryview(buffer)
    raise AssertionError
except BufferError as error:
    assert "cuda:0" in str(error)
"""
    )


def test_copies_by_the_driver(run: Run) -> None:
    run(
        """
other = pool.allocate(4096)
buffer.fill(3)
buffer.copy_from(other, stream)
buffer.copy_from(bytes(4096), stream)
buffer.copy_to(bytearray(4096))
with growpool.Pool("host") as host:
    near = host.allocate(4096)
    near.copy_from(buffer)
    near.copy_to(buffer, stream)
"""
    )


def test_a_closed_cuda_stream_ends_a_use(run: Run) -> None:
    run(
        """
idle = growpool.cuda.Stream()
idle.close()
block = pool.malloc(64)
pool.free(block, idle)
pool.forget_stream(idle)
buffer.close(idle)
try:
    pool.malloc(64, idle)
    raise AssertionError
except ValueError as error:
    assert "closed" in str(error)
"""
    )
