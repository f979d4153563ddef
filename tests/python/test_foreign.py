# SPDX-License-Identifier: Apache-2.0
"""Threads in C that Python never saw, on pools with Python callbacks, through the capsule.

What such a thread allocates enters Python through the gate. What it frees is queued: at once,
without memory, whoever has the interpreter; it is delivered at the next safe point.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import growpool
import pytest
from consumer_kit import build, load
from helpers import MIB, PAGE, Supplier, eventually, run_quietly

START = """
import atexit, os, sys, threading, time, warnings
early = []  # runs after growpool's own handler
atexit.register(lambda: [each() for each in early])
from consumer_kit import load
foreign = load({module!r})
import growpool
from helpers import PAGE, Supplier, eventually
books = Supplier()
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("foreign", tmp_path_factory.mktemp("foreign"))


@pytest.fixture(scope="module")
def foreign(module: Path) -> ModuleType:
    return load(module)


@pytest.fixture
def thread(foreign: ModuleType, pool: growpool.Pool) -> Iterator[int]:
    """A thread in C that holds a reference to the pool."""
    number = int(foreign.start(pool))
    yield number
    foreign.end(number)


def allocate(foreign: ModuleType, thread: int, size: int) -> int:
    foreign.begin(thread, "allocate", size)
    return int(foreign.wait(thread))


# ---- allocations enter Python ----


def test_an_allocation_calls_alloc_on_the_thread_itself(
    foreign: ModuleType, pool: growpool.Pool, supplier: Supplier, thread: int
) -> None:
    address = allocate(foreign, thread, MIB)
    assert pool.stats.used_bytes == MIB
    assert [call[0] for call in supplier.calls] == ["alloc"]
    assert supplier.threads.isdisjoint(each.ident for each in threading.enumerate())
    pool.free(address)  # any thread may


def test_a_thread_keeps_one_identity_in_python_until_it_ends(
    foreign: ModuleType, supplier: Supplier
) -> None:
    """Its thread state is kept from visit to visit, and goes with the thread."""
    local = threading.local()
    visits: list[int] = []
    gone: list[weakref.ref[Any]] = []

    class Mark:
        pass

    def alloc(size: int, device: int, stream: int) -> growpool.Chunk | None:
        if not hasattr(local, "mark"):
            local.mark, local.visits = Mark(), 0
            gone.append(weakref.ref(local.mark))
        local.visits += 1
        visits.append(local.visits)
        return supplier.alloc(size, device, stream)

    with growpool.Pool("host", alloc=alloc, free=supplier.free, chunk_size=PAGE) as pool:
        for _ in range(20):
            thread = foreign.start(pool)
            for _ in range(3):
                allocate(foreign, thread, PAGE)
            foreign.end(thread)
    assert visits == [1, 2, 3] * 20
    assert [mark() for mark in gone] == [None] * 20


def test_what_alloc_raises_is_a_status_there_and_told_to_the_hook(
    foreign: ModuleType, unraisable: list[Any]
) -> None:
    """No call from Python is there to raise it: the thread gets the status and a sentence."""
    error: list[BaseException] = [KeyError("mine")]

    def alloc(size: int, device: int, stream: int) -> growpool.Chunk:
        raise error[0]

    with growpool.Pool("host", alloc=alloc, free=lambda *_: None, name="theirs") as pool:
        thread = foreign.start(pool)
        for error[0], message in [
            (KeyError("mine"), "callback failed: the alloc of pool 'theirs' raised an exception"),
            (KeyboardInterrupt(), "callback failed: the alloc of pool 'theirs' raised"),
            (MemoryError("none"), "out of memory: the backing of pool 'theirs' had no memory"),
        ]:
            unraisable.clear()
            foreign.begin(thread, "allocate", MIB)
            with pytest.raises(RuntimeError, match=message):
                foreign.wait(thread)
            assert set(map(id, unraisable)) == {id(error[0])}
        assert pool.stats.physical_bytes == 0
        foreign.end(thread)


def test_it_waits_in_alloc_for_a_python_thread_that_grows_the_same_pool(
    foreign: ModuleType, supplier: Supplier
) -> None:
    inside, waited = threading.Event(), threading.Event()
    main = threading.get_ident()

    def alloc(size: int, device: int, stream: int) -> growpool.Chunk | None:
        if threading.get_ident() != main:
            inside.set()
            assert waited.wait(20)
        return supplier.alloc(size, device, stream)

    with growpool.Pool("host", alloc=alloc, free=supplier.free, chunk_size=PAGE) as pool:
        thread = foreign.start(pool)
        foreign.begin(thread, "allocate", PAGE)
        assert inside.wait(20)
        pool.malloc(2 * PAGE)
        waited.set()
        foreign.wait(thread)
        foreign.end(thread)


