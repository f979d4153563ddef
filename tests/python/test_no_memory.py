# SPDX-License-Identifier: Apache-2.0
"""Python's own allocator fails at every step in turn: MemoryError, and nothing is lost."""

from __future__ import annotations

import pytest
from helpers import run_quietly

SCENARIO = """
import gc, sys, time, warnings
import _testcapi
import growpool
PAGE = 2 << 20
out = []  # a set may keep what it had no memory to add
def alloc(size, device, stream):
    chunk = growpool.Chunk.create(size, device)
    out.append(chunk)
    return chunk
def free(chunk, size, device, stream):
    if chunk in out:
        out.remove(chunk)
def make():
    return growpool.Pool("host", alloc=alloc, free=free, chunk_size=PAGE, name="short")
def scenario(pool):
    buffer = pool.allocate("3 MiB", stream=stream)
    view = memoryview(buffer)
    view[0] = 1
    view.release()
    address = pool.malloc(1000)
    pool.free(address)
    pool.snapshot(), pool.stats, repr(pool), pool.set_limit("1 GiB"), pool.unreturned
    part = buffer.view((4, 4), "float32")
    part.fill(1), part.copy_from(bytes(64)), part.copy_to(bytearray(64))
    memoryview(part).release(), part.__dlpack__(), buffer.__dlpack__(max_version=(1, 0))
    part.close()
    del part
    growable, sparse = pool.growable("1 GiB"), pool.range("1 GiB")
    growable.resize("3 MiB"), growable.resize(0)
    sparse.commit_many([(0, PAGE), (2 * PAGE, PAGE)])
    sparse.fill(1), sparse.committed, repr(sparse), repr(growable)
    sparse.decommit_many([(0, 4 * PAGE)])
    buffer.close()
    pool.trim()
    pool.forget_stream(stream)
    pool.close()
def settle():
    end = time.monotonic() + 10
    while out and time.monotonic() < end:
        time.sleep(0.01)
    assert not out, out
sys.unraisablehook = lambda info: None
warnings.simplefilter("ignore", growpool.ReleaseWarning)
stream = growpool.host.Stream()
# The delivery thread gets its thread state now: CPython ends the process if that one fails.
make().malloc(1000)
gc.collect()
settle()
failed = 0
for number in range(600):
    pool = None
    _testcapi.set_nomemory(number, number + 1)
    try:
        pool = make()
        scenario(pool)
    except MemoryError:
        failed += 1
    finally:
        _testcapi.remove_mem_hooks()
    if pool is not None:
        pool.close()
        pool.return_unreturned()
        assert pool.stats.physical_bytes == 0, (number, pool.stats)
gc.collect()
settle()
print(failed)
"""


def test_no_memory() -> None:
    pytest.importorskip("_testcapi", reason="this Python was built without its test modules")
    assert int(run_quietly(SCENARIO)) > 60
