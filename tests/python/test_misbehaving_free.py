# SPDX-License-Identifier: Apache-2.0
"""The matrix of misbehaving callbacks, on free: each kind of end in each call that gives back.

Each operation here gives back two chunks, so that one shows what becomes of the other. The undo of
a growth gives back too, and so does a growth that makes room under its limit.
"""

from __future__ import annotations

import gc
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import growpool
import pytest
from helpers import eventually
from misbehaviour_kit import (
    CHUNK,
    DEVICES,
    EXPLICIT,
    GROW,
    GROWTH,
    RECLAIM,
    REENTER,
    SHRINK,
    UNDO,
    Chunk,
    Custom,
    Pool,
    World,
    check_interpreter,
    outcome,
    try_all,
)

OPERATIONS = pytest.mark.parametrize("operation", EXPLICIT)
EXCEPTIONS: list[type[BaseException]] = [
    ZeroDivisionError,
    MemoryError,
    growpool.PoolStateError,
]
OTHERS: list[type[BaseException]] = [KeyboardInterrupt, SystemExit, GeneratorExit, Custom]


def name_of(kind: type[BaseException]) -> str:
    return kind.__name__


class Run:
    """One operation in which free misbehaves, and what came of it."""

    def __init__(self, world: World, operation: str, on_free: Callable[[Chunk], Any]) -> None:
        self.world, self.operation = world, operation
        EXPLICIT[operation].prepare(world)
        self.raised: list[BaseException] = []
        self.chunks: list[Chunk] = []
        self.held = world.pool.stats.physical_bytes
        self.errors = world.pool.stats.callback_errors
        self.pool = world.reference

        def counted(chunk: Chunk) -> Any:
            self.chunks.append(chunk)
            try:
                return on_free(chunk)
            except BaseException as error:
                self.raised.append(error)
                raise

        world.books.on_free = counted
        with warnings.catch_warnings(record=True) as self.seen:
            warnings.simplefilter("always")
            self.value, self.error = outcome(EXPLICIT[operation].act, world)
        for error in self.raised:
            error.__traceback__ = None  # it refers to the frame of free
        world.books.behave()
        assert len(self.chunks) == 2

    def check_result(self, freed: int, *, alone: bool = True) -> None:
        """The operation ended as if free had behaved, but for bytes that did not go."""
        if self.operation in UNDO:
            assert type(self.error) is ZeroDivisionError and str(self.error) == "the third"
            if alone:
                assert self.error.__context__ is None
        elif self.operation in RECLAIM and freed < 2 * CHUNK:
            assert type(self.error) is growpool.LimitExceededError
        elif self.operation in RECLAIM:
            assert self.error is None
        else:
            assert self.error is None
            assert self.value == SHRINK[self.operation].result(freed)

    def check_warnings(self, errors: list[BaseException], chunks: list[Chunk], where: str) -> None:
        assert [entry.message.__cause__ for entry in self.seen] == errors  # type: ignore[union-attr]
        for entry, error, chunk in zip(self.seen, errors, chunks, strict=True):
            assert entry.category is growpool.ReleaseWarning
            number = repr(chunk).split()[2 - 1].rstrip(":")
            assert str(entry.message) == (
                f"the free of pool 'cell' raised {error!r} for chunk {number} of 4.0 MiB; {where}"
            )

    def check_unreturned(self, chunks: list[Chunk]) -> None:
        """They are listed and counted, toward the limit too, and nothing else is left of it."""
        pool = self.world.pool
        assert sorted(map(id, pool.unreturned)) == sorted(map(id, chunks))
        stats = pool.stats
        assert stats.unreturned_bytes == len(chunks) * CHUNK
        assert stats.retiring_bytes == 0
        assert all(chunk.is_in_use and not chunk.is_closed for chunk in chunks)
        for chunk in chunks:
            with pytest.raises(growpool.PoolStateError, match="is in use by a pool"):
                chunk.close()
        supplied = 2 if self.operation in UNDO else 0
        if self.error is None and self.operation in RECLAIM:
            supplied = GROWTH
        gone = 2 - len(chunks)
        assert stats.physical_bytes == self.held + (supplied - gone) * CHUNK
        failed = len(self.raised) + (self.operation in UNDO)
        assert stats.callback_errors == self.errors + failed
        self.world.check()

    def check_retry(self) -> None:
        """Another try gives them back, on a closed pool too; then the pool works."""
        world, count = self.world, len(self.world.pool.unreturned)
        self.chunks.clear()
        assert world.pool.return_unreturned() == count * CHUNK
        assert world.pool.return_unreturned() == 0
        assert world.pool.stats.unreturned_bytes == 0
        world.check()
        self.finish()

    def finish(self) -> None:
        closed = self.operation in SHRINK and SHRINK[self.operation].ends
        assert self.world.pool.is_closed == closed
        if closed:
            self.world.check_ends()
        else:
            self.world.pool.set_limit(None)
            self.world.check_works()


