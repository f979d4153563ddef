# SPDX-License-Identifier: Apache-2.0
"""Many threads, one interpreter: no hang and no lost chunk.

Each scenario has a process of its own, with a watchdog that prints every stack: a deadlock on the
interpreter's lock would stop any timer inside it.
"""

from __future__ import annotations

import pytest
from helpers import run_quietly

START = """
import gc, random, threading, time
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


@pytest.mark.parametrize("name", SCENARIOS)
def test_threads(name: str) -> None:
    run_quietly(
        START + SCENARIOS[name] + "\npool.close()\nassert books.out == [], books.out\n", timeout=60
    )