# ---- frees are queued ----


def test_a_free_returns_at_once_while_another_thread_has_the_interpreter(
    foreign: ModuleType, pool: growpool.Pool, supplier: Supplier, thread: int
) -> None:
    """And it asks growpool's heap for nothing: that has no memory meanwhile."""
    addresses = [allocate(foreign, thread, PAGE) for _ in range(5)]
    fail_memory = growpool._core._testing.fail_memory  # type: ignore[attr-defined]
    for address in addresses:
        fail_memory(True)
        foreign.begin(thread, "free", address)
        try:
            foreign.wait_attached(thread)  # sits in C with the interpreter held
        finally:
            asked = fail_memory(False)
        assert asked == 0
    assert pool.stats.used_bytes == 0
    assert supplier.taken == 0  # no callback ran, on any thread
    pool.trim()  # the next safe point
    assert supplier.out == []


def test_a_range_is_dropped_at_once_although_there_is_no_memory(
    foreign: ModuleType, pool: growpool.Pool, supplier: Supplier, thread: int
) -> None:
    """What could not be set retiring for want of memory goes at the next safe point."""
    fail_memory = growpool._core._testing.fail_memory  # type: ignore[attr-defined]
    foreign.begin(thread, "commit", 7)
    foreign.wait(thread)
    assert pool.stats.used_bytes == 7 * PAGE
    fail_memory(True)
    foreign.begin(thread, "drop")
    try:
        foreign.wait_attached(thread)
    finally:
        fail_memory(False)
    assert pool.stats.used_bytes == 0
    pool.trim()
    eventually(lambda: supplier.out == [])  # the delivery thread may have been first
    eventually(lambda: pool.stats.address_bytes == 0)


