# SPDX-License-Identifier: Apache-2.0
"""The end of a process, whatever is still alive: its exit code stays, stderr is empty unless a
callback raised, and it takes less than ten seconds.

Each program runs ten times (200 times with GP_TEST_LONG=1).
"""

from __future__ import annotations

from exit_kit import copies, ends

__all__ = ["copies"]  # the fixture of every test here

BOOKS = """
import atexit, ctypes, gc, os, signal, sys, threading, time
import growpool
from helpers import Supplier, PAGE, eventually
books = Supplier()
"""
POOL = BOOKS + "pool = growpool.Pool('host', backing=books, chunk_size=PAGE)\n"


# ---- things that are alive -----------------------------------------------------------------------

ALIVE = {
    "an unused pool": "",
    "blocks and buffers": "block = pool.malloc(9); kept = [pool.allocate(99) for _ in range(9)]",
    "growables and ranges": """
growable = pool.growable("1 GiB"); growable.resize("3 MiB")
sparse = pool.range("1 GiB"); sparse.commit(PAGE, PAGE)
""",
    "unfinished deliveries": "pool.free(pool.malloc(9 * PAGE)); pool.trim(wait=False)",
    "a pool in sys.modules": "pool.malloc(9); sys.modules['kept'] = pool",
    "a pool dropped just now": "pool.malloc(9); del pool",
    "a pool whose buffer alone is kept": "buffer = pool.allocate(9); del pool",
    "chunks": """
chunk = growpool.Chunk.create(PAGE, 'host')
shared = growpool.Chunk.create(PAGE, 'host', handle_type='posix_fd'); fd = shared.export_fd()
""",
    "a caching backing": """
caching = growpool.CachingBacking(books, keep='1 GiB')
buffer = growpool.Pool('host', backing=caching).allocate(9)
caching.free(caching.alloc(PAGE, -1, 0), PAGE, -1, 0)
""",
    "a stream that owns memory": """
stream = growpool.host.Stream()
buffer = pool.allocate(PAGE, stream=stream)
stream.submit(lambda: ctypes.memset(address, 1, PAGE)); address = buffer.handle
buffer.close()
""",
    "a pool of the simulated device": """
pool = growpool.Pool('sim:0', backing=books); buffer = pool.allocate(9)
""",
    "a cycle": """
box = []
pool = growpool.Pool('host', alloc=books.alloc, free=lambda *args, box=box: books.free(*args))
box += [box, pool, pool.allocate(9)]; del pool
""",
    "a cycle that was collected just now": """
box = []
pool = growpool.Pool('host', alloc=books.alloc, free=lambda *args, box=box: books.free(*args))
box += [box, pool, pool.allocate(9)]; del pool, box; gc.collect()
""",
    "a cycle that no collection sees": """
box = []
pool = growpool.Pool('host', alloc=books.alloc, free=lambda *args, box=box: books.free(*args))
box += [box, pool, pool.allocate(9)]; del pool, box; gc.freeze(); gc.disable()
""",
    "a memoryview": "view = memoryview(pool.allocate(1000))",
    "a view": "view = pool.allocate(1000).view((10, 10), 'uint8')",
    "a memoryview in sys": "sys.view = memoryview(pool.allocate(1000)); del pool",
    "numpy arrays": """
import numpy
array = numpy.asarray(pool.allocate(1000)); numpy.kept = array[10:]; del array
numpy.taken = numpy.from_dlpack(pool.allocate(1000).view((10,), "float32"))
""",
    "a DLPack capsule that nobody took": "sys.capsule = pool.allocate(1000).__dlpack__()",
    "a ctypes array": "sys.array = (ctypes.c_char * 100).from_buffer(pool.allocate(1000))",
    "an unreturned chunk": """
import warnings; warnings.simplefilter("ignore")
fail = True
def free(*args):
    if fail: raise ValueError
    books.free(*args)
pool = growpool.Pool("host", alloc=books.alloc, free=free)
pool.free(pool.malloc(9)); pool.trim(); assert pool.unreturned
fail = False
""",
    "an exception with the pool in its traceback": """
def fail():
    mine = growpool.Pool('host', backing=books); mine.malloc(9); raise ValueError
try: fail()
except ValueError as error: sys.error = error
""",
    "an open with block in a generator": """
def generate():
    with growpool.Pool('host', backing=books) as mine, mine.allocate(9) as buffer:
        yield buffer
generator = generate(); next(generator); sys.generator = generator
""",
    "a thread local": """
local = threading.local(); local.buffer = pool.allocate(9)
""",
}


