# SPDX-License-Identifier: Apache-2.0
"""What the tests of misbehaving callbacks share: a pool with a bit of everything in it, the
operations that grow or shrink it, and the checks that every cell of the matrix makes.

Chunks are of two pages, so that an answer can be too small as well as too large. Each operation
that grows asks for GROWTH chunks; each one that shrinks gives back exactly two.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import growpool
import pytest
from helpers import PAGE, eventually

Pool = growpool.Pool
Chunk = growpool.Chunk

CHUNK = 2 * PAGE
GROWTH = 4

ctypes.pythonapi.PyErr_Occurred.restype = ctypes.c_void_p


class Custom(BaseException):
    """Derived from nothing that growpool knows."""


class Books:
    """Callbacks that behave until told otherwise: `on_alloc` and `on_free` take over then.

    `out` lists the chunks that a pool accepted and did not give back; whoever takes over and keeps
    one writes that down himself.
    """

    def __init__(self) -> None:
        self.out: list[Chunk] = []
        self.alloc_calls = 0
        self.free_calls = 0
        self.good = 0  # so many calls of alloc behave before on_alloc takes over
        self.on_alloc: Callable[[int, int], Any] | None = None
        self.on_free: Callable[[Chunk], Any] | None = None

    def make(self, size: int, device: int) -> Chunk:
        chunk = Chunk.create(size, device)
        self.out.append(chunk)
        return chunk

    def alloc(self, size: int, device: int, stream: int) -> Any:
        self.alloc_calls += 1
        if self.on_alloc is not None:
            if self.good == 0:
                return self.on_alloc(size, device)
            self.good -= 1
        return self.make(size, device)

    def free(self, chunk: Chunk, size: int, device: int, stream: int) -> Any:
        self.free_calls += 1
        assert (chunk.size, chunk.device_id, chunk.is_in_use) == (size, device, False)
        if self.on_free is not None:
            return self.on_free(chunk)
        self.out.remove(chunk)  # ValueError when it came twice
        return None

    def behave(self) -> None:
        self.on_alloc = self.on_free = None


class World:
    """A pool with a live buffer, a growable, and a range, each of one chunk, and nothing idle."""

    def __init__(self, device: str, sim: Any) -> None:
        self.device = device
        self.sim = sim
        self.books = Books()
        self.pool: Any = Pool(
            device,
            alloc=self.books.alloc,
            free=self.books.free,
            chunk_size=CHUNK,
            address_space=64 * CHUNK,
            name="cell",
        )
        self.pool.free(self.pool.malloc(16 * CHUNK))  # the peaks, and the addresses of blocks
        self.pool.trim()
        self.kept: Any = self.pool.allocate(CHUNK)
        self.growable: Any = self.pool.growable(16 * CHUNK)
        self.growable.resize(CHUNK)
        self.sparse: Any = self.pool.range(32 * CHUNK)
        self.sparse.commit(0, CHUNK)
        self.reference = weakref.ref(self.pool)
        self.refused = 0  # answers of alloc that no pool accepted
        self.trace: list[str] = []  # the functions that the last exception came through

    def idle(self, count: int = 2) -> None:
        """Idle chunks, each a mapping of its own."""
        for address in [self.pool.malloc(CHUNK) for _ in range(count)]:
            self.pool.free(address)

    def drop(self) -> None:
        """Let go of every reference to the pool."""
        self.pool = self.kept = self.growable = self.sparse = None

    def state(self) -> tuple[Any, ...]:
        """Everything that a failed operation leaves as it was."""
        snapshot = self.pool.snapshot()
        spans = [
            (span["address"], span["bytes"], span["state"])
            for segment in snapshot["segments"]
            for span in segment["spans"]
        ]
        figures = self.figures()
        for counter in ("callback_errors", "wait_count"):
            del figures[counter]
        return (
            figures,
            spans,
            sorted((c["address"], c["id"], c["retiring"]) for c in snapshot["chunks"]),
            (self.growable.size, self.growable.physical_bytes),
            (self.sparse.committed, self.sparse.physical_bytes),
            [id(chunk) for chunk in self.books.out],
            [id(chunk) for chunk in self.pool.unreturned],
        )

    def figures(self) -> dict[str, Any]:
        stats = self.pool.stats
        return {name: getattr(stats, name) for name in type(stats).__match_args__}

    def check(self) -> None:
        """The core's invariants, the books, the interpreter, and the device."""
        assert growpool._core._testing.check_pool(self.pool) == ""
        assert sum(chunk.size for chunk in self.books.out) == self.pool.stats.physical_bytes
        assert all(chunk.is_in_use for chunk in self.books.out)
        assert {id(chunk) for chunk in self.pool.unreturned} <= set(map(id, self.books.out))
        check_interpreter()
        eventually(lambda: self.sim.state.entered == 0)  # the delivery thread may look just now

    def check_works(self) -> None:
        """The pool grows in every way, then gives everything back."""
        self.books.behave()
        self.pool.allocate(3 * CHUNK).close()
        self.pool.free(self.pool.malloc(5 * CHUNK))
        self.growable.resize(6 * CHUNK)
        self.sparse.commit_many([(20 * CHUNK, CHUNK), (24 * CHUNK, 2 * CHUNK)])
        self.check()
        self.check_ends()

    def check_ends(self) -> None:
        """Every chunk that is still out comes back."""
        self.books.behave()
        self.pool.close()
        self.pool.return_unreturned()
        assert self.books.out == []
        stats = self.pool.stats
        assert (stats.physical_bytes, stats.used_bytes, stats.chunk_count) == (0, 0, 0)
        assert self.pool.unreturned == []
        self.check()

    def check_goes(self) -> None:
        """The pool was dropped: it goes by itself, with all that was in it."""
        self.books.behave()
        assert self.reference() is None
        eventually(lambda: self.books.out == [])
        check_interpreter()


