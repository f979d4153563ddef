# SPDX-License-Identifier: Apache-2.0
"""After a fork the child's objects refuse work, and the parent's memory is untouched."""

from __future__ import annotations

import sys

import pytest
from helpers import run_quietly

START = """
import gc, growpool, os, sys, threading, time, warnings
from helpers import Supplier, PAGE, eventually
warnings.filterwarnings("ignore", category=DeprecationWarning)
books = Supplier()
def fork(child):
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        try:
            child()
        except SystemExit:
            raise
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
def no_locks():
    assert growpool._core._testing.child_locks() == 0, growpool._core._testing.child_locks()
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


def test_the_child_of_a_child_is_a_child_too() -> None:
    run_quietly(
        START
        + """
pool = growpool.Pool("sim:0", backing=books)
buffer = pool.allocate(PAGE)
def grandchild():
    assert reason(lambda: pool.malloc(1)) == "forked"
    assert reason(lambda: growpool.Pool("host")) == "forked"
    no_locks()
def child():
    assert reason(pool.close) == "forked"
    fork(grandchild)
    no_locks()
fork(child)
buffer.close()
pool.close()
assert books.out == []
"""
    )


# A thread of the parent's is stuck at `place` while the process forks; the simulated device ends a
# child that calls it, and `no_locks` says whether the child came to a lock, whoever held it.
PLACES = {
    "alloc": """
def alloc(size, device, stream):
    stop_here()
    return books.alloc(size, device, stream)
pool = growpool.Pool(device, alloc=alloc, free=books.free, chunk_size=PAGE)
def work(): pool.malloc(3 * PAGE)
""",
    "free": """
def free(chunk, size, device, stream):
    stop_here()
    books.free(chunk, size, device, stream)
pool = growpool.Pool(device, alloc=books.alloc, free=free, chunk_size=PAGE)
pool.free(pool.malloc(3 * PAGE))
work = pool.trim
""",
    "delivery": """
def free(chunk, size, device, stream):
    stop_here()
    books.free(chunk, size, device, stream)
pool = growpool.Pool(device, alloc=books.alloc, free=free, chunk_size=PAGE)
pool.free(pool.malloc(3 * PAGE))
def work():
    pool.trim(wait=False)
    while not there.wait(0.001):
        device == "host" or growpool._core._sim.complete_all(0)  # the fence, once recorded
    go.wait()
""",
    "wait": """
pool = growpool.Pool(device, backing=books, chunk_size=PAGE)
stream = growpool.host.Stream()
buffer = growpool.Pool("host").allocate(PAGE, stream=stream)
stream.submit(stop_here)
def work(): buffer.close(); stream.synchronize()
""",
    "close": """
def free(chunk, size, device, stream):
    stop_here()
    books.free(chunk, size, device, stream)
pool = growpool.Pool(device, alloc=books.alloc, free=free, chunk_size=PAGE)
pool.malloc(3 * PAGE)
work = pool.close
""",
}


@pytest.mark.parametrize("end", ["sys.exit(0)", "os._exit(0)"])
@pytest.mark.parametrize("device", ["host", "sim:0"])
@pytest.mark.parametrize("place", PLACES)
def test_a_fork_while_another_thread_is_in(place: str, device: str, end: str) -> None:
    run_quietly(
        START
        + f"""
device = {device!r}
there, go = threading.Event(), threading.Event()
def stop_here():
    there.set()
    assert go.wait(20)
"""
        + PLACES[place]
        + f"""
other = growpool.Pool(device, backing=books)
mine, block = other.allocate(PAGE), other.malloc(1000)
cache = growpool.CachingBacking(books, keep="1 GiB")
cache.free(cache.alloc(PAGE, other.device_id, 0), PAGE, other.device_id, 0)
thread = threading.Thread(target=work)
thread.start()
assert there.wait(20)
def child():
    global pool, other, mine, cache
    for call in (lambda: pool.malloc(1), pool.trim, pool.close, lambda: other.free(block),
                 other.close, mine.close, lambda: cache.trim(), lambda: growpool.Pool(device)):
        assert reason(call) == "forked", call
    pool = other = mine = cache = None
    books.__dict__.clear()
    gc.collect()
    no_locks()
    sys.stdout.flush()
    {end}