test_alive_at_the_end = ends({name: POOL + body for name, body in ALIVE.items()})

# Such an interpreter's allocator fills memory that was freed, and its warnings are all on.
test_alive_at_the_end_of_a_debug_interpreter = ends(
    POOL
    + "\n".join(
        ALIVE[name] for name in ("blocks and buffers", "growables and ranges", "a memoryview")
    ),
    options=("-X", "dev"),
)


# ---- handlers ------------------------------------------------------------------------------------

# Says what the books say when the modules are taken apart, after everything else.
AT_LAST = """
class Last:
    def __del__(self, out=books.out, write=os.write):
        write(1, b"%d chunks left" % len(out))
sys.last = Last()
"""

# Growpool's own handler returns them: after those that were registered later, and before the rest.
test_chunks_go_back_at_the_end = ends(
    POOL
    + """
pool.malloc(3 * PAGE)
atexit.register(lambda: print(len(books.out)))
"""
    + AT_LAST,
    stdout="3\n0 chunks left",
)

test_handlers_that_were_registered_after_the_import_find_all_as_it_was = ends(
    POOL
    + """
def close():
    buffer = pool.allocate(PAGE); memoryview(buffer)[:1] = b"x"
    late = growpool.Pool("host", backing=books); late.malloc(9)
    pool.close(); late.close(); print("closed", books.out)
atexit.register(close)
""",
    stdout="closed []\n",
)

# What needs the pool says so; what only lets go has nothing left to do, and is silent.
test_handlers_from_before_the_import_find_it_shut_down = ends(
    """
import atexit
def late():
    pool, pinned, block, buffer, growable, view, chunk = kept
    for call in (lambda: pool.malloc(1), lambda: growpool.Pool("host"), pool.trim, pool.drain,
                 lambda: growable.resize(9), growpool.host.Stream):
        try:
            print("no error", call())
        except growpool.PoolStateError as error:
            print(error.reason)
    with pinned, growable:
        view.release()
    for thing in (buffer, growable, chunk, pool, pinned):
        thing.close()
    pool.free(block), pinned.free(block, 0), buffer.close(0)
    print(repr(pool), repr(pinned)[:14])
atexit.register(late)
import growpool
pool, pinned = growpool.Pool("host"), growpool.Pool("host")
block, buffer = pool.malloc(10), pinned.allocate(10)
kept = [pool, pinned, block, buffer, pinned.growable("1 GiB"), memoryview(buffer)]
kept.append(growpool.Chunk.create(2 << 20, "host"))
""",
    stdout="exiting\n" * 6
    + "<growpool.Pool '' on host: 0 bytes used, 0 bytes physical, closed> <growpool.Pool\n",
)

# Such a __del__ may run when the module is taken apart, long after growpool was shut down.
test_objects_that_close_in_their_finaliser = ends(
    BOOKS
    + """
class Owner:
    def __init__(self):
        self.pool = growpool.Pool("host", backing=books)
        self.pinned = growpool.Pool("host", backing=books)
        self.buffer, self.block = self.pool.allocate(9), self.pool.malloc(9)
        self.growable, self.view = self.pool.growable("1 GiB"), memoryview(self.pinned.allocate(9))
        self.stream, self.chunk = growpool.host.Stream(), growpool.Chunk.create(PAGE, "host")
    def __del__(self):
        self.pool.free(self.block)
        for thing in (self.buffer, self.growable, self.stream, self.chunk, self.pinned, self.pool):
            thing.close()
owner = sys.owner = Owner()
owner.me = owner
"""
)