def check_interpreter() -> None:
    """This thread has the GIL and nothing raised."""
    assert ctypes.pythonapi.PyGILState_Check() == 1
    assert not ctypes.pythonapi.PyErr_Occurred()
    assert sys.exc_info() == (None, None, None)


def check_ledger(sim: Any) -> None:
    """The simulated device has nothing left of the cell."""

    def empty() -> bool:
        state = sim.state
        return (state.unreleased_count, state.mapping_count, state.reservation_count) == (0, 0, 0)

    if not empty():
        gc.collect()  # exceptions and the frames that they went through refer to each other
    eventually(empty)
    assert sim.violations() == (0, "")


# ---- operations -------------------------------------------------------------------------------


GROW: dict[str, Callable[[World], Any]] = {
    "malloc": lambda world: world.pool.malloc(GROWTH * CHUNK),
    "allocate": lambda world: world.pool.allocate(GROWTH * CHUNK),
    "resize": lambda world: world.growable.resize((1 + GROWTH) * CHUNK),
    "commit": lambda world: world.sparse.commit(CHUNK, GROWTH * CHUNK),
    "commit_many": lambda world: world.sparse.commit_many(
        [(8 * CHUNK, CHUNK), (4 * CHUNK, 2 * CHUNK), (12 * CHUNK, CHUNK)]
    ),
}


def leave(pool: Any) -> None:
    """The end of a with block."""
    pool.__exit__(None, None, None)


# What calls free on the same thread would be a call of the backing inside the backing.
REENTER: dict[str, Callable[[World], Any]] = {
    **GROW,
    "trim": lambda world: world.pool.trim(),
    "trim no wait": lambda world: world.pool.trim(wait=False),
    "drain": lambda world: world.pool.drain(),
    "close": lambda world: world.pool.close(),
    "exit": lambda world: leave(world.pool),
    "return_unreturned": lambda world: world.pool.return_unreturned(),
    "shrink": lambda world: world.growable.resize(0),
    "decommit": lambda world: world.sparse.decommit(0, CHUNK),
}


def try_all(world: World) -> list[str]:
    """Enter the pool again in every way; which ones were not refused."""
    let_in = []
    for name, call in REENTER.items():
        try:
            call(world)
        except RuntimeError as error:
            inside = "use another pool there, or do it afterwards" in str(error)
            if not inside and getattr(error, "reason", "") != "closed":
                raise
        else:
            let_in.append(name)
    return let_in


@contextmanager
def let_pass(world: World, release: Callable[[], Any]) -> Iterator[None]:
    """Call release() once the pool waits for a stream."""
    pool = world.pool
    before = pool.stats.wait_count

    def watch() -> None:
        eventually(lambda: pool.stats.wait_count > before)
        release()

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    thread.join()


class Shrink(SimpleNamespace):
    """One way to give two chunks back: `prepare`, then `act`; what `act` returns then.

    `ends`: the pool takes no more work afterwards. `error`: what it raises when free behaves.
    """

    prepare: Callable[[World], Any]
    act: Callable[[World], Any]
    result: Callable[[int], Any]
    ends: bool = False
    error: type[BaseException] | None = None


def nothing(world: World) -> None:
    pass


