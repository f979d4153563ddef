# SPDX-License-Identifier: Apache-2.0
"""The matrix of misbehaving callbacks, on alloc: each kind of answer in each operation that grows.

Each cell asserts the exact exception and the telling part of its message, that the pool is as it
was, whose the answer is afterwards, where each accepted chunk went, and that the pool works on.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import growpool
import pytest
from emergency import refusals
from helpers import PAGE, eventually
from misbehaviour_kit import (
    CHUNK,
    DEVICES,
    GROW,
    GROWTH,
    REENTER,
    SHRINK,
    Books,
    Chunk,
    Custom,
    Pool,
    World,
    leave,
    raises,
    try_all,
)

GROWING = pytest.mark.parametrize("grow", GROW)
# The first chunk of a growth, or one after others were accepted, which then go back.
GOOD = pytest.mark.parametrize("good", [0, 3], ids=["first", "fourth"])


def fails(
    world: World, grow: str, error: type[BaseException], text: str, counted: int = 1
) -> BaseException:
    """The growth raises, and nothing else happened; the exception."""
    before, errors = world.state(), world.pool.stats.callback_errors
    taken = world.books.free_calls
    with pytest.raises(BaseException) as caught:
        GROW[grow](world)
    found = caught.value
    assert type(found) is error
    assert text in str(found)
    world.trace = [entry.name for entry in caught.traceback]
    found.__traceback__ = None  # it refers to this frame, and so to what the test looks after
    world.check()
    world.books.behave()
    assert world.state() == before
    assert world.pool.stats.callback_errors == errors + counted
    assert world.books.free_calls - taken == world.books.alloc_calls - world.refused
    return found


def answer(world: World, good: int, function: Callable[[int, int], Any]) -> None:
    """Let alloc answer with the function after `good` calls that behave."""
    world.books.good = good
    world.books.alloc_calls = 0
    world.refused = 0

    def on_alloc(size: int, device: int) -> Any:
        world.refused += 1
        return function(size, device)

    world.books.on_alloc = on_alloc


# ---- no memory --------------------------------------------------------------------------------


@DEVICES
@GROWING
@GOOD
def test_none_is_no_memory(world: World, grow: str, good: int) -> None:
    answer(world, good, lambda size, device: None)
    held = world.pool.stats.physical_bytes
    error = fails(world, grow, growpool.OutOfMemoryError, "the backing of pool 'cell' had", 0)
    assert isinstance(error, growpool.OutOfMemoryError)
    assert error.__cause__ is None
    wanted = GROWTH + (grow == "resize")  # its size includes what is there
    assert (error.size, error.physical) == (wanted * CHUNK, held)
    assert (error.limit, error.largest_free) == (None, 0)
    asked = world.refused + refusals()
    for part in (f"no memory for {4 * wanted} MiB", f"(asked {asked} time", "holds 12 MiB"):
        assert part in str(error)
    assert 1 <= world.refused <= 12
    world.check_works()


@DEVICES
@GROWING
@GOOD
@pytest.mark.parametrize("kind", ["MemoryError", "a full pool"])
def test_a_memory_error_is_no_memory_and_the_cause(
    world: World, grow: str, good: int, kind: str
) -> None:
    """Also that of another pool, which the callback lets pass."""
    mine: list[BaseException] = []

    def on_alloc(size: int, device: int) -> Any:
        try:
            if kind == "MemoryError":
                raise MemoryError("the reserve is empty")
            with Pool("host", limit=PAGE) as other:
                return other.allocate(CHUNK)
        except MemoryError as error:
            mine.append(error)
            raise

    answer(world, good, on_alloc)
    error = fails(world, grow, growpool.OutOfMemoryError, "had no memory for", 0)
    assert error.__cause__ is mine[-1]
    mine.clear()
    world.check_works()


# ---- answers that are no chunk that fits ------------------------------------------------------


class Lookalike:
    """Everything that a chunk has, but for being one."""

    size, nbytes, device, device_id, handle = CHUNK, CHUNK, "host", -1, 7
    is_closed = is_in_use = False


NO_CHUNKS: dict[str, Callable[[], Any]] = {
    "str": lambda: "chunk".upper(),
    "int": lambda: 1 << 80,
    "list": list,
    "object": object,
    "the type": lambda: Chunk,
    "a lookalike": Lookalike,
    "a pool": lambda: Pool("host"),
    "NotImplemented": lambda: NotImplemented,
}


@DEVICES
@GROWING
@GOOD
@pytest.mark.parametrize("kind", NO_CHUNKS)
def test_an_answer_that_is_no_chunk(world: World, grow: str, good: int, kind: str) -> None:
    mine = NO_CHUNKS[kind]()
    before = sys.getrefcount(mine)
    answer(world, good, lambda size, device: mine)
    name = "growpool.Pool" if kind == "a pool" else type(mine).__name__
    fails(
        world,
        grow,
        TypeError,
        f"the alloc of pool 'cell' must return a growpool.Chunk or None, not {name}",
    )
    assert world.refused == 1
    assert sys.getrefcount(mine) == before
    world.check_works()


def test_there_is_no_subclass_of_a_chunk() -> None:
    with pytest.raises(TypeError, match="not an acceptable base type"):
        type("Mine", (Chunk,), {})
    with pytest.raises(TypeError, match="cannot create"):
        Chunk()


@DEVICES
@GROWING
@GOOD
@pytest.mark.parametrize("size", [PAGE, 2 * CHUNK], ids=["too small", "too large"])
def test_a_chunk_of_another_size(world: World, grow: str, good: int, size: int) -> None:
    mine = Chunk.create(size, world.device)
    before = sys.getrefcount(mine)
    answer(world, good, lambda *_: mine)
    text = f"was asked for {CHUNK} bytes on {world.device} but answered with chunk "
    error = fails(world, grow, ValueError, text)
    assert f"of {size} bytes on {world.device}, which has another size" in str(error)
    assert str(error).endswith("the chunk stays yours")
    assert not mine.is_closed and not mine.is_in_use
    assert sys.getrefcount(mine) == before
    with Pool(
        world.device, alloc=lambda *_: mine, free=lambda *_: None, chunk_size=size
    ) as other:  # it may be used elsewhere
        other.allocate(size)
        assert mine.is_in_use
    mine.close()
    world.check_works()


@DEVICES
@GROWING
@GOOD
def test_a_closed_chunk(world: World, grow: str, good: int) -> None:
    mine = Chunk.create(CHUNK, world.device)
    mine.close()
    before = sys.getrefcount(mine)
    answer(world, good, lambda *_: mine)
    fails(world, grow, ValueError, f"of {CHUNK} bytes on {world.device}, which is closed")
    assert sys.getrefcount(mine) == before
    world.check_works()


@DEVICES
@GROWING
@GOOD
def test_a_chunk_of_another_device(world: World, grow: str, good: int, one_sim: Any) -> None:
    there = "host" if world.device != "host" else one_sim.device
    mine = Chunk.create(CHUNK, there)
    before = sys.getrefcount(mine)
    answer(world, good, lambda *_: mine)
    fails(world, grow, ValueError, f"on {there}, which is on another device")
    assert not mine.is_closed and not mine.is_in_use
    assert sys.getrefcount(mine) == before
    mine.close()
    world.check_works()


HOLDERS = ["this pool", "another pool", "a pool over a cache", "another pool's unreturned"]


def held_by(world: World, holder: str) -> tuple[Chunk, World | Pool]:
    """A chunk that a pool holds, and who has to live for that."""
    if holder == "this pool":
        return world.books.out[0], world
    books = Books()
    backing: Any = books
    if holder == "a pool over a cache":
        backing = growpool.CachingBacking(books, keep=0)
    owner = Pool(world.device, backing=backing, chunk_size=CHUNK)
    address = owner.malloc(CHUNK)
    if holder == "another pool's unreturned":
        owner.free(address)
        books.on_free = raises(OSError())
        with pytest.warns(growpool.ReleaseWarning):
            owner.trim()
        assert owner.unreturned == books.out
        books.on_free = None
    return books.out[0], owner


@DEVICES
@GROWING
@GOOD
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_chunk_that_a_pool_holds(world: World, grow: str, good: int, holder: str) -> None:
    mine, owner = held_by(world, holder)
    before = sys.getrefcount(mine)
    answer(world, good, lambda *_: mine)
    fails(world, grow, ValueError, f"on {world.device}, which a pool holds already")
    assert mine.is_in_use
    assert sys.getrefcount(mine) == before
    if isinstance(owner, Pool):
        owner.close()
        owner.return_unreturned()
        assert not mine.is_in_use
        mine.close()
    world.check_works()


@DEVICES
@GROWING
@GOOD
def test_the_same_chunk_twice_in_one_growth(world: World, grow: str, good: int) -> None:
    """The second time it is refused; the first acceptance is undone, so it went back once."""
    mine: list[Chunk] = []

    def on_alloc(size: int, device: int) -> Chunk:
        if not mine:
            mine.append(world.books.make(size, device))
            world.refused -= 1
        return mine[0]

    answer(world, min(good, 2), on_alloc)
    fails(world, grow, ValueError, f"on {world.device}, which a pool holds already")
    assert world.refused == 1
    assert not mine[0].is_in_use and not mine[0].is_closed
    world.books.on_alloc = lambda *_: world.books.out.append(mine[0]) or mine[0]
    world.pool.allocate(CHUNK)  # it was given back, so it may be given again
    assert mine[0].is_in_use
    mine.clear()
    world.check_works()


# ---- exceptions -------------------------------------------------------------------------------


KINDS: list[type[BaseException]] = [
    ZeroDivisionError,
    StopIteration,
    KeyboardInterrupt,
    SystemExit,
    GeneratorExit,
    Custom,
    growpool.ReleaseWarning,
    growpool.CaptureError,
]


@DEVICES
@GROWING
@GOOD
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_any_other_exception_reaches_the_caller_unchanged(
    world: World, grow: str, good: int, kind: type[BaseException]
) -> None:
    cause = ValueError("why")
    mine = kind("mine")
    mine.__cause__ = cause
    mine.note = "kept"  # type: ignore[attr-defined]
    answer(world, good, raises(mine))
    error = fails(world, grow, kind, "mine")
    assert error is mine
    assert (error.__cause__, error.__context__) == (cause, None)
    assert vars(error) == {"note": "kept"}
    assert world.trace[-3:] == ["alloc", "on_alloc", "callback"]
    assert world.refused == 1
    world.check_works()


@DEVICES
@GROWING
def test_a_wrong_signature(world: World, grow: str) -> None:
    def short(size: int) -> None:
        raise AssertionError

    answer(world, 1, lambda size, device: short(size, device))  # type: ignore[call-arg]
    fails(world, grow, TypeError, "takes 1 positional argument but 2 were given")
    world.check_works()


# ---- calls back into the pool -----------------------------------------------------------------


@DEVICES
@GROWING
@pytest.mark.parametrize("inner", REENTER)
def test_re_entry_is_an_error_that_reaches_the_caller(world: World, grow: str, inner: str) -> None:
    def on_alloc(size: int, device: int) -> None:
        REENTER[inner](world)
        raise AssertionError("it was let in")

    answer(world, 2, on_alloc)
    fails(world, grow, RuntimeError, "pool 'cell' inside its own callback")
    assert not world.pool.is_closed
    world.check_works()


@DEVICES
@GROWING
def test_a_callback_that_swallows_the_error_of_re_entry_may_answer(world: World, grow: str) -> None:
    let_in: list[str] = []

    def on_alloc(size: int, device: int) -> Chunk:
        before = world.state()
        let_in.extend(try_all(world))
        assert world.state() == before
        return world.books.make(size, device)

    taken = world.books.free_calls
    answer(world, 0, on_alloc)
    GROW[grow](world)
    assert let_in == []
    assert (world.refused, world.books.free_calls) == (GROWTH, taken)
    world.check_works()


@DEVICES
@GROWING
def test_a_pool_that_is_closed_meanwhile(world: World, grow: str) -> None:
    """By another thread, in the middle of the growth: the growth is undone, and the close ends."""
    closers: list[threading.Thread] = []

    def is_closing() -> bool:
        try:
            world.pool.malloc(0)
        except growpool.PoolStateError:
            return True
        return False

    def on_alloc(size: int, device: int) -> Chunk:
        if not closers:
            closers.append(threading.Thread(target=world.pool.close))
            closers[0].start()
            eventually(is_closing)
        return world.books.make(size, device)

    answer(world, 1, on_alloc)
    with pytest.raises(growpool.PoolStateError) as caught:
        GROW[grow](world)
    assert caught.value.reason == "closed"
    assert "pool 'cell' is closed" in str(caught.value)
    closers[0].join(20)
    assert world.pool.is_closed
    world.check()
    world.check_ends()


@DEVICES
@GROWING
@pytest.mark.parametrize("ending", ["answers", "raises"])
def test_a_callback_that_drops_the_pool(world: World, grow: str, ending: str) -> None:
    """The last reference: the call keeps what it needs, and all of it goes after the call."""

    def on_alloc(size: int, device: int) -> Chunk:
        world.drop()
        if ending == "raises":
            raise ZeroDivisionError
        return world.books.make(size, device)

    answer(world, 1, on_alloc)
    if ending == "raises":
        with pytest.raises(ZeroDivisionError) as caught:
            GROW[grow](world)
        caught.value.__traceback__ = None
        del caught
    else:
        GROW[grow](world)
    world.check_goes()


# ---- captures ---------------------------------------------------------------------------------


CAPTURED: dict[str, tuple[Callable[..., Any], type[BaseException]]] = {
    "None": (lambda size, device: None, growpool.OutOfMemoryError),
    "str": (lambda size, device: "chunk", TypeError),
    "too large": (lambda size, device: Chunk.create(2 * size, device), ValueError),
    "KeyboardInterrupt": (raises(KeyboardInterrupt()), KeyboardInterrupt),
}


@pytest.mark.parametrize("device", ["sim"])
@pytest.mark.parametrize("grow", ["malloc", "resize", "commit"])
@pytest.mark.parametrize("kind", CAPTURED)
def test_a_growth_that_fails_inside_a_capture(world: World, grow: str, kind: str) -> None:
    """The capture goes on, and the pool is as it was."""
    function, error = CAPTURED[kind]
    stream = world.sim.stream()
    calls: dict[str, Callable[[], Any]] = {
        "malloc": lambda: world.pool.malloc(GROWTH * CHUNK, stream),
        "resize": lambda: world.growable.resize((1 + GROWTH) * CHUNK, stream),
        "commit": lambda: world.sparse.commit(CHUNK, GROWTH * CHUNK, stream),
    }
    world.sim.capture_begin(stream, 0)
    before = world.state()
    answer(world, 2, function)
    with pytest.raises(error) as caught:
        calls[grow]()
    assert type(caught.value) is error
    caught.value.__traceback__ = None
    world.check()
    assert world.state() == before
    world.books.behave()
    calls[grow]()
    world.check()
    assert world.sim.capture_end(stream)
    world.check_works()


# ---- what never asks --------------------------------------------------------------------------


@DEVICES
@pytest.mark.parametrize("shrink", [*SHRINK, "trim no wait", "set_limit"])
def test_what_does_not_grow_never_asks(world: World, shrink: str) -> None:
    """So no answer of alloc can disturb it."""
    acts: dict[str, Callable[[World], Any]] = {
        **{name: step.act for name, step in SHRINK.items()},
        "trim no wait": lambda world: world.pool.trim(wait=False),
        "set_limit": lambda world: world.pool.set_limit(CHUNK),
    }
    prepare = SHRINK[shrink].prepare if shrink in SHRINK else World.idle
    prepare(world)
    answer(world, 0, raises(AssertionError("asked")))
    acts[shrink](world)
    if not world.pool.is_closed:
        world.pool.drain()
    assert world.books.alloc_calls == 0
    world.pool.set_limit(None) if not world.pool.is_closed else leave(world.pool)
    world.check_ends()
