# SPDX-License-Identifier: Apache-2.0
"""Promise 7, many threads in one interpreter: no hang and no lost chunk.

Each scenario has a process of its own, with a watchdog that prints every stack: a deadlock on the
interpreter's lock would stop any timer inside it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from helpers import run_quietly

LONG = os.environ.get("GP_TEST_LONG") == "1"

START = """
import contextlib, gc, random, threading, time
import growpool
from helpers import Supplier, PAGE
books = Supplier()
failures = []
def run(count, work):
    def guarded(number):
        try:
            work(number)
        except BaseException as error:
            failures.append(repr(error))
    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(count)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert not failures, failures
"""

SCENARIOS = {
    "callbacks that sleep": """
class Slow(Supplier):
    def alloc(self, *args):
        time.sleep(0.001); return super().alloc(*args)
    def free(self, *args):
        time.sleep(0.001); super().free(*args)
books = Slow()
pool = growpool.Pool("host", backing=books, chunk_size=PAGE, limit="1 GiB")
def work(number):
    rng = random.Random(number)
    held = []
    for step in range(120):
        held.append(pool.allocate(rng.choice([512, 4096, PAGE, 3 * PAGE])))
        if len(held) > 4: held.pop(rng.randrange(len(held))).close()
        if step % 20 == number: pool.trim(wait=step % 40 != 0)
run(8, work)
""",
    "callbacks that collect garbage and make other pools": """
other = growpool.Pool("host", name="other")
def alloc(size, device, stream):
    gc.collect(0)
    other.free(other.malloc(1000))
    return books.alloc(size, device, stream)
pool = growpool.Pool("host", alloc=alloc, free=books.free, chunk_size=PAGE)
def work(number):
    for _ in range(60):
        box = [pool.allocate(2 * PAGE)]; box.append(box); del box
        pool.trim(wait=False)
run(8, work)
gc.collect()
other.close()
""",
    "a callback that wants a lock which an allocating thread holds": """
lock = threading.RLock()
def alloc(size, device, stream):
    # The holder of the lock may be in the pool: it waits for nobody's callback.
    if lock.acquire(timeout=0.01): lock.release()
    return books.alloc(size, device, stream)
pool = growpool.Pool("host", alloc=alloc, free=books.free, chunk_size=PAGE)
def work(number):
    for _ in range(30):
        if number % 2:
            with lock: pool.allocate(PAGE).close()
        else:
            pool.allocate(3 * PAGE).close(); pool.trim()
run(8, work)
""",
    "frees on other threads": """
import queue
pool = growpool.Pool("host", backing=books, chunk_size=PAGE)
passed = queue.SimpleQueue()
def work(number):
    if number < 4:
        for _ in range(300): passed.put(pool.malloc(random.choice([512, 70000, PAGE])))
        passed.put(None)
    else:
        while (address := passed.get()) is not None: pool.free(address)
run(8, work)
""",
    "streams on many threads": """
pool = growpool.Pool("host", backing=books, chunk_size=PAGE)
def work(number):
    with growpool.host.Stream() as stream:
        for step in range(80):
            buffer = pool.allocate(PAGE, stream=stream)
            view = memoryview(buffer)
            stream.submit(lambda view=view: view.__setitem__(0, 1) or view.release())
            del view
            if step % 8 == 0: stream.synchronize(); buffer.close()
            if step % 20 == 0: pool.trim(wait=False)
        stream.synchronize()
run(6, work)
gc.collect()
""",
    "a close under fire": """
for _ in range(15):
    pool = growpool.Pool("host", backing=books, chunk_size=PAGE)
    def work(number):
        try:
            for _ in range(50): pool.allocate(2 * PAGE).close()
        except growpool.PoolStateError as error:
            assert error.reason == "closed"
    closer = threading.Timer(0.005, pool.close)
    closer.start()
    run(4, work)
    closer.join()
    pool.close()
""",
    "many pools dropped while others sit in slow callbacks": """
def slow(size, device, stream):
    time.sleep(0.002); return books.alloc(size, device, stream)
def work(number):
    for _ in range(8):
        pool = growpool.Pool("host", alloc=slow, free=books.free)
        keep = pool.allocate(1000)
        del pool, keep