# ---- threads -------------------------------------------------------------------------------------

# A pool and `work`, which comes to `stop()` inside a callback.
PLACES = {
    "alloc": """
pool = growpool.Pool("host", alloc=stopping_alloc, free=books.free, chunk_size=PAGE)
def work(): pool.malloc(3 * PAGE)
""",
    "free": """
pool = growpool.Pool("host", alloc=books.alloc, free=stopping_free, chunk_size=PAGE)
pool.free(pool.malloc(3 * PAGE))
work = pool.trim
""",
    "the free of a close": """
pool = growpool.Pool("host", alloc=books.alloc, free=stopping_free, chunk_size=PAGE)
pool.malloc(3 * PAGE)
work = pool.close
""",
    "the free of a delivery": """
pool = growpool.Pool("host", alloc=books.alloc, free=stopping_free, chunk_size=PAGE)
pool.free(pool.malloc(3 * PAGE))
def work(): pool.trim(wait=False)
""",
    "the free of a dropped pool": """
pool = growpool.Pool("host", alloc=books.alloc, free=stopping_free, chunk_size=PAGE)
pool.malloc(3 * PAGE)
def work():
    global pool
    del pool
""",
}


def stops(place: str, seconds: float) -> str:
    """The program ends while a daemon thread sits in the callback for so long."""
    return f"""{BOOKS}
entered = threading.Event()
def stop():
    entered.set()
    time.sleep({seconds})
def stopping_alloc(*args):
    stop()
    return books.alloc(*args)
def stopping_free(*args):
    stop()
    books.free(*args)
{PLACES[place]}
threading.Thread(target=work, daemon=True).start()
assert entered.wait(5)
"""


# What the callback was called for is finished, and every chunk goes back.
test_a_daemon_thread_in = ends(
    {place: stops(place, 0.02) + AT_LAST for place in PLACES}, stdout="0 chunks left"
)

# Nobody can wait for it: it is left behind, in bounded time.
test_a_daemon_thread_for_ever_in = ends({place: stops(place, 1000) for place in PLACES}, waits=True)

STUCK_STREAMS = {
    "and memory it owns": """
stream = growpool.host.Stream()
buffer = pool.allocate(1000, stream=stream)
stream.submit(threading.Event().wait)
stream.submit(print)
buffer.close()
pool.trim(wait=False)
""",
    "and memory it owns in a dropped pool": """
stream = growpool.host.Stream()
buffer = pool.allocate(1000, stream=stream)
stream.submit(threading.Event().wait)
del buffer, pool
""",
    "and threads that wait for it": """
stream = growpool.host.Stream()
buffer = pool.allocate(1000, stream=stream)
stream.submit(threading.Event().wait)
buffer.close()
threading.Thread(target=pool.trim, daemon=True).start()
threading.Thread(target=stream.synchronize, daemon=True).start()
""",
    "of ten pools with a stream each": """
streams = [growpool.host.Stream() for _ in range(10)]
pools = [growpool.Pool("host", backing=books) for _ in streams]
buffers = [pool.allocate(1000, stream=stream) for pool, stream in zip(pools, streams)]
for stream in streams:
    stream.submit(threading.Event().wait)
""",
}

test_work_of_a_stream_for_ever = ends(
    {name: POOL + body for name, body in STUCK_STREAMS.items()}, waits=True
)

test_daemon_threads_that_use_it_without_pause = ends(
    POOL
    + """
count = 0
def work():
    global count
    while True:
        pool.free(pool.malloc(3 * PAGE)); pool.allocate(5 * PAGE); pool.trim()
        growable = pool.growable("1 GiB"); growable.resize(3 * PAGE); growable.close()
        growpool.Pool("host", backing=books).allocate(9)
        pool.trim(wait=False); pool.drain(); count += 1
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
eventually(lambda: count > 5)
"""
)

