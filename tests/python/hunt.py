# SPDX-License-Identifier: Apache-2.0
"""A hunt for hangs: eight threads, one pool, and callbacks in every mood.

test_threads.py starts it in processes of their own, under a watchdog.
``run(device, seed, seconds)`` makes a random mix from the seed. Callbacks make objects, collect
garbage, take a lock that other threads hold around their use of the pool, sleep, refuse, raise,
call their own pool, use and drop other pools, drop memory of their own pool, read figures, wait
for streams; signals raise in the main thread meanwhile. Memory on the host carries a pattern, and
the simulated device ends the process at an illegal call. At the end every chunk is back.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import itertools
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import growpool
from helpers import PAGE, Supplier

WORKERS = 8
LIMIT = 64 * PAGE
SIZES = [512, 4096, PAGE // 2, PAGE, 3 * PAGE]


class Mood(Exception):
    """What callbacks raise."""


class Stop(BaseException):
    """What a signal handler raises, as for an interrupt from the keyboard."""


class Block:
    """A buffer on the host with its own number at both ends, or one on the simulated device."""

    numbers = itertools.count(1)

    def __init__(self, buffer: growpool.Buffer) -> None:
        self.buffer = buffer
        self.tag = next(self.numbers).to_bytes(8, "little")
        if buffer.is_host_accessible:
            with memoryview(buffer) as view:
                view[:8] = view[-8:] = self.tag

    def check(self) -> None:
        if self.buffer.is_host_accessible and not self.buffer.is_closed:
            with contextlib.suppress(BufferError), memoryview(self.buffer) as view:
                assert view[:8] == view[-8:] == self.tag, "memory changed hands too early"


def make_chunk(size: int, device: int, stream: int) -> growpool.Chunk:
    return growpool.Chunk.create(size, device)


def forget_chunk(chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
    pass


class Backing:
    """The callbacks of one pool, in the hunt's moods."""

    pool: growpool.Pool

    def __init__(self, hunt: Hunt) -> None:
        self.hunt = hunt

    def alloc(self, size: int, device: int, stream: int) -> Any:
        self.hunt.mood("alloc", self.pool)
        if not self.hunt.calm and self.hunt.random().random() < 0.05:
            return self.hunt.random().choice([None, 7, "chunk"])
        return self.hunt.books.alloc(size, device, stream)

    def free(self, chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
        self.hunt.refused.add(chunk)
        self.hunt.mood("free", self.pool)
        self.hunt.books.free(chunk, size, device, stream)
        self.hunt.refused.discard(chunk)


class Hunt:
    """The pool under fire."""

    def __init__(self, device: str, seed: int) -> None:
        self.books = Supplier()
        self.refused: set[growpool.Chunk] = set()  # their latest free raised
        self.device, self.seed = device, seed
        self.calm = False
        self.over = threading.Event()
        self.lock = threading.RLock()  # callbacks want it, and threads hold it around the pool
        self.swap = threading.Lock()  # around `pool` and `pages`, which belong together
        self.failures: list[str] = []
        self.stops = 0  # raised by the signal handler
        self.unraisable: collections.Counter[str] = collections.Counter()
        self.counts: collections.Counter[str] = collections.Counter()
        self.shared: collections.deque[Block] = collections.deque(maxlen=40)
        self.addresses: collections.deque[tuple[growpool.Pool, int]] = collections.deque()
        self.local = threading.local()
        self.threads_seen = itertools.count()
        self.other = growpool.Pool(device, name="other", limit=LIMIT)
        self.sim = Sim(device) if device.startswith("sim") else None
        self.pool, self.pages = self.make()

    def make(self) -> tuple[growpool.Pool, growpool.Range]:
        backing = Backing(self)
        pool = backing.pool = growpool.Pool(
            self.device, backing=backing, chunk_size=PAGE, limit=LIMIT, name="hunted"
        )
        return pool, pool.range(64 * PAGE)

    def replace(self) -> growpool.Pool:
        """A new pool takes the place of the old one, which is the caller's alone to close."""
        pool, pages = self.make()
        with self.swap:
            old, gone = self.pool, self.pages
            self.pool, self.pages = pool, pages
        del gone
        return old

    def random(self) -> random.Random:
        """Each thread has its own, growpool's delivery thread included."""
        if not hasattr(self.local, "random"):
            self.local.random = random.Random(self.seed * 1000 + next(self.threads_seen))
        return self.local.random

    # -- the moods of callbacks --

    def mood(self, where: str, own: growpool.Pool) -> None:
        if self.calm:
            return
        chosen = self.random().choice(MOODS)
        self.counts[f"{where}: {chosen}"] += 1
        if chosen == "call_own_pool":
            self.call_own_pool(own)
        else:
            getattr(self, chosen)()

    def nothing(self) -> None:
        pass

    def make_objects(self) -> None:
        for _ in range(20):
            box: list[object] = [{}, Block.numbers]
            box.append(box)

    def collect(self) -> None:
        gc.collect(self.random().randrange(3))

    def take_the_lock(self) -> None:
        with self.lock:
            time.sleep(0)

    def sleep(self) -> None:
        time.sleep(self.random().random() * 0.002)

    def refuse(self) -> None:
        raise MemoryError("in this mood")

    def raise_error(self) -> None:
        raise Mood("in this mood")

    def call_own_pool(self, own: growpool.Pool) -> None:
        """What would call the same backing again on this thread is an error, and never waits."""
        call: Callable[[], object] = self.random().choice(
            [own.trim, own.drain, own.close, lambda: own.malloc(LIMIT // 2)]
        )
        try:
            call()
        except RuntimeError:
            return
        self.counts["own pool served"] += 1

    def use_other_pool(self) -> None:
        with contextlib.suppress(growpool.OutOfMemoryError):
            address = self.other.malloc(self.random().choice(SIZES))
            self.other.free(address)
            self.other.trim(wait=self.random().random() < 0.5)

    def make_and_drop_a_pool(self) -> None:
        one = growpool.Pool(self.device, alloc=make_chunk, free=forget_chunk)
        kept = [one, one.allocate(1000)]
        kept.append(kept)

    def drop_memory(self) -> None:
        with contextlib.suppress(IndexError):
            self.shared.popleft()
        self.free_an_address()

    def read_figures(self) -> None:
        with contextlib.suppress(growpool.PoolStateError):
            assert self.pool.stats.used_bytes >= 0
            self.pool.snapshot()
            repr(self.pool)
            self.pool.set_limit(LIMIT)

    def wait_for_a_stream(self) -> None:
        if self.sim is not None:
            return
        with growpool.host.Stream() as stream:
            stream.submit(lambda: None)
            stream.synchronize()

    # -- what the threads do --

    def free_an_address(self) -> None:
        try:
            pool, address = self.addresses.popleft()
        except IndexError:
            return
        with contextlib.suppress(growpool.PoolStateError):
            pool.free(address)

    def allocate(self) -> None:
        block = Block(self.pool.allocate(self.random().choice(SIZES), self.stream()))
        self.launch(block.buffer)
        self.shared.append(block)  # the oldest goes when there are too many

    def malloc(self) -> None:
        pool = self.pool
        self.addresses.append((pool, pool.malloc(self.random().choice(SIZES), self.stream())))

    def close_one(self) -> None:
        with contextlib.suppress(IndexError):
            block = self.shared.popleft()
            block.check()
            block.buffer.close()

    def grow_in_place(self) -> None:
        with self.pool.growable(16 * PAGE, stream=self.stream()) as grown:
            for _ in range(4):
                grown.resize(self.random().randrange(8) * PAGE)

    def commit(self) -> None:
        first, count = self.random().randrange(60), self.random().randrange(1, 5)
        if self.random().random() < 0.5:
            self.pages.commit(first * PAGE, count * PAGE)
        else:
            self.pages.decommit(first * PAGE, count * PAGE)

    def shrink(self) -> None:
        self.random().choice(
            [
                self.pool.trim,
                lambda: self.pool.trim(wait=False),
                self.pool.drain,
                lambda: self.pool.set_limit(self.random().randrange(8, 64) * PAGE),
                self.pool.return_unreturned,
            ]
        )()

    def work_under_the_lock(self) -> None:
        """What never waits for another thread's callback: it may be waiting for this lock."""
        with self.lock:
            for _ in range(3):
                self.random().choice(
                    [
                        self.allocate,
                        self.malloc,
                        self.close_one,
                        self.free_an_address,
                        self.drop_memory,
                        self.collect,
                        self.grow_in_place,
                        self.read_figures,
                        lambda: self.pool.trim(wait=False),
                        lambda: self.pages.commit(0, 2 * PAGE),
                    ]
                )()

    def reopen(self) -> None:
        """A close under fire."""
        if self.random().random() < 0.1:
            old = self.replace()
            while not old.is_closed:
                with contextlib.suppress(BufferError):  # another thread looks at its pattern
                    old.close()

    # -- streams --

    def stream(self) -> Any:
        """A stream of this thread's, sometimes."""
        if self.random().random() < 0.5:
            return None
        if not hasattr(self.local, "stream"):
            self.local.stream = self.sim.stream() if self.sim else growpool.host.Stream()
        return self.local.stream

    def launch(self, buffer: growpool.Buffer) -> None:
        """Work on the simulated device that the stream has not done yet."""
        if self.sim is not None and hasattr(self.local, "stream"):
            buffer.record_stream(self.local.stream)
            self.sim.launch(self.local.stream, buffer)

    # -- the run --

    def step(self, step: Callable[[], None]) -> None:
        step()

    def work(self, step: Callable[[], None]) -> None:
        try:
            self.step(step)
        except Stop as error:
            link: BaseException | None = error
            while link is not None:  # a second one may come while the first one is on its way
                self.counts["Stop"] += isinstance(link, Stop)
                link = link.__context__
        except (growpool.OutOfMemoryError, Mood, TypeError) as error:
            self.counts[type(error).__name__] += 1  # TypeError: the answer was no chunk
        except growpool.PoolStateError as error:
            self.counts[error.reason] += 1
            if error.reason not in ("closed", "busy"):
                raise
        except RuntimeError as error:
            if "inside its own callback" not in str(error):
                raise
            self.counts["re-entered"] += 1  # in a signal handler's or a finaliser's name

    def worker(self) -> None:
        steps = [getattr(self, name) for name in STEPS]
        try:
            while not self.over.is_set():
                self.work(self.random().choice(steps))
        except BaseException as error:
            self.failures.append(f"{threading.current_thread().name}: {error!r}")
            self.over.set()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Raises in the main thread's steps, but not in a callback: that would lose its chunk."""
        sheltered = {
            function.__code__
            for function in (
                *(Backing.alloc, Backing.free),
                *(Hunt.replace, Hunt.on_signal, Hunt.note_unraisable),
            )
        }
        while frame is not None and frame.f_code not in sheltered:
            if frame.f_code is Hunt.step.__code__ and self.random().random() < 0.5:
                self.stops += 1
                raise Stop
            frame = frame.f_back

    def note_unraisable(self, told: sys.UnraisableHookArgs) -> None:
        self.unraisable[type(told.exc_value).__name__] += 1

    def send_signals(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while not self.over.wait(0.003):
            signal.pthread_kill(main, signal.SIGUSR1)

    def complete_work(self) -> None:
        while self.sim is not None and not self.over.wait(0.001):
            self.sim.complete_all()

    def finish(self) -> None:
        self.calm = True
        self.shared.clear()
        self.addresses.clear()
        self.pool.return_unreturned()
        self.pool.close()
        self.pool.return_unreturned()  # a free may have been under way that began in another mood
        self.other.close()
        end = time.monotonic() + 20  # pools that were dropped, and unreturned chunks of closed ones
        out = self.books.out
        while out and time.monotonic() < end:
            gc.collect()  # a callback on the delivery thread may have held its pool the last time
            if self.sim is not None:
                self.sim.complete_all()  # and that thread may have put fences behind the work since
            for chunk in [chunk for chunk in self.refused.copy() if not chunk.is_in_use]:
                self.refused.remove(chunk)
                out.remove(chunk)  # unreturned, and let go with its pool
            time.sleep(0.002)
        assert out == [], out
        assert self.pool.stats.physical_bytes == 0


MOODS = [
    *["nothing"] * 4,
    "make_objects",
    "collect",
    "take_the_lock",
    "sleep",
    "refuse",
    "raise_error",
    "call_own_pool",
    "use_other_pool",
    "make_and_drop_a_pool",
    "drop_memory",
    "read_figures",
    "wait_for_a_stream",
]
STEPS = [
    "allocate",
    "malloc",
    "close_one",
    "free_an_address",
    "grow_in_place",
    "commit",
    "shrink",
    "work_under_the_lock",
    "collect",
    "reopen",
]


class Sim:
    """What the hunt needs of a simulated device."""

    def __init__(self, device: str) -> None:
        self.module: Any = growpool._core._sim  # type: ignore[attr-defined]
        self.ordinal = int(device.partition(":")[2])

    def stream(self) -> int:
        return int(self.module.stream_create(self.ordinal, False))

    def launch(self, stream: int, buffer: growpool.Buffer) -> None:
        self.module.launch(self.ordinal, stream, buffer.handle, buffer.nbytes)

    def complete_all(self) -> None:
        self.module.complete_all(self.ordinal)


def run(device: str, seed: int, seconds: float) -> None:
    """Hunt; an assertion says what went wrong, and the first line how to see it again."""
    print(f"hunt.run({device!r}, seed={seed}, seconds={seconds})", flush=True)
    warnings.simplefilter("ignore", growpool.ReleaseWarning)
    hunt = Hunt(device, seed)
    sys.unraisablehook = hunt.note_unraisable
    signal.signal(signal.SIGUSR1, hunt.on_signal)
    started = [
        threading.Thread(target=hunt.worker, name=f"worker {n}") for n in range(WORKERS - 1)
    ] + [threading.Thread(target=hunt.send_signals), threading.Thread(target=hunt.complete_work)]
    timer = threading.Timer(seconds, hunt.over.set)
    for thread in [*started, timer]:
        thread.start()
    hunt.worker()  # the eighth: the one that signals reach
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for thread in [*started, timer]:
        thread.join()
    assert not hunt.failures, hunt.failures
    hunt.finish()
    told = hunt.unraisable
    assert set(told) <= {"ReleaseWarning"}, told
    assert hunt.counts["Stop"] == hunt.stops, f"a handler raised {hunt.stops}: {hunt.counts}"
    print(f"{hunt.books.given} chunks, {dict(hunt.counts)}, unraisable {dict(told)}")