fork(child)
go.set()
thread.join()
mine.close()
other.close()
cache.trim()
pool.close()
assert books.out == []
"""
    )


FORKS = """
parent, wanted, ended = os.getpid(), False, []
def fork_here():
    global wanted
    if not wanted:
        return
    wanted = False
    process = os.fork()
    if process != 0:
        ended.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    elif answer is not None:
        raise answer
def alloc(size, device, stream):
    chunk = books.alloc(size, device, stream)
    fork_here()
    return chunk
def free(chunk, size, device, stream):
    books.free(chunk, size, device, stream)
    fork_here()
def expect(call):
    # The parent's call works; the child's ends with what the callback raised, or says forked.
    global wanted
    wanted = True
    ended.clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", growpool.ReleaseWarning)
            result = call()
    except BaseException as error:
        if os.getpid() == parent:
            raise
        good = error is answer or getattr(error, "reason", None) == "forked"
        no_locks() if good and answer is None else None
        os._exit(0 if good else 7)
    assert os.getpid() == parent or os._exit(8)
    assert ended == [0], (ended, call)
    return result
"""


@pytest.mark.parametrize("device", ["host", "sim:0"])
@pytest.mark.parametrize("answer", ["None", "ValueError()", "SystemExit(0)", "KeyboardInterrupt()"])
def test_a_callback_that_forks_comes_back_in_the_child_too(answer: str, device: str) -> None:
    """Whatever it answers there: the operation ends with an error and does no more."""
    run_quietly(
        START
        + FORKS.replace("no_locks() if", "None if")
        + f"answer = {answer}\n"
        + f"pool = growpool.Pool({device!r}, alloc=alloc, free=free, chunk_size=PAGE)\n"
        + """
sparse = pool.range("1 GiB")
growable = pool.growable("1 GiB")
block = expect(lambda: pool.malloc(3 * PAGE))
pool.free(block)
expect(pool.trim)
buffer = expect(lambda: pool.allocate(3 * PAGE))
buffer.close()
pool.trim(wait=False)
pool.drain()
expect(lambda: sparse.commit(0, 3 * PAGE))
expect(lambda: sparse.decommit(0, 3 * PAGE))
expect(lambda: growable.resize(3 * PAGE))
expect(lambda: growable.resize(0))
pool.malloc(3 * PAGE)
expect(pool.close)
assert books.out == []
"""
    )


def test_a_callback_that_forks_while_a_pool_is_dropped() -> None:
    """The delivery thread calls it: in the child that thread ends, and the process with it."""
    run_quietly(
        START
        + FORKS
        + """
answer = None
pool = growpool.Pool("sim:0", alloc=alloc, free=free, chunk_size=PAGE)
pool.malloc(3 * PAGE)
wanted = True
del pool
eventually(lambda: books.taken == 3)
assert ended == [0]
"""
    )


def test_a_signal_handler_that_forks_during_a_wait() -> None:
    run_quietly(
        START
        + """
import signal
parent, ended = os.getpid(), []
go = threading.Event()
def handler(*args):
    process = os.fork()
    if process != 0:
        ended.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
        go.set()
signal.signal(signal.SIGUSR1, handler)
stream = growpool.host.Stream()
pool = growpool.Pool("host", backing=books)
buffer = pool.allocate(PAGE, stream=stream)
stream.submit(go.wait)
stream.submit(lambda: None)
buffer.close()
waits = pool.stats.wait_count
def strike():
    eventually(lambda: pool.stats.wait_count > waits)
    os.kill(parent, signal.SIGUSR1)
threading.Thread(target=strike).start()
try:
    pool.trim()
except growpool.PoolStateError as error:
    assert os.getpid() != parent
    os._exit(0 if error.reason == "forked" else 7)
assert os.getpid() == parent or os._exit(8)
assert ended == [0], ended
pool.close()
assert books.out == []
"""
    )


# ---- the parent's bytes ------------------------------------------------------------------------

WRITES = (
    START
    + """