def grow_all(world: World) -> None:
    world.growable.resize(3 * CHUNK)
    world.sparse.commit_many([(4 * CHUNK, CHUNK), (6 * CHUNK, CHUNK)])


def retire_busy(world: World) -> None:
    """Two chunks that retire behind work which is not done before somebody waits for it."""
    if world.device == "host":
        world.go = threading.Event()
        world.stream = growpool.host.Stream()
        world.stream.submit(world.go.wait)
        stream: Any = world.stream
    else:
        stream = world.sim.stream()
    addresses = [world.pool.malloc(CHUNK, stream) for _ in range(2)]
    for address in addresses:
        if world.device != "host":
            world.sim.launch(stream, address, CHUNK)
        world.pool.free(address, stream)
    assert world.pool.trim(wait=False) == 2 * CHUNK


def drain(world: World) -> None:
    if world.device != "host":
        world.pool.drain()
        return
    with let_pass(world, world.go.set):
        world.pool.drain()


def only_two(world: World) -> None:
    """What is left when a pool is closed: two chunks."""
    world.growable.resize(0)


def make_unreturned(world: World) -> None:
    world.idle()
    world.books.on_free = raises(OSError("at first"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", growpool.ReleaseWarning)
        world.pool.trim()
    world.books.behave()
    assert len(world.pool.unreturned) == 2


SHRINK: dict[str, Shrink] = {
    "trim": Shrink(
        prepare=World.idle, act=lambda world: world.pool.trim(), result=lambda freed: freed
    ),
    "drain": Shrink(prepare=retire_busy, act=drain, result=lambda freed: None),
    "close": Shrink(
        prepare=only_two, act=lambda world: world.pool.close(), result=lambda freed: None, ends=True
    ),
    "exit": Shrink(
        prepare=only_two, act=lambda world: leave(world.pool), result=lambda freed: None, ends=True
    ),
    "return_unreturned": Shrink(
        prepare=make_unreturned,
        act=lambda world: world.pool.return_unreturned(),
        result=lambda freed: freed,
    ),
    "resize": Shrink(
        prepare=grow_all,
        act=lambda world: world.growable.resize(CHUNK),
        result=lambda freed: (freed, 0),
    ),
    "decommit": Shrink(
        prepare=grow_all,
        act=lambda world: world.sparse.decommit(4 * CHUNK, 8 * CHUNK),
        result=lambda freed: (freed, 0),
    ),
    "decommit_many": Shrink(
        prepare=grow_all,
        act=lambda world: world.sparse.decommit_many([(6 * CHUNK, CHUNK), (3 * CHUNK, 2 * CHUNK)]),
        result=lambda freed: (freed, 0),
    ),
}


def undone(grow: Callable[[World], Any]) -> Shrink:
    """A growth whose third chunk is not supplied, so that two go back."""

    def act(world: World) -> Any:
        world.books.good = 2
        world.books.on_alloc = raises(ZeroDivisionError("the third"))
        try:
            return grow(world)
        finally:
            world.books.on_alloc = None

    return Shrink(prepare=nothing, act=act, result=lambda freed: None, error=ZeroDivisionError)


def reclaiming(grow: Callable[[World], Any]) -> Shrink:
    """A growth under a limit that the two idle chunks of a foreign stream are in the way of."""

    def prepare(world: World) -> None:
        stream = growpool.host.Stream() if world.device == "host" else world.sim.stream()
        for address in [world.pool.malloc(CHUNK, stream) for _ in range(2)]:
            world.pool.free(address)
        world.stream = stream
        world.pool.set_limit(world.pool.stats.physical_bytes + (GROWTH - 2) * CHUNK)

    return Shrink(prepare=prepare, act=grow, result=lambda freed: None)


def outcome(act: Callable[[World], Any], world: World) -> tuple[Any, BaseException | None]:
    """What the operation returned and what it raised, without the frames that it came through."""
    try:
        return act(world), None
    except BaseException as error:
        return None, error.with_traceback(None)


UNDO = {f"undo of {name}": undone(grow) for name, grow in GROW.items()}
# A block takes idle chunks of its pool's one size with it, so there nothing is given back.
RECLAIM = {
    f"{name} at the limit": reclaiming(grow)
    for name, grow in GROW.items()
    if name not in ("malloc", "allocate")
}


EXPLICIT = {**SHRINK, **UNDO, **RECLAIM}


def raises(error: BaseException) -> Callable[..., Any]:
    def callback(*_: Any) -> Any:
        raise error

    return callback


# ---- devices ----------------------------------------------------------------------------------


DEVICES = pytest.mark.parametrize("device", ["host", "sim"])