# The interpreter waits for it first: growpool works until then.
test_a_thread_that_is_joined_at_the_end = ends(
    POOL
    + """
def work():
    main.join()
    for _ in range(20):
        pool.free(pool.malloc(3 * PAGE)); pool.trim()
    print("done")
main = threading.main_thread()
threading.Thread(target=work).start()
""",
    stdout="done\n",
)

test_workers_of_an_executor = ends(
    POOL
    + """
from concurrent.futures import ThreadPoolExecutor
executor = ThreadPoolExecutor(4)
def job(n):
    with pool.allocate(n * PAGE) as buffer:
        memoryview(buffer)[:1] = b"x"
    pool.trim(wait=n % 2 == 0)
jobs = [executor.submit(job, n) for n in range(1, 20)]
atexit.register(lambda: print([job.exception() for job in jobs if job.exception() is not None]))
""",
    stdout="[]\n",
)


# ---- callbacks that raise ------------------------------------------------------------------------

RAISING = """
def free(*args):
    raise {}("of the callback")
pool = growpool.Pool("host", alloc=books.alloc, free=free, name="ending", chunk_size=PAGE)
pool.malloc(3 * PAGE)
"""
KINDS = ("ValueError", "MemoryError", "KeyboardInterrupt", "SystemExit")


def names_it_three_times(text: str) -> bool:
    return text.count("of the callback") >= 3


test_a_callback_that_raises_is_reported = ends(
    {kind: BOOKS + RAISING.format(kind) for kind in KINDS}, stderr=names_it_three_times
)
test_a_delivery_that_raises_is_reported = ends(
    {kind: BOOKS + RAISING.format(kind) + "del pool" for kind in KINDS}, stderr=names_it_three_times
)
test_a_callback_that_uses_growpool_at_the_end = ends(
    BOOKS
    + """
other = growpool.Pool("host", backing=books)
def free(*args):
    gc.collect()
    with growpool.Pool("host", backing=books) as third:
        third.allocate(9)
    try: other.free(other.malloc(PAGE))
    except growpool.PoolStateError: pass  # that one was closed first
    books.free(*args)
pool = growpool.Pool("host", alloc=books.alloc, free=free)
pool.malloc(9)
"""
)


# ---- ways to end ---------------------------------------------------------------------------------

LIVE = POOL + "pool.malloc(9)\nbuffer = pool.allocate(9)\n"

test_sys_exit_keeps_its_code = ends(LIVE + "sys.exit(7)", exit_code=7)
test_sys_exit_keeps_its_message = ends(
    LIVE + "sys.exit('a message')", exit_code=1, stderr=lambda text: text == "a message\n"
)
test_os_exit_ends_at_once = ends(LIVE + "os._exit(3)", exit_code=3)
test_an_exception_ends_the_program = ends(
    LIVE + "1 / 0",
    exit_code=1,
    stderr=lambda text: text.rstrip().endswith("ZeroDivisionError: division by zero"),
)
test_an_interrupt_ends_the_program = ends(
    LIVE + "raise KeyboardInterrupt",
    exit_code=-2,
    stderr=lambda text: text.rstrip().endswith("KeyboardInterrupt"),
)
test_a_signal_ends_the_program = ends(LIVE + "os.kill(os.getpid(), 15)", exit_code=-15)

# It ends the wait, and nothing else.
test_an_interrupt_while_the_end_waits_for_a_stream = ends(
    POOL
    + """
stream = growpool.host.Stream()
buffer = pool.allocate(1000, stream=stream)
closing = threading.Event()
def work():
    closing.wait()
    eventually(lambda: pool.stats.wait_count > 0)
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()
stream.submit(work)
buffer.close()
atexit.register(closing.set)
def handler(*args):
    os.write(1, b"seen")
    raise KeyboardInterrupt
signal.signal(signal.SIGINT, handler)
""",
    stdout="seen",
    waits=True,
)
test_an_interrupt_inside_a_callback_at_the_end = ends(
    BOOKS
    + """
def free(*args):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0)
    os.write(1, b"never")
pool = growpool.Pool("host", alloc=books.alloc, free=free)
pool.malloc(9)
""",
    stdout="",
    stderr=lambda text: "KeyboardInterrupt" in text,
)