run(8, work)
pool = growpool.Pool("host")
end = time.monotonic() + 15
while books.out and time.monotonic() < end: time.sleep(0.01)
""",
}

# Callbacks that meet: each waits until all the others are inside too.
AT_ONCE = {
    "eight threads inside alloc of one pool": """
meeting = threading.Barrier(8)
def alloc(size, device, stream):
    meeting.wait(20)
    return books.alloc(size, device, stream)
pool = growpool.Pool("host", alloc=alloc, free=books.free, chunk_size=PAGE)
grown, pages = pool.growable(8 * PAGE), pool.range(8 * PAGE)
ways = [lambda: pool.malloc(PAGE)] * 4 + [lambda: pool.allocate(PAGE)] * 2
ways += [lambda: grown.resize(PAGE), lambda: pages.commit(4 * PAGE, PAGE)]
run(8, lambda number: ways[number]())
assert books.given == 8 and len(books.threads) == 8
""",
    "eight threads inside free of one pool": """
meeting = threading.Barrier(8)
inside = threading.local()
def free(*args):
    inside.now = True
    meeting.wait(20)
    books.free(*args)
pool = growpool.Pool("host", alloc=books.alloc, free=free, chunk_size=PAGE)
grown = [pool.growable(PAGE) for _ in range(4)]
for each in grown: each.resize(PAGE)
pages = pool.range(8 * PAGE)
pages.commit(0, 3 * PAGE)
idle = pool.malloc(PAGE); pool.free(idle)
books.threads.clear()
def work(number):
    if number < 4: grown[number].resize(0)
    elif number < 7: pages.decommit((number - 4) * PAGE, PAGE)
    else: pool.trim()
run(8, work)
assert books.taken == 8 and len(books.threads) == 8
""",
    "eight pools with one backing, all inside alloc and then inside free": """
meeting = threading.Barrier(8)
class Meeting(Supplier):
    def alloc(self, *args):
        meeting.wait(20); return super().alloc(*args)
    def free(self, *args):
        meeting.wait(20); super().free(*args)
books = Meeting()
def work(number):
    with growpool.Pool("host", backing=books, chunk_size=PAGE) as mine:
        mine.allocate(PAGE).close()
        mine.trim()
run(8, work)
assert books.given == books.taken == 8
pool = growpool.Pool("host")
""",
    "all that callbacks may do, on eight threads at once": """
meeting = threading.Barrier(8)
other = growpool.Pool("host", name="other")
kept = [[] for _ in range(8)]
number_of = threading.local()
def inside(what):
    meeting.wait(20)  # all eight are here at once, and stay until all are done
    number = number_of.value
    other.free(other.malloc(70000))
    with growpool.Pool("host", alloc=lambda s, d, t: growpool.Chunk.create(s, d),
                       free=lambda *args: None) as third:
        third.allocate(1000)
    assert pool.stats.used_bytes >= 0 and pool.snapshot()["segments"] and repr(pool)
    assert pool.limit == pool.set_limit("1 GiB").limit and pool.unreturned == []
    box = [kept[number]]; box.append(box); del box
    gc.collect()
    taken = books.taken
    dropped, closed, address = kept[number].pop(), kept[number].pop(), kept[number].pop()
    del dropped  # frees of this pool are accepted here, and queued: no free runs inside this one
    closed.close()
    pool.free(address)
    meeting.wait(20)
    assert books.taken == taken
    meeting.wait(20)
def alloc(*args):
    if number_of.value is not None: inside("alloc")
    return books.alloc(*args)
def free(*args):
    inside("free")
    books.free(*args)
pool = growpool.Pool("host", alloc=alloc, free=free, chunk_size=PAGE, limit="1 GiB")
number_of.value = None
pages = pool.range(8 * PAGE)
def stock():
    for each in kept:
        each += [pool.malloc(512), pool.allocate(512), pool.allocate(512)]
stock()
def grow(number):
    number_of.value = number
    pages.commit(number * PAGE, PAGE)
run(8, grow)
stock()
used = pool.stats.used_bytes
def shrink(number):
    number_of.value = number
    pages.decommit(number * PAGE, PAGE)