import ctypes, multiprocessing, signal
def child_writes(address, size, before=lambda: None):
    # Forks a child that writes there; returns whether it survived that.
    process = os.fork()
    if process == 0:
        before()
        ctypes.memset(address, ord("c"), size)
        os._exit(0 if ctypes.string_at(address, size) == b"c" * size else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert status in (0, -signal.SIGSEGV), status
    return status == 0
def fill(address, size):
    ctypes.memset(address, ord("p"), size)
def intact(address, size):
    return ctypes.string_at(address, size) == b"p" * size
pool = growpool.Pool("host", backing=books, chunk_size=PAGE)
"""
)


@pytest.mark.parametrize(
    "make",
    [
        "block = pool.malloc(3 * PAGE); address = block",
        "buffer = pool.allocate(3 * PAGE); address = buffer.handle",
        "growable = pool.growable('1 GiB'); growable.resize(3 * PAGE); address = growable.handle",
        "sparse = pool.range('1 GiB'); sparse.commit(PAGE, 3 * PAGE)\n"
        "address = sparse.handle + PAGE",
    ],
)
def test_the_parents_memory_is_copied_on_write(make: str) -> None:
    """What the child writes into pool memory never reaches the parent."""
    output = run_quietly(
        WRITES
        + make
        + """
fill(address, 3 * PAGE)
print(child_writes(address, 3 * PAGE), intact(address, 3 * PAGE))
"""
    )
    assert output == "True True\n"


def test_memory_mapped_after_the_fork_is_out_of_the_childs_reach() -> None:
    """The child has the addresses, and nothing behind them."""
    output = run_quietly(
        WRITES
        + """
growable = pool.growable("1 GiB")
growable.resize(PAGE)
read, write = os.pipe()
address = growable.handle + PAGE
process = os.fork()
if process == 0:
    assert os.read(read, 1) == b"x"
    ctypes.memset(address, ord("c"), PAGE)
    os._exit(0)
growable.resize(2 * PAGE)
fill(address, PAGE)
os.write(write, b"x")
print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), intact(address, PAGE))
"""
    )
    assert output == "-11 True\n"


def test_what_an_idle_chunk_keeps_is_out_of_the_childs_reach() -> None:
    output = run_quietly(
        WRITES
        + """
kept = []
pool = growpool.Pool("host", alloc=lambda *a: kept.pop() if kept else books.alloc(*a),
                     free=lambda chunk, *a: kept.append(chunk), chunk_size=PAGE)
address = pool.malloc(PAGE)
fill(address, PAGE)
pool.free(address)
pool.trim()
assert len(kept) == 1
survived = child_writes(address, PAGE, before=lambda: (kept.clear(), gc.collect()))
again = pool.malloc(PAGE)
print(survived, again == address, intact(again, PAGE))
"""
    )
    assert output == "False True True\n"


def test_exportable_memory_is_out_of_the_childs_reach() -> None:
    output = run_quietly(
        WRITES
        + """
pool = growpool.Pool(
    "host", alloc=lambda size, *a: growpool.Chunk.create(size, "host", handle_type="posix_fd"),
    free=lambda *a: None, chunk_size=PAGE)
address = pool.malloc(PAGE)
fill(address, PAGE)
print(child_writes(address, PAGE), intact(address, PAGE))
"""
    )
    assert output == "False True\n"


def test_a_child_forked_while_the_parent_ends_is_not_parked() -> None:
    """A thread forks after growpool is shut down: the child is not what was shut down."""
    run_quietly(
        """
        import atexit, os, threading
        ending, ended = threading.Event(), []
        def work():
            ending.wait()
            process = os.fork()
            if process == 0:
                for call in (pool.close, lambda: pool.malloc(1), lambda: growpool.Pool("host")):
                    try:
                        call()
                    except growpool.PoolStateError as error:
                        assert error.reason == "forked" or os._exit(3)
                    else:
                        os._exit(4)
                os._exit(0)
            ended.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
        def late():
            ending.set()
            thread.join(20)
            assert ended == [0], ended
        atexit.register(late)
        import growpool
        pool = growpool.Pool("host")
        block = pool.malloc(1000)
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        """
    )


if sys.platform != "linux":
    pytest.fail("growpool is for Linux")