UNRETURNED = "the chunk is in unreturned: mend free, then call return_unreturned()"


# ---- exceptions -------------------------------------------------------------------------------


def always(kind: type[BaseException]) -> Callable[[Chunk], Any]:
    def on_free(chunk: Chunk) -> Any:
        raise kind("no")

    return on_free


@DEVICES
@OPERATIONS
@pytest.mark.parametrize("kind", EXCEPTIONS, ids=name_of)
def test_an_exception_is_a_warning_and_the_chunk_is_unreturned(
    world: World, operation: str, kind: type[BaseException]
) -> None:
    run = Run(world, operation, always(kind))
    run.check_result(0)
    if operation in RECLAIM:
        assert "chunks whose free failed count too, until return_unreturned" in str(run.error)
    run.check_warnings(run.raised, run.chunks, UNRETURNED)
    run.check_unreturned(run.chunks)
    run.check_retry()


@DEVICES
@OPERATIONS
@pytest.mark.parametrize("kind", OTHERS, ids=name_of)
def test_any_other_exception_is_raised_after_the_rest_was_done(
    world: World, operation: str, kind: type[BaseException]
) -> None:
    """The first of them; the second is a warning."""
    run = Run(world, operation, always(kind))
    assert run.error is run.raised[0]
    context = run.error.__context__
    if operation in SHRINK:
        assert context is None
    else:
        assert type(context) is (
            ZeroDivisionError if operation in UNDO else growpool.LimitExceededError
        )
    run.check_warnings(run.raised[1:], run.chunks[1:], UNRETURNED)
    run.check_unreturned(run.chunks)
    run.check_retry()


@DEVICES
@OPERATIONS
@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt], ids=name_of)
@pytest.mark.parametrize("which", [0, 1], ids=["first", "second"])
def test_one_of_two_raises(
    world: World, operation: str, kind: type[BaseException], which: int
) -> None:
    """The other chunk is given back all the same."""
    count = 0

    def on_free(chunk: Chunk) -> None:
        nonlocal count
        count += 1
        if count == which + 1:
            raise kind("no")
        world.books.out.remove(chunk)

    run = Run(world, operation, on_free)
    if kind is ZeroDivisionError:
        run.check_result(CHUNK)
        run.check_warnings(run.raised, [run.chunks[which]], UNRETURNED)
    else:
        assert run.error is run.raised[0]
        assert run.seen == []
    run.check_unreturned([run.chunks[which]])
    run.check_retry()


@DEVICES
@OPERATIONS
def test_where_warnings_are_errors_the_first_is_raised(
    world: World, operation: str, unraisable: list[Any]
) -> None:
    """And the others, which cannot be raised as well, go to sys.unraisablehook."""
    EXPLICIT[operation].prepare(world)
    world.books.on_free = always(OSError)
    with warnings.catch_warnings():
        warnings.simplefilter("error", growpool.ReleaseWarning)
        _, error = outcome(EXPLICIT[operation].act, world)
    told = list(unraisable)
    if operation in SHRINK:
        assert type(error) is growpool.ReleaseWarning
        told.insert(0, error)
    elif operation in UNDO:
        assert type(error) is ZeroDivisionError
    else:
        assert type(error) is growpool.LimitExceededError
    assert [type(one) for one in told] == [growpool.ReleaseWarning] * 2
    assert [type(one.__cause__) for one in told] == [OSError] * 2
    assert all("pool 'cell'" in str(one) and "4.0 MiB" in str(one) for one in told)
    check_interpreter()
    world.books.behave()
    assert world.pool.return_unreturned() == 2 * CHUNK


