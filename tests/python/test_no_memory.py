# SPDX-License-Identifier: Apache-2.0
"""Python's own allocator fails at every step in turn, once and from there on: MemoryError, and
nothing is lost.

Each scenario runs with a failure at its first allocation, then at its second, and so on, until one
that fails "from there on" no longer reaches it.
"""

from __future__ import annotations

import pytest
from helpers import run_quietly

KIT = """
import gc, os, pickle, sys, threading, time, warnings, weakref
import _testcapi
import growpool
from helpers import eventually
PAGE = 2 << 20
out = []  # a set may keep what it had no memory to add
def alloc(size, device, stream):
    chunk = growpool.Chunk.create(size, device)
    out.append(chunk)
    return chunk
def free(chunk, size, device, stream):
    if chunk in out:
        out.remove(chunk)
class Books:
    alloc, free = staticmethod(alloc), staticmethod(free)
books = Books()
kept = [None] * 30  # so that nothing is dropped, to be settled later, while memory is out
stream = growpool.host.Stream()
def nothing(): pass
# Threads that call into Python get their thread states now: without memory they would wait for it.
stream.submit(nothing); stream.synchronize()
growpool.Pool("host", backing=books).malloc(1000)
gc.collect()
eventually(lambda: not out)
sys.unraisablehook = lambda info: None
quiet, loud = None, sys.stderr

SCENARIO

def settle():
    # Whatever was made is closed, each chunk is back, and the books say so.
    pools = [thing for thing in kept if isinstance(thing, growpool.Pool)]
    for thing in kept:
        # What a backing would not take is still the caller's, who lets it go.
        if isinstance(thing, growpool.Chunk): free(thing, 0, 0, 0)
    thing = pool = None
    kept[:] = [None] * len(kept)
    gc.collect()
    for pool in pools:
        pool.close()
        pool.return_unreturned()
        assert pool.stats.physical_bytes == 0, pool.stats
    pools = pool = None
    gc.collect()
    eventually(lambda: not out)

def attempt(number, stop):
    # True when it failed for want of memory.
    sys.stderr = quiet
    try:
        try:
            _testcapi.set_nomemory(number, stop)
            scenario()
        finally:
            _testcapi.remove_mem_hooks()
    except MemoryError:
        return True
    except SystemError as error:
        # CPython 3.11 loses the exception of a Python function, in programs without growpool too,
        # when it has no memory for the function's entry in the traceback.
        text = str(error)
        lost = text.startswith("<function ") and text.endswith("NULL without setting an exception")
        assert lost or text == "error return without exception set", error
        return True
    finally:
        sys.stderr = loud
    return False

warnings.simplefilter("ignore", growpool.ReleaseWarning)
warnings.simplefilter("ignore", ResourceWarning)
scenario()  # what is made once, such as imports, is made before
settle()
gc.freeze()  # what is there is not garbage: collections are quick
descriptors = len(os.listdir("/proc/self/fd"))
number = passed = 0
while passed < 10:
    passed = 0 if attempt(number, 0) else passed + 1
    settle()
    number += 1
last = number
failed = 0
for number in range(last):
    failed += attempt(number, number + 1)
    settle()
assert len(os.listdir("/proc/self/fd")) == descriptors
scenario()
settle()
print(last, failed)
"""

