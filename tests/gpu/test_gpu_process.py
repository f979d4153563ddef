# SPDX-License-Identifier: Apache-2.0
"""The ends of a process that uses a GPU: exits with live pools, and forks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

HERE = Path(__file__).resolve().parent

OPENING = """
import atexit, os, sys, threading, time
import growpool
from cuda_driver import Gpu, Latch
MIB = 1 << 20
taken = []
def alloc(size, device, stream):
    chunk = growpool.Chunk.create(size, device)
    taken.append(chunk)
    return chunk
def free(chunk, size, device, stream):
    taken.remove(chunk)
"""


def run(body: str, code: int = 0, output: str = "") -> None:
    """Runs a program to its end: its exit code, nothing on stderr, in time."""
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    result = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", OPENING + body],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stderr == ""
    assert result.returncode == code
    assert result.stdout.strip() == output


def test_readme_example_on_the_gpu() -> None:
    """The example as it stands in the README, on "cuda:0" and without its NumPy line."""
    readme = (HERE.parent.parent / "README.md").read_text()
    example = next(block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL))
    lines = [line for line in example.splitlines() if "np.frombuffer" not in line]
    program = "\n".join(lines).replace('"host"', '"cuda:0"').replace(", numpy as np", "")
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0 and result.stderr == "", result.stderr
    refused, figures = result.stdout.splitlines()
    assert "no room for 256 MiB" in refused
    assert "physical_bytes=0" in figures


def test_import_loads_no_driver() -> None:
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "import growpool; print('libcuda' in open('/proc/self/maps').read())",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout.strip() == "False", result.stderr


def test_early_unmap_is_an_illegal_address() -> None:
    """The oracle of the fence tests: had growpool unmapped too early, they would have seen it."""
    run(
        """
import struct
from ctypes import byref, c_size_t, c_ulonglong
from cuda_driver import CudaError
gpu = Gpu()
latch = Latch(gpu, seconds=5)
stream = gpu.create_stream()
va, memory, size, none = c_ulonglong(), c_ulonglong(), c_size_t(2 * MIB), c_ulonglong(0)
pinned_on_device = struct.pack("IIIiQQ", 1, 0, 1, 0, 0, 0)
device_may_write = struct.pack("IiI", 1, 0, 3)
gpu.cuda.cuMemAddressReserve(byref(va), size, c_size_t(0), none, none)
gpu.cuda.cuMemCreate(byref(memory), size, pinned_on_device, none)
gpu.cuda.cuMemMap(va, size, c_size_t(0), memory, none)
gpu.cuda.cuMemSetAccess(va, size, device_may_write, c_size_t(1))
latch.hold(stream)
gpu.fill(stream, va.value, 2 * MIB, 1)
gpu.cuda.cuMemUnmap(va, size)
latch.open()
try:
    gpu.synchronize()
except CudaError as error:
    print(error.code, flush=True)
os._exit(0)
""",
        output="700",
    )


def test_pool_over_a_dead_context_ends() -> None:
    """A kernel killed the context: nothing can still run, so nothing is waited for."""
    run(
        """
from cuda_driver import CudaError
gpu = Gpu()
stream = gpu.create_stream()
pool = growpool.Pool("cuda:0", alloc=alloc, free=free)
kept = pool.malloc(8 * MIB, stream)
address = pool.malloc(8 * MIB, stream)
gpu.fill(stream, 1 << 46, 4096, 1)
try:
    gpu.synchronize()
except CudaError as error:
    print(error.code)
pool.free(address, stream)
start = time.monotonic()
for end in (pool.trim, pool.close):
    try:
        end()
    except growpool.DriverError as error:
        pass  # the driver may refuse to unmap; it must say so and not hang
print(time.monotonic() - start < 10)
""",
        output="700\nTrue",
    )


def test_exit_with_live_pools() -> None:
    run("""
pool = growpool.Pool("cuda:0", alloc=alloc, free=free, name="left")
plain = growpool.Pool("cuda:0")
address = pool.malloc(64 * MIB)
buffer = pool.allocate(32 * MIB)
other = plain.allocate(8 * MIB)
pool.free(pool.malloc(16 * MIB))
""")


def test_exit_code_is_kept() -> None:
    run(
        """
pool = growpool.Pool("cuda:0", alloc=alloc, free=free)
buffer = pool.allocate(32 * MIB)
sys.exit(7)
""",
        code=7,
    )


def test_exit_under_running_work() -> None:
    run("""
gpu = Gpu()
latch = Latch(gpu, seconds=2)
stream = gpu.create_stream()
pool = growpool.Pool("cuda:0", alloc=alloc, free=free)
address = pool.malloc(8 * MIB, stream)
latch.hold(stream)
gpu.fill(stream, address, 8 * MIB, 1)
pool.free(address, stream)
pool.trim(wait=False)
""")


def test_exit_with_a_daemon_thread_at_work() -> None:
    run("""
pool = growpool.Pool("cuda:0", alloc=alloc, free=free, limit="256 MiB")
started = threading.Event()
def work():
    while True:
        pool.free(pool.malloc(16 * MIB))
        pool.trim()
        started.set()
threading.Thread(target=work, daemon=True).start()
assert started.wait(30)
""")


def test_exit_with_a_pool_in_a_cycle() -> None:
    run("""
class Owner:
    def __init__(self):
        self.pool = growpool.Pool("cuda:0", alloc=self.alloc, free=self.free)
        self.buffer = self.pool.allocate(8 * MIB)
    def alloc(self, size, device, stream):
        return growpool.Chunk.create(size, device)
    def free(self, chunk, size, device, stream):
        pass
Owner()
""")


def test_pool_used_in_atexit() -> None:
    run(
        """
pool = growpool.Pool("cuda:0", alloc=alloc, free=free)
def last():
    pool.free(pool.malloc(8 * MIB))
    print(pool.trim() >= 8 * MIB)
atexit.register(last)
""",
        output="True",
    )


def test_forked_child_is_refused_and_harmless() -> None:
    """The child makes no driver call and the parent's memory stays as it was."""
    run(
        """
gpu = Gpu()
pool = growpool.Pool("cuda:0", alloc=alloc, free=free)
address = pool.malloc(8 * MIB)
buffer = pool.allocate(8 * MIB)
gpu.fill(0, address, 8 * MIB, 1)
gpu.synchronize()
before = gpu.read(address, 4096)
child = os.fork()
if child == 0:
    code = 1
    try:
        pool.malloc(MIB)
    except growpool.PoolStateError as error:
        code = 0 if error.reason == "forked" else 2
    del buffer
    sys.exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert gpu.read(address, 4096) == before
pool.free(address)
buffer.close()
print(pool.trim() > 0)
pool.close()
""",
        output="True",
    )


def test_child_process_has_a_device_of_its_own() -> None:
    run(
        """
import subprocess
pool = growpool.Pool("cuda:0")
pool.malloc(MIB)
command = "import growpool; p = growpool.Pool('cuda:0'); p.free(p.malloc(1 << 20)); p.close()"
print(subprocess.run([sys.executable, "-c", command]).returncode)
pool.close()
""",
        output="0",
    )