@DEVICES
@pytest.mark.parametrize("grow", [name for name in GROW if f"{name} at the limit" in RECLAIM])
@pytest.mark.parametrize("kind", ["a warning", "a warning as error", "KeyboardInterrupt"])
def test_a_growth_gets_through_although_a_free_raised(world: World, grow: str, kind: str) -> None:
    """With another idle chunk. What is raised comes after: no block is lost, and sizes tell."""
    world.idle(3)
    before = world.pool.stats
    world.pool.set_limit(before.physical_bytes + (GROWTH - 2) * CHUNK)
    calls = world.books.free_calls
    raised: list[BaseException] = []

    def on_free(chunk: Chunk) -> None:
        if not raised:
            raised.append(KeyboardInterrupt() if kind == "KeyboardInterrupt" else OSError())
            raise raised[0]
        world.books.out.remove(chunk)

    world.books.on_free = on_free
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("error" if kind == "a warning as error" else "always")
        value, error = outcome(GROW[grow], world)
    raised[0].__traceback__ = None
    if kind == "a warning":
        assert error is None
        assert [entry.message.__cause__ for entry in seen] == raised  # type: ignore[union-attr]
    elif kind == "KeyboardInterrupt":
        assert error is raised[0]
    else:
        assert type(error) is growpool.ReleaseWarning and error.__cause__ is raised[0]
    assert world.books.free_calls - calls == 3
    assert world.pool.stats.used_bytes - before.used_bytes == GROWTH * CHUNK
    assert world.growable.size == (5 * CHUNK if grow == "resize" else CHUNK)
    grown = world.sparse.committed_bytes - CHUNK
    assert grown == (GROWTH * CHUNK if grow.startswith("commit") else 0)
    assert world.pool.stats.physical_bytes == world.pool.limit
    assert len(world.pool.unreturned) == 1
    world.check()
    world.books.behave()
    assert world.pool.return_unreturned() == CHUNK
    world.pool.set_limit(None)
    world.check_ends()


# ---- what it returns and does -----------------------------------------------------------------


VALUES: dict[str, Callable[[], Any]] = {
    "an int": lambda: int("1" * 40),
    "an exception": lambda: OSError("returned, not raised"),
    "a type": lambda: type("Mine", (), {}),
}


@DEVICES
@OPERATIONS
@pytest.mark.parametrize("value", [*VALUES, "the chunk"])
def test_what_it_returns_is_ignored(world: World, operation: str, value: str) -> None:
    mine = VALUES[value]() if value in VALUES else None

    def on_free(chunk: Chunk) -> Any:
        world.books.out.remove(chunk)
        return chunk if mine is None else mine

    before = sys.getrefcount(mine)
    run = Run(world, operation, on_free)
    assert mine is None or sys.getrefcount(mine) == before
    run.check_result(2 * CHUNK)
    assert run.seen == []
    run.check_unreturned([])
    for chunk in run.chunks:
        assert not chunk.is_in_use and not chunk.is_closed
    run.finish()


@DEVICES
@OPERATIONS
@pytest.mark.parametrize("inner", ["malloc", "trim", "drain", "close", "return_unreturned"])
def test_re_entry_is_an_error_like_any_other(world: World, operation: str, inner: str) -> None:
    run = Run(world, operation, lambda chunk: REENTER[inner](world))
    run.check_result(0)
    ends = operation in SHRINK and SHRINK[operation].ends
    for error in run.raised:
        if ends and inner in ("malloc", "trim", "drain") and type(error) is not RuntimeError:
            assert isinstance(error, growpool.PoolStateError) and error.reason == "closed"
        else:
            assert type(error) is RuntimeError
            assert "pool 'cell' inside its own callback" in str(error)
    run.check_warnings(run.raised, run.chunks, UNRETURNED)
    run.check_unreturned(run.chunks)
    run.check_retry()


