# SPDX-License-Identifier: Apache-2.0
"""Exports and the ends of things: weak references, cycles, resurrection, exit, forks."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import growpool
import numpy
import pytest
from exports_kit import MAKERS, Export, Maker
from helpers import PAGE, Supplier, eventually, run_quietly

Pool = growpool.Pool


# ---- cycles and weak references ----


@pytest.mark.parametrize("make", MAKERS)
def test_weak_references(pool: Pool, make: Maker) -> None:
    memory = make(pool)
    view = memory.view(10)
    dead = [weakref.ref(memory), weakref.ref(view)]
    assert dead[0]() is memory
    del memory
    assert dead[0]() is view.base
    del view
    assert [reference() for reference in dead] == [None, None]
    assert pool.stats.used_bytes == 0


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("how", ["view", "memoryview"])
def test_cycles_through_exports_are_collected(make: Maker, how: str) -> None:
    books = Supplier()
    box: list[Any] = []

    def free(chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
        assert len(box) >= 1 or box == []  # the closure is whole when free runs
        books.free(chunk, size, device, stream)

    pool = Pool("host", alloc=books.alloc, free=free)
    memory = make(pool)
    loop: list[Any] = [pool, memory, Export(memory, how)]
    loop.append(loop)
    dead = weakref.ref(memory)
    del pool, memory, loop, free
    gc.collect()
    assert dead() is None
    eventually(lambda: books.out == [])


def test_a_view_that_is_resurrected_still_has_its_memory(supplier: Supplier) -> None:
    saved: list[Any] = []

    class Saver:
        def __init__(self, view: Any) -> None:
            self.view = view
            self.me = self

        def __del__(self) -> None:
            saved.append(self.view)

    pool = Pool("host", backing=supplier)
    for make in MAKERS:
        Saver(make(pool).view(PAGE))
        gc.collect()
        (view,) = saved
        view.fill(9)
        assert bytes(memoryview(view)[:4]) == b"\x09" * 4
        assert numpy.from_dlpack(view)[0] == 9
        with pytest.raises(BufferError):
            pool.close()
        saved.clear()
        del view
    pool.close()


# ---- the end of the process, and forks ----

START = """
import growpool, numpy, os, sys, threading
from helpers import Supplier, PAGE
from dlpack_reader import Taken
books = Supplier()
pool = growpool.Pool("host", backing=books)
buffer = pool.allocate(PAGE)
growable = pool.growable("1 GiB"); growable.resize(4 * PAGE)
sparse = pool.range("1 GiB"); sparse.commit(0, PAGE)
"""


@pytest.mark.parametrize(
    "body",
    [
        "kept = [x.view(PAGE) for x in (buffer, growable, sparse)]",
        "kept = [memoryview(x.view(PAGE)) for x in (buffer, growable, sparse)]",
        "kept = [x.view(PAGE).__dlpack__() for x in (buffer, growable, sparse)]",
        "kept = [numpy.from_dlpack(x.view(PAGE)) for x in (buffer, growable, sparse)]",
        "kept = [numpy.from_dlpack(x.view(PAGE)) for x in (buffer, growable, sparse)]\n"
        "del pool, buffer, growable, sparse",
        "sys.kept = [numpy.from_dlpack(x.view(PAGE)) for x in (buffer, growable, sparse)]",
        "kept = [Taken(x.view(PAGE).__dlpack__()) for x in (buffer, growable, sparse)]\n"
        "import atexit\natexit.register(lambda: [x.delete() for x in kept])",
        "import ctypes\n"
        "kept = Taken(buffer.__dlpack__())\n"
        "def late():\n"
        "    while True: sparse.view(PAGE).__dlpack__()\n"
        "threading.Thread(target=late, daemon=True).start()",
        "growable.resize(9 * PAGE); sparse.commit(PAGE, PAGE); sys.kept = [growable, sparse]",
    ],
)
def test_live_exports_at_exit(body: str) -> None:
    run_quietly(START + body)


def test_a_deleter_from_before_the_import_runs_after_the_shut_down() -> None:
    run_quietly(
        "import atexit\nkept = []\natexit.register(lambda: [x.delete() for x in kept])\n"
        + START
        + "kept += [Taken(x.view(PAGE).__dlpack__()) for x in (buffer, growable, sparse)]"
    )


def test_exports_in_a_forked_child() -> None:
    run_quietly(
        START
        + """
import warnings
warnings.filterwarnings("ignore", category=DeprecationWarning)
views = [x.view(PAGE) for x in (buffer, growable, sparse)]
taken = [Taken(x.__dlpack__()) for x in views]
kept = memoryview(views[0])
kept[:4] = b"mine"
def reason(call):
    try:
        call()
    except growpool.PoolStateError as error:
        return error.reason
sys.stdout.flush()
process = os.fork()
if process == 0:
    calls = [lambda: growable.resize(1), lambda: sparse.commit(0, PAGE),
             lambda: sparse.decommit(0, PAGE), lambda: pool.growable(1), lambda: pool.range(1),
             lambda: buffer.view(1), buffer.__dlpack__, lambda: buffer.fill(1),
             lambda: buffer.copy_from(bytes(PAGE)), growable.close, sparse.close, buffer.close]
    wrong = [i for i, call in enumerate(calls) if reason(call) != "forked"]
    if wrong:
        print("not forked:", wrong, flush=True)
        os._exit(9)
    (growable.size, sparse.committed, sparse.committed_bytes, growable.physical_bytes)
    repr(growable), repr(sparse), repr(views)
    kept[:4] = b"hers"
    kept.release()
    for export in taken:
        export.delete()
    del views, buffer, growable, sparse, pool
    sys.exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
assert status == 0, status
assert bytes(kept[:4]) == b"mine"
kept.release()
for export in taken:
    export.delete()
del views
pool.close()
assert books.out == []
"""
    )