run(8, shrink)
assert pool.stats.used_bytes == used - 8 * PAGE - 8 * 3 * 512
number_of.value = None
meeting = threading.Barrier(1)
kept = [[] for _ in range(8)]
def inside(what): pass
other.close()
""",
}

# A callback on thread A waits for thread B, which uses the same pool. `theirs` is all that B does,
# and it ends while A is still in its callback.
B_WHILE_A_IS_IN_ALLOC = {
    "malloc": "pool.malloc(2 * PAGE)",
    "allocate and close": "pool.allocate(2 * PAGE).close()",
    "resize": "grown.resize(3 * PAGE); grown.resize(PAGE)",
    "commit": "pages.commit(0, PAGE); pages.decommit(0, PAGE)",
    "trim": "pool.free(pool.malloc(2 * PAGE)); assert pool.trim() > 0",
    "drain": "pool.free(pool.malloc(2 * PAGE)); pool.trim(wait=False); pool.drain()",
    "a growth over the limit": "pool.set_limit(3 * PAGE); refused(pool.malloc, 3 * PAGE)",
    "forget_stream": "pool.forget_stream(None)",
    "a drop": "pool.allocate(2 * PAGE); gc.collect()",
}
ALLOC_WAITS = """
waited = threading.Event()
def alloc(size, device, stream):
    if threading.current_thread().name == "A":
        inside.set()
        assert waited.wait(20), "thread B did not come back"
    return books.alloc(size, device, stream)
def refused(call, *args):
    with contextlib.suppress(growpool.LimitExceededError):
        call(*args)
        raise AssertionError("there was room")
inside = threading.Event()
pool = growpool.Pool("host", alloc=alloc, free=books.free, chunk_size=PAGE)
grown, pages = pool.growable(8 * PAGE), pool.range(8 * PAGE)
def work(number):
    if number == 0:
        threading.current_thread().name = "A"
        pool.malloc(PAGE)
    else:
        assert inside.wait(20)
        {theirs}
        waited.set()
run(2, work)
"""
B_WHILE_A_IS_IN_FREE = {
    "malloc": "pool.malloc(2 * PAGE)",
    "resize": "grown.resize(3 * PAGE); grown.resize(PAGE)",
    "commit of the very pages": "assert pages.commit(0, PAGE) == PAGE",
    "decommit": "pages.commit(4 * PAGE, PAGE); pages.decommit(4 * PAGE, PAGE)",
    "a growth that lacks what A gives back": "pool.set_limit(PAGE); refused(pool.malloc, PAGE)",
    "a trim in the background": "pool.allocate(PAGE).close(); pool.trim(wait=False)",
}
FREE_WAITS = """
waited = threading.Event()
def free(*args):
    if threading.current_thread().name == "A":
        inside.set()
        assert waited.wait(20), "thread B did not come back"
    books.free(*args)
def refused(call, *args):
    with contextlib.suppress(growpool.LimitExceededError):
        call(*args)
        raise AssertionError("there was room")
inside = threading.Event()
pool = growpool.Pool("host", alloc=books.alloc, free=free, chunk_size=PAGE)
grown, pages = pool.growable(8 * PAGE), pool.range(8 * PAGE)
pages.commit(0, PAGE)
def work(number):
    if number == 0:
        threading.current_thread().name = "A"
        pages.decommit(0, PAGE)
    else:
        assert inside.wait(20)
        {theirs}
        waited.set()
run(2, work)
pool.set_limit(None)
pool.malloc(PAGE)
"""
# free hands its chunk on, and another thread's pool has it before free is back.
HANDED_ON = """
shelf, offered, taken = [], threading.Event(), threading.Event()
def alloc(size, device, stream):
    return shelf.pop() if shelf else growpool.Chunk.create(size, device)
def free(chunk, *args):
    shelf.append(chunk)
    if threading.current_thread().name == "A":
        threading.current_thread().name = "done"
        offered.set()
        assert taken.wait(20)
        {ending}
