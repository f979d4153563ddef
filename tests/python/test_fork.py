# SPDX-License-Identifier: Apache-2.0
"""After a fork the child's objects refuse work, and the parent's memory is untouched."""

from __future__ import annotations

import multiprocessing
import os
import sys

import growpool
import pytest
from helpers import PAGE, Supplier, run_quietly

START = """
import growpool, os, sys, threading, time, warnings
from helpers import Supplier, PAGE
warnings.filterwarnings("ignore", category=DeprecationWarning)
books = Supplier()
def fork(child):
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        try:
            child()
        except BaseException as error:
            print("child failed:", type(error).__name__, error, flush=True)
            os._exit(9)
        sys.exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert status == 0, status
def reason(call):
    try:
        call()
    except growpool.PoolStateError as error:
        return error.reason
    return None
"""


def test_everything_in_the_child_says_forked() -> None:
    run_quietly(
        START
        + """
pool = growpool.Pool("host", backing=books)
buffer = pool.allocate(PAGE)
view = memoryview(buffer)
view[:4] = b"mine"
block = pool.malloc(1000)
stream = growpool.host.Stream()
def child():
    calls = dict(
        malloc=lambda: pool.malloc(1), allocate=lambda: pool.allocate(10 * PAGE),
        free=lambda: pool.free(block), trim=pool.trim, drain=pool.drain, close=pool.close,
        set_limit=lambda: pool.set_limit(1), forget=lambda: pool.forget_stream(None),
        again=pool.return_unreturned, submit=lambda: stream.submit(print),
    )
    for name, call in calls.items():
        assert reason(call) == "forked", name
    assert pool.stats.used_bytes > 0
    repr(pool), repr(buffer)
    view[:4] = b"this"
    view.release()
fork(child)
assert bytes(view[:4]) == b"mine"
view.release()
buffer.close()
pool.free(block)
pool.close()
assert books.out == []
"""
    )


def test_the_child_may_drop_everything() -> None:
    run_quietly(
        START
        + """
import gc
state = {"pool": growpool.Pool("host", backing=books)}
state["buffer"] = state["pool"].allocate(PAGE)
state["caching"] = growpool.CachingBacking(books, keep="1 GiB")
state["stream"] = growpool.host.Stream()
state["chunk"] = growpool.Chunk.create(PAGE, "host")
address = state["buffer"].handle
def child():
    state.clear()
    gc.collect()
    assert books.taken == 0
fork(child)
memoryview(state["buffer"])[:] = b"x" * PAGE
assert state["buffer"].handle == address
"""
    )


def test_a_fork_while_other_threads_allocate() -> None:
    run_quietly(
        START
        + """
pool = growpool.Pool("host", backing=books, chunk_size=PAGE, limit="1 GiB")
stop = False
def work():
    while not stop:
        try:
            pool.allocate(3 * PAGE); pool.trim(wait=False)
        except growpool.LimitExceededError:
            pool.drain()  # all of it is on its way back
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
def child():
    assert reason(lambda: pool.malloc(1)) == "forked"
    assert reason(pool.close) == "forked"
for _ in range(10):
    fork(child)
stop = True
for thread in threads:
    thread.join()
pool.close()
assert books.out == []
"""
    )


def test_a_fork_inside_a_callback() -> None:
    run_quietly(
        START
        + """
def alloc(size, device, stream):
    fork(lambda: None)
    return books.alloc(size, device, stream)
with growpool.Pool("host", alloc=alloc, free=books.free) as pool:
    pool.allocate(PAGE)
assert books.out == []
"""
    )


def _in_child(connection: object) -> None:
    with growpool.Pool("host", limit="64 MiB") as pool:
        memoryview(pool.allocate(PAGE))[:] = b"y" * PAGE
    connection.send("done")  # type: ignore[attr-defined]


def test_a_spawned_child_starts_afresh() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_in_child, args=(theirs,))
    process.start()
    assert ours.poll(30)
    assert ours.recv() == "done"
    process.join(30)
    assert process.exitcode == 0


def test_the_parents_memory_is_copied_on_write(pool: growpool.Pool, supplier: Supplier) -> None:
    """What the child of any fork writes into pool memory never reaches the parent."""
    buffer = pool.allocate(PAGE)
    view = memoryview(buffer)
    view[:] = b"p" * PAGE
    process = os.fork()
    if process == 0:
        view[:] = b"c" * PAGE
        os._exit(0 if view[0] == ord("c") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert bytes(view) == b"p" * PAGE
    view.release()


if sys.platform != "linux":
    pytest.fail("growpool is for Linux")