# ---- modules, interpreters, processes ------------------------------------------------------------

FORGET = """
for name in [name for name in sys.modules if name.partition(".")[0] == "growpool"]:
    del sys.modules[name]
"""

test_imported_twice = ends(
    POOL
    + "import importlib; first = growpool; block = pool.malloc(9)"
    + FORGET
    + """
import growpool
assert growpool.Pool is not first.Pool
chunks = [growpool.Chunk.create(PAGE, "host")]
second = growpool.Pool("host", alloc=lambda size, device, stream: chunks.pop(),
                       free=lambda chunk, *args: chunks.append(chunk))
buffer, view = second.allocate(9), memoryview(pool.allocate(9))
first.Pool("host").malloc(9)
importlib.reload(growpool)
growpool.Pool("host").malloc(9)
"""
)

# The module's own objects go while a pool of it lives.
test_imported_and_dropped = ends(
    POOL
    + "block = pool.malloc(9)"
    + FORGET
    + """
del growpool
gc.collect()
pool.free(block); pool.malloc(3 * PAGE); pool.trim()
"""
)

SUBINTERPRETER = """
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
one = interpreters.create()
def run(code):
    # What it raised, as text; "" when it did not.
    try:
        failed = interpreters.run_string(one, code)
    except Exception as error:
        return str(error)
    return "" if failed is None else str(failed)
"""

test_a_subinterpreter_refuses_the_import = ends(
    POOL
    + SUBINTERPRETER
    + """
block = pool.malloc(9)
for _ in range(2):
    told = run("import growpool")
    assert "ImportError" in told and "subinterpreter" in told, told
assert run("import sys; assert 'growpool' not in sys.modules") == ""
pool.free(block); pool.malloc(3 * PAGE); pool.trim()
print("refused")
""",
    stdout="refused\n",
)

test_a_subinterpreter_that_came_first_refuses_it_too = ends(
    "import sys\n"
    + SUBINTERPRETER
    + """
told = run("import growpool")
assert "ImportError" in told, told
assert "growpool" not in sys.modules
interpreters.destroy(one)
import growpool
pool = growpool.Pool("host")
buffer = pool.allocate(9)
print("works")
""",
    stdout="works\n",
)

test_a_subinterpreter_that_is_alive_at_the_end = ends(
    POOL
    + SUBINTERPRETER
    + """
assert run("import threading, json; kept = [json]") == ""
run("import growpool")
block = pool.malloc(9)
"""
)

# For CPython's own way to make one, which its test modules have.
test_a_subinterpreter_as_embedders_make_them_refuses_it = ends(
    POOL
    + """
try: import _testcapi
except ImportError: sys.exit(0)
read, write = os.pipe()
code = f'''
import os
try:
    import growpool
except ImportError as error:
    os.write({write}, str(error).encode())
'''
assert _testcapi.run_in_subinterp(code) == 0
assert b"subinterpreter" in os.read(read, 1000)
block = pool.malloc(9)
"""
)

WORKERS = """
import multiprocessing
import exit_kit_worker
if __name__ == "__main__":
    import growpool
    {}
    context = multiprocessing.get_context("{}")
    process = context.Process(target=exit_kit_worker.leave_everything)
    process.start()
    process.join(30)
    print(process.exitcode)
"""
USE = "pool = growpool.Pool('host'); block = pool.malloc(9)"

# By a parent that has a live pool, or, for fork, one that only imported growpool.
test_workers_that_end_with_a_live_pool = ends(
    {
        "fork": WORKERS.format("", "fork"),
        "spawn": WORKERS.format(USE, "spawn"),
        "forkserver": WORKERS.format(USE, "forkserver"),
    },
    stdout="0\n",
)