SCENARIOS = {
    "blocks": """
def scenario():
    kept[0] = pool = growpool.Pool("host", alloc=alloc, free=free, chunk_size=PAGE, name="short")
    buffer = pool.allocate("3 MiB", stream=stream)
    view = memoryview(buffer)
    view[0] = 1
    view.release()
    address = pool.malloc(1000)
    pool.free(address)
    pool.snapshot(), pool.stats, repr(pool), pool.set_limit("1 GiB"), pool.unreturned
    buffer.close()
    pool.trim()
    pool.forget_stream(stream)
    pool.close()
""",
    "views and copies": """
def scenario():
    kept[0] = pool = growpool.Pool("host", backing=books)
    buffer = pool.allocate("3 MiB")
    kept[1] = part = buffer.view((4, 4), "float32")
    part.fill(1), part.copy_from(bytes(64)), part.copy_to(bytearray(64))
    memoryview(part).release(), part.__dlpack__(), buffer.__dlpack__(max_version=(1, 0))
    part.shape, part.dtype, part.base, repr(part), part.__dlpack_device__()
    part.close()
    buffer.close()
""",
    "growables and ranges": """
def scenario():
    kept[0] = pool = growpool.Pool("host", backing=books, chunk_size=PAGE)
    growable, sparse = pool.growable("1 GiB"), pool.range("1 GiB")
    growable.resize("3 MiB"), growable.resize(0)
    sparse.commit_many([(0, PAGE), (2 * PAGE, PAGE)])
    sparse.fill(1), sparse.committed, repr(sparse), repr(growable)
    sparse.decommit_many([(0, 4 * PAGE)])
    growable.record_stream(stream)
    growable.close(), sparse.close()
""",
    "chunks": """
more = [os.open("/dev/null", os.O_RDONLY) for _ in range(300)]  # descriptors above small ints
def import_from(fd):
    try: return growpool.Chunk.from_fd(fd, PAGE, "host")
    finally: os.close(fd)
def scenario():
    chunk = growpool.Chunk.create(PAGE, "host", handle_type="posix_fd")
    other = import_from(chunk.export_fd())
    weakref.ref(chunk), repr(other), chunk.handle, chunk.size, chunk.device, chunk.handle_type
    other.close(), chunk.close(), chunk.is_closed
""",
    "backings": """
def scenario():
    kept[1] = caching = growpool.CachingBacking(books, keep="1 GiB")
    kept[2] = chunk = caching.alloc(PAGE, -1, 0)
    caching.free(chunk, PAGE, -1, 0)
    kept[2] = None
    caching.cached_bytes, caching.keep, repr(caching)
    kept[0] = pool = growpool.Pool("host", backing=caching, chunk_size=PAGE)
    pool.free(pool.malloc(2 * PAGE))
    pool.trim()
    caching.trim()
    plain = growpool.DeviceBacking()
    plain.free(plain.alloc(PAGE, -1, 0), PAGE, -1, 0)
    pool.close()
""",
    "streams": """
done = []
def fail(): raise ValueError("of the task")
def scenario():
    growpool.host.Stream().close()
    stream.submit(done.clear)
    stream.submit(fail)
    try:
        stream.synchronize()
    except ValueError:
        pass
    with growpool.host.Stream() as other:
        repr(other), other.id
    stream.submit(nothing)
    stream.synchronize()
""",
    "errors": """
answer = None
def raising(*args):
    if answer is not None: raise answer
    return alloc(*args)
errors = []
def catch(call, size):
    try:
        call(size)
    except growpool.Error as error:
        copy(error)
    except ValueError as error:
        assert error is answer
def copy(error):
    try: errors.append(pickle.loads(pickle.dumps(error)))
    except pickle.PicklingError: pass  # pickle's own way to say that an import had no memory
    str(error), repr(error)
def scenario():
    global answer
    errors.clear()
    answer = None
    kept[0] = pool = growpool.Pool("host", alloc=raising, free=free, limit=2 * PAGE)
    block = pool.malloc(1)
    catch(pool.malloc, 9 * PAGE)
    answer = ValueError("of the callback")
    catch(pool.malloc, PAGE)
    answer = MemoryError()
    catch(pool.malloc, PAGE)
    answer = None
    pool.free(block)
    pool.close()
    catch(pool.malloc, 1)
""",
    "frees that raise": """
fails = False
def failing(*args):
    if fails: raise ValueError("of the callback")
    free(*args)
def retry(pool):
    try:
        pool.return_unreturned()
    except growpool.ReleaseWarning as warning:
        assert warning.__cause__ is not None
def trim(pool):
    pool.free(pool.malloc(3 * PAGE))
    pool.trim()
    pool.unreturned
    warnings.simplefilter("error", growpool.ReleaseWarning)
    retry(pool)
def tidy():
    global fails
    fails = False
    warnings.filters[:] = filters
    warnings._filters_mutated()
filters = []
def scenario():
    global fails
    if not filters: filters[:] = warnings.filters
    kept[0] = pool = growpool.Pool("host", alloc=alloc, free=failing, chunk_size=PAGE)
    fails = True
    try: trim(pool)
    finally: tidy()
    pool.return_unreturned()
    pool.close()
""",
    "with blocks": """
# No warning from C: CPython 3.11 crashes when it has no memory for one.
# Small functions: it loops for ever without memory for a place in the code above 256.
def enter():
    with growpool.Pool("host", backing=books) as pool:
        kept[0] = pool
def inner():
    with kept[0].allocate(1000) as buffer:
        raise KeyError
def outer():
    with kept[0].growable("1 GiB") as growable:
        growable.resize(1000)
        inner()
def views():
    with kept[0].allocate(9) as buffer:
        with buffer.view((9,), "uint8"): pass
def scenario():
    enter()
    kept[0] = growpool.Pool("host", backing=books)
    try: outer()
    except KeyError: pass
    views()
""",
    "the simulated device": """
sim = growpool._core._sim
stream = sim.stream_create(0, False)
def captured(pool):
    pool.malloc(3 * PAGE, stream)
    pool.free(pool.malloc(PAGE, stream))
def capture(pool):
    sim.capture_begin(0, stream, 0)
    try: captured(pool)
    finally: sim.capture_end(0, stream)
def work(pool):
    buffer = pool.allocate(PAGE, stream)
    sim.launch(0, stream, buffer.handle, PAGE)
    buffer.fill(1)
    buffer.close()
    pool.trim()
def scenario():
    kept[0] = pool = growpool.Pool("sim:0", backing=books, chunk_size=PAGE, peers=["sim:1"])
    pool.peers, pool.device, pool.device_id
    capture(pool)
    work(pool)
    pool.forget_stream(stream)
    pool.close()
""",
    "a large snapshot": """
big = growpool.Pool("host")
blocks = [big.malloc(1000) for _ in range(8)]
for block in blocks[::2]: big.free(block)
def scenario():
    text = str(big.snapshot())
    assert len(text) > 300
""",
    "weak references": """
dead = []
# One callback an object: CPython 3.11 forgets to clear more than one without memory.
def scenario():
    dead.clear()
    kept[0] = growpool.Pool("host", backing=books)
    pool, buffer = growpool.Pool("host"), kept[0].allocate(9)
    one, two, three = weakref.ref(pool, dead.append), weakref.ref(buffer, dead.append), None
    del buffer, pool
    assert one() is two() is three
    caching = growpool.CachingBacking(books, keep=0)
    one = weakref.finalize(caching, nothing)
    del caching
    assert not one.alive
""",
    "arguments": """
def refused(call, *args, **options):
    try: call(*args, **options)
    except (TypeError, ValueError, OverflowError): pass
def pools():
    refused(growpool.Pool, "nowhere")
    refused(growpool.Pool, "host", limit="many")
    refused(growpool.Pool, "host", alloc=1, free=2)
    refused(growpool.Pool, "host", backing=object())
    refused(growpool.Pool, "host", name="a" + chr(0))
def chunks():
    refused(growpool.Chunk.create, 1, "host")
    refused(growpool.Chunk.from_handle, 1 << 80, PAGE, "host")
def calls(pool):
    refused(pool.malloc, -1)
    refused(pool.free, "text")
    refused(pool.allocate, 9, stream=object())
def scenario():
    kept[0] = pool = growpool.Pool("host", limit="64 MiB", address_space="1 GiB", name="name")
    pools(), chunks(), calls(pool)
    pool.limit, pool.name, pool.set_limit(None)
""",
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_memory_for(name: str) -> None:
    pytest.importorskip("_testcapi", reason="this Python was built without its test modules")
    last, failed = map(
        int, run_quietly(KIT.replace("SCENARIO", SCENARIOS[name]), timeout=60).split()
    )
    assert failed > 5, last


def test_a_thread_that_has_no_memory_to_enter_python_waits_for_some() -> None:
    """The delivery thread's first visit: CPython would end the process for want of its state."""
    pytest.importorskip("_testcapi", reason="this Python was built without its test modules")
    output = run_quietly(
        """
        import _testcapi, growpool
        from time import sleep
        from helpers import Supplier, eventually
        books, moment = Supplier(), 0.001
        pool = growpool.Pool("host", backing=books)
        pool.malloc(1000)
        count = 0
        try:
            _testcapi.set_nomemory(0, 0)
            del pool
            while count < 30:  # numbers that need no memory
                sleep(moment)
                count += 1
        finally:
            _testcapi.remove_mem_hooks()
        assert books.taken == 0
        eventually(lambda: books.taken == books.given)
        print(count)
        """
    )
    assert output == "30\n"


def test_python_s_allocators_are_called_with_the_gil() -> None:
    """Others replace them meanwhile (tracemalloc, _testcapi), and even the raw one is two words: a
    detached thread would find one old and one new."""
    output = run_quietly(
        """
        import gc, growpool
        from helpers import Supplier, eventually
        calls = growpool._core._testing.detached_raw_calls
        books = Supplier()
        def use():
            caching = growpool.CachingBacking(books, keep="1 GiB")
            caching.free(caching.alloc(2 << 20, -1, 0), 2 << 20, -1, 0)
            pool = growpool.Pool("host", backing=caching)
            kept = [pool, caching, pool.allocate(1000), pool.growable(1 << 30)]
            kept[3].resize(4 << 20)
            stream.submit(kept.clear)
            stream.synchronize()
            kept.append(kept)
        stream = growpool.host.Stream()
        def settle():
            gc.collect()
            eventually(lambda: not books.out)
        use(), settle()  # threads that come into Python for the first time are made a state
        before = calls()
        for _ in range(20):
            use()
        settle()
        print(books.given > 20, calls() - before)
        """
    )
    assert output == "True 0\n"