@DEVICES
@OPERATIONS
def test_a_free_that_swallows_the_error_of_re_entry_may_end(world: World, operation: str) -> None:
    let_in: list[str] = []

    def on_free(chunk: Chunk) -> None:
        let_in.extend(try_all(world))
        world.books.out.remove(chunk)

    run = Run(world, operation, on_free)
    assert let_in == []
    run.check_result(2 * CHUNK, alone=False)
    assert run.seen == []
    run.check_unreturned([])
    run.finish()


@DEVICES
@OPERATIONS
def test_what_it_may_do(world: World, operation: str) -> None:
    """Other pools, buffers of this one, its figures, and garbage."""
    with Pool(world.device, name="other") as other:

        def on_free(chunk: Chunk) -> None:
            other.allocate(1000)
            world.kept.close()
            gc.collect(0)
            assert world.pool.stats.physical_bytes > 0
            assert repr(world.pool) and world.pool.name == "cell"
            world.books.out.remove(chunk)

        run = Run(world, operation, on_free)
    run.check_result(2 * CHUNK)
    assert run.seen == []
    assert world.kept.is_closed
    assert world.pool.unreturned == []
    world.check()
    run.finish()


@DEVICES
@OPERATIONS
@pytest.mark.parametrize("ending", ["returns", "raises"])
def test_a_free_that_drops_the_pool(
    world: World, operation: str, ending: str, unraisable: list[Any]
) -> None:
    """The last reference: the call keeps what it needs, and all of it goes after the call."""
    main, dropped = threading.get_ident(), False

    def on_free(chunk: Chunk) -> None:
        nonlocal dropped
        world.drop()  # what goes with it may be given back by the delivery thread at once
        if ending == "raises" and not dropped and threading.get_ident() == main:
            dropped = True
            raise OSError
        world.books.out.remove(chunk)

    EXPLICIT[operation].prepare(world)
    world.books.on_free = on_free
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        outcome(EXPLICIT[operation].act, world)
    assert len(seen) == (ending == "raises")
    seen.clear()
    if ending == "returns":
        world.check_goes()
        return
    # The pool that went had one chunk that could not be returned: it is let go with the pool.
    world.books.behave()
    assert world.reference() is None
    eventually(lambda: [chunk.is_in_use for chunk in world.books.out] == [False])
    assert unraisable == []
    world.books.out.pop().close()


# ---- what it does with the chunk --------------------------------------------------------------


@DEVICES
@OPERATIONS
@pytest.mark.parametrize("ending", ["returns", "raises"])
def test_a_free_that_closes_the_chunk(world: World, operation: str, ending: str) -> None:
    """If it raises afterwards, nothing is left to be returned."""

    def on_free(chunk: Chunk) -> None:
        chunk.close()
        world.books.out.remove(chunk)
        if ending == "raises":
            raise OSError("no")

    run = Run(world, operation, on_free)
    if ending == "returns" or operation not in RECLAIM:
        run.check_result(2 * CHUNK if ending == "returns" else 0)
    else:
        assert run.error is None  # there is room
    run.check_warnings(
        run.raised,
        run.chunks[: len(run.raised)],
        "the chunk is closed, so nothing is left to return",
    )
    run.check_unreturned([])
    assert all(chunk.is_closed for chunk in run.chunks)
    if operation == "return_unreturned":
        gc.collect()  # the exception of the first try, and its frames
    counts = {sys.getrefcount(chunk) for chunk in run.chunks}
    assert counts == {3}  # the list, the loop, the argument: nobody else has it
    run.finish()