giver = growpool.Pool("host", alloc=alloc, free=free, chunk_size=PAGE)
pool = {taker}
def work(number):
    if number == 0:
        threading.current_thread().name = "A"
        giver.allocate(PAGE).close()
        with contextlib.suppress(growpool.ReleaseWarning): giver.trim()
    else:
        assert offered.wait(20)
        chunk = shelf[0]
        pool.malloc(PAGE)
        assert chunk.is_in_use and shelf == []
        taken.set()
run(2, work)
assert giver.unreturned == pool.unreturned == []
assert pool.stats.physical_bytes == PAGE and pool.stats.chunk_count == 1
if giver is not pool: assert giver.stats.physical_bytes == 0
giver.close(); pool.close()
assert len(shelf) == 1 and not shelf[0].is_in_use
"""
SAME = "giver"
ANOTHER = 'growpool.Pool("host", alloc=alloc, free=free, chunk_size=PAGE)'
SCENARIOS |= AT_ONCE
SCENARIOS |= {
    f"a chunk in {where} before its free {how}": HANDED_ON.format(taker=taker, ending=ending)
    for where, taker in (("its pool again", SAME), ("another pool", ANOTHER))
    for how, ending in (("returned", "return"), ("raised", "raise OSError('late')"))
}
SCENARIOS |= {
    f"alloc waits for another thread's {name}": ALLOC_WAITS.format(theirs=theirs)
    for name, theirs in B_WHILE_A_IS_IN_ALLOC.items()
}
SCENARIOS |= {
    f"free waits for another thread's {name}": FREE_WAITS.format(theirs=theirs)
    for name, theirs in B_WHILE_A_IS_IN_FREE.items()
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_threads(name: str) -> None:
    run_quietly(
        START + SCENARIOS[name] + "\npool.close()\nassert books.out == [], books.out\n", timeout=60
    )


# ---- the hunt ------------------------------------------------------------------------------------

SEEDS = range(1, 13) if LONG else range(1, 3)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("device", ["host", "sim:1"])
def test_no_mix_of_moods_hangs(device: str, seed: int) -> None:
    """The first line of the output is what starts the same hunt again."""
    output = run_quietly(
        f"import hunt; hunt.run({device!r}, seed={seed}, seconds={5 if LONG else 1.2})", timeout=90
    )
    moods = set(re.findall(r"(?:alloc|free): (\w+)", output))
    assert len(moods) > 10, output


# ---- the mix of tests/gpu/test_sixteen_threads.py on the simulated device ------------------------

SIXTEEN = """
import sys, threading
sys.path.insert(0, {folder!r})
from gpu_kit import Supplier
from sixteen_threads import LIMIT, run_threads
import growpool
sim = growpool._core._sim
class Counter:
    expected = 0
class Gpu:
    def fill(self, stream, address, size, seed): sim.launch(1, stream, address, size)
    def verify(self, stream, address, size, seed, counter):
        sim.launch(1, stream, address, size); counter.expected += size // 4
    def delay(self, stream, cycles): pass
    def wait_for(self, waiter, other): sim.complete_all(1)
over = threading.Event()
def complete():
    while not over.wait(0.005): sim.complete_all(1)
threading.Thread(target=complete).start()
streams = [[sim.stream_create(1, False) for _ in range(2)] for _ in range(16)]
counters = [Counter() for _ in streams]
books = Supplier()
with growpool.Pool("sim:1", alloc=books.alloc, free=books.free, limit=LIMIT) as pool:
    counts = run_threads(Gpu(), pool, streams, counters, {seconds})
    over.set()
    assert pool.stats.used_bytes == 0
    pool.trim()
    assert pool.stats.physical_bytes == 0
assert books.made == books.freed > 0 and books.made_bytes == books.freed_bytes
assert sum(counter.expected for counter in counters) * 4 == counts["verified_bytes"]
assert counts["allocations"] == counts["frees"] and min(
    counts[name] for name in counts if name != "refusals") > 0, counts
"""


def test_the_mix_of_sixteen_threads_is_legal() -> None:
    """The simulated device ends the process at work on memory that went, or an unmap under work."""
    folder = Path(__file__).resolve().parents[1] / "gpu"
    run_quietly(SIXTEEN.format(folder=str(folder), seconds=10 if LONG else 1), timeout=60)
