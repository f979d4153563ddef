# SPDX-License-Identifier: Apache-2.0
"""Promise 9, the gate: a thread that comes to it too late is parked, and never raised at.

Each scenario is a process whose daemon thread is inside growpool, or about to enter it, when the
process ends. A handler that atexit runs after growpool's own lets the thread go on and looks at it:
it must not have come back, and no ``except``, ``finally`` or ``__exit__`` of its may have run.
All processes run at once, for most of their time is waiting.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import run_quietly

FRAME = """
import atexit, os, threading, time
told = []
go_on = threading.Event()
started = threading.Event()
def look():
    go_on.set()
    thread.join(0.4)  # longer than it takes to be raised at
    print("alive" if thread.is_alive() else "ended", told)
atexit.register(look)  # so it runs after growpool's
import growpool
from helpers import PAGE, Supplier
class Telling:
    def __enter__(self): return self
    def __exit__(self, *raised): told.append(f"__exit__ {raised[0]}")
books = Supplier()
def wait_in_alloc(*args):
    started.set(); go_on.wait(); return books.alloc(*args)
def wait_in_free(*args):
    started.set(); go_on.wait(); books.free(*args)
SETUP
def work():
    try:
        with growpool.Pool("host", name="of the thread"), Telling():
            STEP
            told.append("came back")
    except BaseException as error:
        told.append(f"except {error!r}")
    finally:
        told.append("finally")
thread = threading.Thread(target=work, daemon=True)
thread.start()
assert started.wait(20)
"""

# What is there, and what the thread does; `started` says that it is about to, or inside.
SCENARIOS = {
    "inside alloc": (
        "pool = growpool.Pool('host', alloc=wait_in_alloc, free=books.free)",
        "pool.malloc(PAGE)",
    ),
    "inside free": (
        "pool = growpool.Pool('host', alloc=books.alloc, free=wait_in_free)",
        "pool.allocate(PAGE).close(); pool.trim()",
    ),
    "inside the alloc of a backing in C": (
        "caching = growpool.CachingBacking(type('B', (), dict(alloc=staticmethod(wait_in_alloc),"
        " free=staticmethod(books.free)))(), keep=0)",
        "caching.alloc(PAGE, -1)",
    ),
    "waiting for a stream": (
        "pool = growpool.Pool('host'); stream = growpool.host.Stream()\n"
        "buffer = pool.allocate(PAGE, stream)\n"
        "stream.submit(lambda: (started.set(), go_on.wait()))",
        "buffer.close(); pool.trim()",
    ),
    "synchronising": (
        "stream = growpool.host.Stream(); stream.submit(lambda: (started.set(), go_on.wait()))",
        "stream.synchronize()",
    ),
    "about to allocate": (
        "pool = growpool.Pool('host')",
        "started.set(); go_on.wait(); pool.malloc(PAGE)",
    ),
    "about to make a pool": ("", "started.set(); go_on.wait(); growpool.Pool('host')"),
    "about to make a chunk": ("", "started.set(); go_on.wait(); growpool.Chunk.create(PAGE)"),
    "about to close its own pool": ("", "started.set(); go_on.wait()"),
}


@pytest.fixture(scope="module")
def outputs() -> dict[str, str]:
    """What each process printed; all of them ended with 0 and wrote nothing to stderr."""

    def run(parts: tuple[str, str]) -> str:
        code = FRAME.replace("SETUP", parts[0]).replace("STEP", parts[1])
        try:
            return run_quietly(code, timeout=60)
        except AssertionError as error:
            return str(error)

    with ThreadPoolExecutor(len(SCENARIOS)) as executor:
        return dict(zip(SCENARIOS, executor.map(run, SCENARIOS.values()), strict=True))


@pytest.mark.parametrize("name", [name for name in SCENARIOS if "its own" not in name])
def test_a_thread_that_is_late_is_parked(outputs: dict[str, str], name: str) -> None:
    assert outputs[name] == "alive []\n"


def test_a_with_statement_that_ends_late_is_parked_in_it(outputs: dict[str, str]) -> None:
    """The end of the block closes its pool, which is a call into growpool like any other."""
    assert outputs["about to close its own pool"] == "alive ['came back', '__exit__ None']\n"