@DEVICES
@OPERATIONS
def test_a_free_that_keeps_the_chunk(world: World, operation: str) -> None:
    """It may be supplied again, to the same pool too."""
    kept: list[Chunk] = []

    def on_free(chunk: Chunk) -> None:
        kept.append(chunk)
        world.books.out.remove(chunk)

    run = Run(world, operation, on_free)
    run.check_result(2 * CHUNK)
    assert run.seen == []
    run.check_unreturned([])
    assert kept == run.chunks
    assert not any(chunk.is_in_use or chunk.is_closed for chunk in kept)
    if not world.pool.is_closed:
        world.pool.set_limit(None)
        again = list(kept)
        world.books.on_alloc = lambda *_: world.books.out.append(again[-1]) or again.pop()
        buffer = world.pool.allocate(2 * CHUNK)
        assert all(chunk.is_in_use for chunk in kept)
        buffer.close()
    run.finish()


@DEVICES
@OPERATIONS
@pytest.mark.parametrize("ending", ["returns", "raises"])
def test_a_free_that_hands_the_chunk_to_another_pool(
    world: World, operation: str, ending: str
) -> None:
    """While it runs. The chunk is the other pool's then, whatever free does next."""
    handed: list[Chunk] = []
    back: list[Chunk] = []
    other = Pool(
        world.device,
        alloc=lambda *_: handed[-1],
        free=lambda chunk, *_: back.append(chunk),
        chunk_size=CHUNK,
        name="other",
    )

    def on_free(chunk: Chunk) -> None:
        handed.append(chunk)
        world.books.out.remove(chunk)
        other.malloc(CHUNK)
        if ending == "raises":
            raise OSError("no")

    run = Run(world, operation, on_free)
    if ending == "returns" or operation not in RECLAIM:
        run.check_result(2 * CHUNK if ending == "returns" else 0)
    else:
        assert run.error is None  # there is room
    where = "another pool has taken the chunk meanwhile, so it is that pool's to return"
    run.check_warnings(run.raised, run.chunks[: len(run.raised)], where)
    run.check_unreturned([])
    assert handed == run.chunks
    assert all(chunk.is_in_use for chunk in handed)
    assert other.stats.physical_bytes == 2 * CHUNK
    run.finish()
    assert back == []
    other.close()
    assert sorted(map(id, back)) == sorted(map(id, handed))
    assert not any(chunk.is_in_use for chunk in back)


# ---- in the background ------------------------------------------------------------------------


BACKGROUND: dict[str, Callable[[World], Any]] = {
    "trim no wait": lambda world: world.pool.trim(wait=False),
    "set_limit": lambda world: world.pool.set_limit(CHUNK),
    "decommit no wait": lambda world: world.sparse.decommit(4 * CHUNK, 8 * CHUNK, wait=False),
    "resize no wait": lambda world: world.growable.resize(CHUNK, wait=False),
    "closing a growable": lambda world: world.growable.close(),
}
PREPARE = {
    "trim no wait": World.idle,
    "set_limit": World.idle,
    "decommit no wait": SHRINK["decommit"].prepare,
    "resize no wait": SHRINK["resize"].prepare,
    "closing a growable": lambda world: world.growable.resize(2 * CHUNK),
}


@DEVICES
@pytest.mark.parametrize("operation", BACKGROUND)
@pytest.mark.parametrize("kind", [*EXCEPTIONS, *OTHERS], ids=name_of)
def test_in_the_background_everything_goes_to_the_unraisable_hook(
    world: World, operation: str, kind: type[BaseException], unraisable: list[Any]
) -> None:
    """As a ReleaseWarning with its cause, whatever it was; the call itself is not disturbed."""
    PREPARE[operation](world)
    world.books.on_free = always(kind)
    BACKGROUND[operation](world)
    pool = world.pool
    eventually(lambda: world.sim.complete_all() or pool.stats.unreturned_bytes == 2 * CHUNK)
    pool.drain()
    assert len(unraisable) == len(pool.unreturned) == 2
    for told in unraisable:
        assert type(told) is growpool.ReleaseWarning
        assert type(told.__cause__) is kind
        assert "pool 'cell' raised" in str(told) and str(told).endswith(UNRETURNED)
    unraisable.clear()
    world.books.behave()
    assert pool.return_unreturned() == 2 * CHUNK
    pool.set_limit(None)
    if operation == "closing a growable":
        world.check_ends()
    else:
        world.check_works()
