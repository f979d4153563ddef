# SPDX-License-Identifier: Apache-2.0
"""The end of a process: exit code 0 and an empty stderr, whatever is still alive."""

from __future__ import annotations

import time

import pytest
from helpers import run_python, run_quietly

BOOKS = """
import growpool, atexit, threading, time, sys, gc
from helpers import Supplier, PAGE
books = Supplier()
"""


@pytest.mark.parametrize(
    "body",
    [
        "pool = growpool.Pool('host')",
        "pool = growpool.Pool('host', backing=books); block = pool.malloc(1000)",
        "pool = growpool.Pool('host', backing=books); kept = [pool.allocate(99) for _ in range(9)]",
        "pool = growpool.Pool('host', backing=books); view = memoryview(pool.allocate(1000))",
        "view = memoryview(growpool.Pool('host', backing=books).allocate(1000)); sys.view = view",
        "box = []; pool = growpool.Pool('host', alloc=books.alloc, free=lambda *a: box)\n"
        "box += [box, pool]; pool.malloc(9); del pool",
        "caching = growpool.CachingBacking(books, keep='1 GiB')\n"
        "buffer = growpool.Pool('host', backing=caching).allocate(9)",
        "pool = growpool.Pool('host', backing=books); pool.malloc(9); sys.modules['kept'] = pool",
        "stream = growpool.host.Stream(); stream.submit(lambda: None)",
        "chunk = growpool.Chunk.create(PAGE, 'host')",
        "pool = growpool.Pool('host', backing=books); pool.malloc(9); del pool",
    ],
)
def test_live_objects(body: str) -> None:
    run_quietly(BOOKS + body)


def test_chunks_go_back_at_exit() -> None:
    output = run_quietly(
        BOOKS
        + """
atexit.register(print, "never printed after the pools were closed")
import os
def free(*args):
    books.free(*args); os.write(1, b"freed\\n")
pool = growpool.Pool("host", alloc=books.alloc, free=free)
pool.malloc(1000)
"""
    )
    assert "freed" in output
    assert "never printed" in output


def test_a_pool_closed_by_an_atexit_handler() -> None:
    output = run_quietly(
        BOOKS
        + """
pool = growpool.Pool("host", backing=books)
pool.malloc(1000)
def close():
    pool.close(); print("closed", books.out)
atexit.register(close)
"""
    )
    assert output == "closed []\n"


def test_an_atexit_handler_from_before_the_import_finds_it_shut_down() -> None:
    output = run_quietly(
        """
        import atexit
        def late():
            pool = kept[0]
            for call in (lambda: pool.malloc(1), lambda: growpool.Pool("host"), pool.close):
                try:
                    call()
                    print("no error")
                except growpool.PoolStateError as error:
                    print(error.reason)
        atexit.register(late)
        import growpool
        kept = [growpool.Pool("host")]
        view = memoryview(kept[0].allocate(10))
        """
    )
    assert output.splitlines() == ["exiting"] * 3


def test_a_daemon_thread_in_mid_allocation() -> None:
    start = time.monotonic()
    run_quietly(
        BOOKS
        + """
entered = threading.Event()
def alloc(size, device, stream):
    entered.set()
    time.sleep(0.3)
    return books.alloc(size, device, stream)
pool = growpool.Pool("host", alloc=alloc, free=books.free)
def work():
    while True:
        pool.allocate(64 * PAGE); pool.trim()
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
assert entered.wait(10)
"""
    )
    assert time.monotonic() - start < 15


def test_a_daemon_thread_stuck_in_a_callback_is_left_behind() -> None:
    start = time.monotonic()
    run_quietly(
        BOOKS
        + """
entered = threading.Event()
def alloc(size, device, stream):
    entered.set()
    time.sleep(1000)
pool = growpool.Pool("host", alloc=alloc, free=books.free)
threading.Thread(target=pool.malloc, args=(10,), daemon=True).start()
assert entered.wait(10)
"""
    )
    assert time.monotonic() - start < 15


def test_daemon_threads_that_allocate_without_pause() -> None:
    run_quietly(
        BOOKS
        + """
pool = growpool.Pool("host", backing=books, chunk_size=PAGE)
def work():
    while True:
        pool.free(pool.malloc(3 * PAGE)); pool.allocate(5 * PAGE); pool.trim()
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
"""
    )


def test_host_stream_work_that_never_ends() -> None:
    start = time.monotonic()
    run_quietly(
        BOOKS
        + """
stream = growpool.host.Stream()
pool = growpool.Pool("host", backing=books)
buffer = pool.allocate(1000, stream=stream)
stream.submit(threading.Event().wait)
stream.submit(print)
buffer.close()
pool.trim(wait=False)
"""
    )
    assert time.monotonic() - start < 15


def test_the_exit_code_stays() -> None:
    result = run_python(
        BOOKS + "pool = growpool.Pool('host', backing=books); pool.malloc(9); sys.exit(7)"
    )
    assert (result.returncode, result.stderr) == (7, "")


def test_a_callback_that_raises_during_exit_is_reported() -> None:
    result = run_python(
        BOOKS
        + """
def free(*args):
    raise ZeroDivisionError("at the end")
pool = growpool.Pool("host", alloc=books.alloc, free=free, name="ending")
pool.malloc(1000)
"""
    )
    assert result.returncode == 0
    assert "ReleaseWarning" in result.stderr
    assert "at the end" in result.stderr
    assert "ending" in result.stderr


def test_an_exception_that_ends_the_program() -> None:
    result = run_python(
        BOOKS + "pool = growpool.Pool('host', backing=books); pool.malloc(9); 1 / 0"
    )
    assert result.returncode == 1
    assert result.stderr.rstrip().endswith("ZeroDivisionError: division by zero")


def test_a_subinterpreter_is_refused_or_harmless() -> None:
    output = run_quietly(
        """
        import sys
        try:
            import _interpreters as interpreters
        except ImportError:
            import _xxsubinterpreters as interpreters
        import growpool
        one = interpreters.create()
        if sys.version_info >= (3, 12):
            try:
                answer = interpreters.run_string(one, "import growpool")
                print("refused" if answer is not None else "accepted")
            except Exception as error:
                print("refused")
        else:
            print("refused")  # 3.11 has no way to declare it
        """
    )
    assert output == "refused\n"
