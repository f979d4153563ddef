# SPDX-License-Identifier: Apache-2.0
"""The README's example, word for word, and what it promises around it."""

from __future__ import annotations

import pathlib
import re

import growpool
import pytest
from helpers import MIB, run_python, run_quietly

EXAMPLE = """\
import growpool, numpy as np
taken = []
def alloc(size, device, stream):
    chunk = growpool.Chunk.create(size, device); taken.append(chunk); return chunk
def free(chunk, size, device, stream):
    taken.remove(chunk)
with growpool.Pool("host", alloc=alloc, free=free, limit="256 MiB", name="demo") as pool:
    a = pool.allocate("64 MiB")
    v = np.frombuffer(a, dtype="f4"); v[:] = 1; del v
    p = pool.malloc(1000, None); pool.free(p)
    try: pool.allocate("256 MiB")
    except growpool.LimitExceededError as e: print(e)
    a.close(); print(pool.trim(), pool.stats); pool.set_limit("1 GiB")
assert not taken
"""

GROWING = """\
import growpool, numpy as np
with growpool.Pool("host") as pool:
    g = pool.growable("64 GiB")                   # one address for good; growing copies nothing
    g.resize("1 MiB"); a = np.from_dlpack(g.view((256, 1024), "float32")); a[:] = 1
    g.resize("1 GiB"); assert a[0, 0] == 1        # the array is still right where it was
    del a; print(g.resize(0))                     # released_bytes and kept_bytes
    r = pool.range("64 GiB"); page = r.granularity    # memory only where you commit it
    r.commit_many([(0, page), (99 * page, page)]); r.fill(0)
    r.copy_from(b"hello", offset=99 * page); out = bytearray(5)
    r.copy_to(out, offset=99 * page); assert out == b"hello"
    print(r.decommit(0, page), r.committed)
"""


def test_growing() -> None:
    resized, decommitted = run_quietly(GROWING).splitlines()
    assert resized == f"growpool.ReleaseResult(released_bytes={1024 * MIB}, kept_bytes=0)"
    assert decommitted.endswith(f"kept_bytes=0) [({99 * 2 * MIB}, {2 * MIB})]")


def test_example() -> None:
    output = run_quietly(EXAMPLE)
    error, stats = output.splitlines()
    assert "no room for 256 MiB" in error and "a limit of 256 MiB" in error
    released = int(stats.split(" ", 1)[0])
    assert released >= 64 * MIB
    assert "physical_bytes=0" in stats


def test_readme_shows_both_examples() -> None:
    readme = pathlib.Path(__file__).parents[2] / "README.md"
    blocks = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    assert EXAMPLE in blocks
    assert GROWING in blocks


def test_import_touches_no_driver() -> None:
    output = run_quietly(
        """
        import growpool
        with open("/proc/self/maps") as maps:
            print("libcuda" in maps.read())
        """
    )
    assert output == "False\n"


def test_cuda_is_available_or_the_reason_is_a_sentence() -> None:
    reason = growpool.cuda_unavailable_reason()
    assert growpool.is_cuda_available() == (reason is None)
    if reason is not None:
        assert len(reason) > 20
        with pytest.raises(growpool.DriverError) as caught:
            growpool.Pool("cuda:0")
        assert str(caught.value) == reason


def test_bookkeeping_is_what_pools_cost() -> None:
    before = growpool.bookkeeping_bytes()
    with growpool.Pool("host", address_space="1 GiB") as pool:
        kept = [pool.allocate(512) for _ in range(1000)]
        held = growpool.bookkeeping_bytes() - before
        assert 1000 * 100 < held < 1000 * 400 + 2 * (1 << 15)
        del kept
    assert growpool.bookkeeping_bytes() - before < 2 * (1 << 15)


def test_default_device_is_the_first_gpu_or_the_host() -> None:
    with growpool.Pool() as pool:
        assert pool.device == ("cuda:0" if growpool.is_cuda_available() else "host")


def test_a_second_import_works() -> None:
    result = run_python(
        """
        import sys, growpool
        first = growpool.Pool("host"); kept = first.allocate(100)
        for name in [n for n in sys.modules if n.startswith("growpool")]:
            del sys.modules[name]
        import growpool
        second = growpool.Pool("host"); also = second.allocate(100)
        """
    )
    assert (result.returncode, result.stderr) == (0, "")