def test_a_free_calls_malloc_not_once(
    module: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LD_PRELOAD", str(build("count_malloc", tmp_path)))
    run_quietly(
        START.format(module=str(module))
        + """
pool = growpool.Pool("host", backing=books, chunk_size=PAGE)
thread = foreign.start(pool)
sizes = [512, PAGE, 3 * PAGE + 7, 70000] * 20
addresses, counts = [], []
for size in sizes:
    foreign.begin(thread, "allocate", size)
    addresses.append(foreign.wait(thread))
    counts.append(foreign.mallocs(thread))
assert max(counts) > 0, "nothing is counted"
for address in addresses[::2] + addresses[1::2]:
    foreign.begin(thread, "free", address)
    foreign.wait_attached(thread)
    assert foreign.mallocs(thread) == 0
assert pool.stats.used_bytes == 0
foreign.end(thread)
pool.close()
assert books.out == []
"""
    )


def test_the_thread_itself_may_be_the_safe_point(
    foreign: ModuleType, pool: growpool.Pool, supplier: Supplier, thread: int
) -> None:
    foreign.begin(thread, "free", allocate(foreign, thread, PAGE))
    foreign.wait_attached(thread)
    foreign.begin(thread, "trim")
    foreign.wait(thread)
    assert supplier.taken == 1
    assert len(supplier.threads) == 1


def test_the_last_reference_goes_while_another_thread_has_the_interpreter(
    foreign: ModuleType, supplier: Supplier
) -> None:
    """Letting go of a pool only queues too; the delivery thread closes it."""
    pool = growpool.Pool("host", alloc=supplier.alloc, free=supplier.free)
    thread = foreign.start(pool)
    allocate(foreign, thread, MIB)
    del pool
    gc.collect()
    assert supplier.taken == 0
    foreign.begin(thread, "release")
    foreign.wait_attached(thread)
    eventually(lambda: supplier.taken == 1)
    foreign.end(thread)


# ---- many of them ----


def test_eight_threads_in_c_beside_four_in_python(foreign: ModuleType, supplier: Supplier) -> None:
    failures: list[BaseException] = []
    over = threading.Event()

    def work() -> None:
        try:
            while not over.is_set():
                with contextlib.suppress(growpool.OutOfMemoryError):
                    pool.free(pool.malloc(3 * PAGE))
                    pool.allocate(1000)
                pool.trim(wait=False)
                gc.collect(0)
        except BaseException as error:
            failures.append(error)

    with growpool.Pool("host", backing=supplier, chunk_size=PAGE, limit=48 * PAGE) as pool:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for each in threads:
            each.start()
        allocations, refusals, failed = foreign.storm(pool, 8, 150)
        over.set()
        for each in threads:
            each.join(20)
            assert not each.is_alive()
        assert failures == []
        assert (allocations + refusals, failed) == (8 * 150, 0)
        assert allocations > 0
        assert pool.stats.used_bytes == 0
    assert supplier.out == []


# ---- the end of the process ----

ENDS = {
    "inside alloc": """
started = threading.Event()
def alloc(*args):
    started.set(); time.sleep(1000)
pool = growpool.Pool("host", alloc=alloc, free=books.free)
foreign.begin(foreign.start(pool), "allocate", PAGE)
assert started.wait(20)
""",
    "with memory that it frees too late": """
pool = growpool.Pool("host", backing=books)
thread = foreign.start(pool)
foreign.begin(thread, "allocate", PAGE)
address = foreign.wait(thread)
def free():
    foreign.begin(thread, "free", address)
    try:
        foreign.wait(thread)
        print("freed")
    except RuntimeError as error:
        print(error)
early.append(free)
""",
    "about to allocate": """
pool = growpool.Pool("host", backing=books)
thread = foreign.start(pool)
def late():
    foreign.begin(thread, "allocate", PAGE)
    try:
        foreign.wait(thread)
        print("allocated")
    except RuntimeError as error:
        print(error)
early.append(late)
""",
    "and ends after it": """
pool = growpool.Pool("host", backing=books)
thread = foreign.start(pool)
foreign.begin(thread, "allocate", PAGE)
foreign.wait(thread)
early.append(lambda: print(foreign.end(thread)))
""",
    "in full work": """
pool = growpool.Pool("host", backing=books, chunk_size=PAGE, limit=24 * PAGE)
storm = threading.Thread(target=foreign.storm, args=(pool, 8, 1 << 30), daemon=True)
storm.start()
eventually(lambda: books.given > 50)
""",
}
PRINTS = {
    "with memory that it frees too late": "wrong state: the process is shutting down",
    "about to allocate": "wrong state: the process is shutting down",
    "and ends after it": "None",
}


@pytest.fixture(scope="module")
def outputs(module: Path) -> dict[str, str]:
    """What each process printed, all run at once; each ended with 0 and an empty stderr."""

    def run(code: str) -> str:
        try:
            return run_quietly(START.format(module=str(module)) + code)
        except AssertionError as error:
            return f"failed: {error}"

    with ThreadPoolExecutor(len(ENDS)) as executor:
        return dict(zip(ENDS, executor.map(run, ENDS.values()), strict=True))


@pytest.mark.parametrize("name", ENDS)
def test_the_process_ends_well_with_a_thread(outputs: dict[str, str], name: str) -> None:
    if name in PRINTS:
        assert outputs[name].startswith(PRINTS[name])
    else:
        assert outputs[name] == ""


# ---- forks ----


@pytest.mark.parametrize("moment", ["between two visits", "inside alloc"])
def test_a_fork_beside_a_thread(module: Path, moment: str) -> None:
    """The child's pool refuses, in Python and in a new thread in C, and the child ends well."""
    output = run_quietly(
        START.format(module=str(module))
        + f"""
warnings.filterwarnings("ignore", category=DeprecationWarning)
started, go_on = threading.Event(), threading.Event()
def alloc(*args):
    started.set(); assert go_on.wait(20)
    return books.alloc(*args)
pool = growpool.Pool("host", alloc=alloc, free=books.free)
thread = foreign.start(pool)
foreign.begin(thread, "allocate", PAGE)
assert started.wait(20)
if {moment == "between two visits"}:
    go_on.set()
    foreign.wait(thread)
sys.stdout.flush()
child = os.fork()
if child == 0:
    try:
        pool.malloc(1)
    except growpool.PoolStateError as error:
        print(error.reason)
    another = foreign.start(pool)
    foreign.begin(another, "allocate", PAGE)
    try:
        foreign.wait(another)
    except RuntimeError as error:
        print(error)
    foreign.end(another)
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
go_on.set()
foreign.wait(thread)
foreign.end(thread)
pool.close()
assert books.out == []
"""
    )
    assert output.startswith("forked\nwrong state: pool '' was made before this process was forked")
