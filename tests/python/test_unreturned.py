# SPDX-License-Identifier: Apache-2.0
"""Chunks that free would not take: what they count for, how they are told of, and every way out.

That each call which gives back leaves them so is asserted in test_misbehaving_free.py.
"""

from __future__ import annotations

import gc
import subprocess
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import growpool
import pytest
from helpers import PAGE, Supplier, eventually, run_python

Pool = growpool.Pool
Chunk = growpool.Chunk


class Failing(Supplier):
    """free raises what `errors` says, one for each call; None takes the chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: Iterator[BaseException | None] = iter(())

    def free(self, chunk: Chunk, size: int, device: int, stream: int) -> None:
        error = next(self.errors, None)
        if error is not None:
            raise error.with_traceback(None)
        super().free(chunk, size, device, stream)

    def fail(self, *errors: BaseException | None) -> None:
        self.errors = iter(errors)


@pytest.fixture
def failing() -> Failing:
    return Failing()


def stuck(failing: Failing, device: str = "host", count: int = 4, **options: Any) -> Pool:
    """A pool with nothing but that many unreturned chunks of a page."""
    pool = Pool(device, backing=failing, chunk_size=PAGE, name="stuck", **options)
    for address in [pool.malloc(PAGE) for _ in range(count)]:
        pool.free(address)
    failing.fail(*(OSError(number) for number in range(count)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", growpool.ReleaseWarning)
        pool.trim()
    assert len(pool.unreturned) == count
    assert pool.stats.unreturned_bytes == pool.stats.physical_bytes == count * PAGE
    return pool


# ---- another try ------------------------------------------------------------------------------

RETRIES: dict[str, list[BaseException | None]] = {
    "all go": [None] * 4,
    "none goes": [OSError(number) for number in range(4)],
    "half of them go": [None, ValueError("a"), None, ValueError("b")],
    "interrupted": [None, KeyboardInterrupt("c"), None, None],
    "interrupted twice": [KeyboardInterrupt("d"), OSError("e"), None, SystemExit("f")],
    "no memory": [MemoryError("g"), None, MemoryError("h"), None],
}


@pytest.mark.parametrize("retry", RETRIES)
@pytest.mark.parametrize("state", ["open", "closed"])
def test_another_try(failing: Failing, retry: str, state: str) -> None:
    """All are tried, whatever becomes of the first; those that failed stay, and count."""
    pool = stuck(failing)
    if state == "closed":
        pool.close()
    trims, errors = pool.stats.trim_count, pool.stats.callback_errors
    outcomes = RETRIES[retry]
    failed = [error for error in outcomes if error is not None]
    others = [error for error in failed if not isinstance(error, Exception)]
    failing.fail(*outcomes)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if others:
            with pytest.raises(type(others[0])) as caught:
                pool.return_unreturned()
            assert caught.value is others[0]
        else:
            assert pool.return_unreturned() == (4 - len(failed)) * PAGE
    told = [entry.message.__cause__ for entry in seen]  # type: ignore[union-attr]
    assert told == [error for error in failed if error not in others[:1]]
    stats = pool.stats
    assert len(pool.unreturned) == len(failed) == len(failing.out)
    assert stats.unreturned_bytes == stats.physical_bytes == len(failed) * PAGE
    assert stats.trim_count - trims == 4 - len(failed)
    assert stats.callback_errors - errors == len(failed)
    assert growpool._core._testing.check_pool(pool) == ""
    failing.fail()
    assert pool.return_unreturned() == len(failed) * PAGE
    assert pool.return_unreturned() == 0
    assert (pool.unreturned, failing.out) == ([], [])
    assert pool.stats.physical_bytes == 0
    pool.close()


def test_many_threads_try_again_at_once(failing: Failing) -> None:
    pool = stuck(failing, count=32)
    start = threading.Barrier(8)
    returned: list[int] = []

    def work() -> None:
        start.wait()
        returned.append(pool.return_unreturned())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(returned) == 32 * PAGE
    assert (pool.unreturned, failing.out) == ([], [])
    pool.close()


def test_a_close_waits_for_another_threads_try(failing: Failing) -> None:
    pool = stuck(failing, count=1)
    inside, go = threading.Event(), threading.Event()
    take = failing._lock

    def slow() -> None:
        with take:
            inside.set()
            go.wait(20)

    holder = threading.Thread(target=slow)
    holder.start()
    inside.wait()
    thread = threading.Thread(target=pool.return_unreturned)
    thread.start()
    eventually(lambda: pool.unreturned == [])
    assert pool.stats.unreturned_bytes == PAGE  # on its way, and counted
    closer = threading.Thread(target=pool.close)
    closer.start()
    assert not pool.is_closed
    go.set()
    for one in (holder, thread, closer):
        one.join()
    assert pool.is_closed
    assert failing.out == []


def test_free_gets_the_same_object_again() -> None:
    """Though nobody but the pool kept it meanwhile."""
    made: list[weakref.ref[Chunk]] = []
    taken: list[Chunk] = []

    def alloc(size: int, device: int, stream: int) -> Chunk:
        chunk = Chunk.create(size, device)
        made.append(weakref.ref(chunk))
        return chunk

    def free(chunk: Chunk, size: int, device: int, stream: int) -> None:
        if failing:
            raise OSError
        taken.append(chunk)

    failing = True
    pool = Pool("host", alloc=alloc, free=free, chunk_size=PAGE)
    pool.malloc(3 * PAGE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", growpool.ReleaseWarning)
        pool.close()
        pool.return_unreturned()
    gc.collect()
    failing = False
    assert pool.return_unreturned() == 3 * PAGE
    assert sorted(map(id, taken)) == sorted(id(reference()) for reference in made)


# ---- what they count for ----------------------------------------------------------------------


def test_they_count_toward_the_limit(failing: Failing) -> None:
    pool = stuck(failing, limit=5 * PAGE)
    pool.malloc(PAGE)
    with pytest.raises(growpool.LimitExceededError) as caught:
        pool.malloc(PAGE)
    assert (caught.value.physical, caught.value.limit) == (5 * PAGE, 5 * PAGE)
    assert "chunks whose free failed count too, until return_unreturned" in str(caught.value)
    assert pool.set_limit(3 * PAGE).overage_bytes == 2 * PAGE
    pool.set_limit(5 * PAGE)
    assert pool.trim() == 0
    assert pool.return_unreturned() == 4 * PAGE
    pool.malloc(4 * PAGE)
    pool.close()
    assert failing.out == []


def test_they_are_the_pools_and_nobody_elses(failing: Failing) -> None:
    pool = stuck(failing)
    for chunk in pool.unreturned:
        assert chunk.is_in_use and "held by a pool" in repr(chunk)
        with pytest.raises(growpool.PoolStateError) as caught:
            chunk.close()
        assert caught.value.reason == "in_use"
        with pytest.raises(growpool.PoolStateError):
            growpool.DeviceBacking().free(chunk, PAGE, "host")
    assert sorted(map(id, pool.unreturned)) == sorted(map(id, failing.out))
    pool.return_unreturned()
    pool.close()


# ---- the end of the pool ----------------------------------------------------------------------


@pytest.mark.parametrize("way", ["close", "with block", "with block that raises"])
def test_a_close_leaves_them_where_they_are(failing: Failing, way: str) -> None:
    """And does not try again: nothing is raised or told a second time."""
    pool = stuck(failing)
    failing.fail(*[AssertionError("tried again")] * 4)
    if way == "close":
        pool.close()
        pool.close()
    elif way == "with block":
        with pool:
            pass
    else:
        with pytest.raises(ZeroDivisionError), pool:
            raise ZeroDivisionError
    assert pool.is_closed
    assert len(pool.unreturned) == 4
    assert pool.stats.unreturned_bytes == 4 * PAGE
    failing.fail()
    assert pool.return_unreturned() == 4 * PAGE
    assert pool.is_closed


@pytest.mark.parametrize("state", ["open", "closed"])
def test_a_pool_that_goes_lets_them_go(
    sim: Any, failing: Failing, state: str, unraisable: list[Any]
) -> None:
    """They are whose who has them then; memory that nobody has is released. free is not called."""
    pool = stuck(failing, sim.device)
    if state == "closed":
        pool.close()
    held = failing.out[:2]
    del failing.out[2:]
    failing.fail(*[AssertionError("tried again")] * 4)
    del pool
    gc.collect()
    eventually(lambda: sim.state.unreleased_count == 2)
    assert not any(chunk.is_in_use or chunk.is_closed for chunk in held)
    assert unraisable == []
    with Pool(sim.device, alloc=lambda *_: held[0], free=lambda *_: None, chunk_size=PAGE) as other:
        other.malloc(PAGE)
        assert held[0].is_in_use
    for chunk in held:
        chunk.close()
    assert sim.state.unreleased_count == 0


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt, SystemExit])
def test_a_pool_that_goes_and_cannot_give_back_tells_the_hook(
    sim: Any, failing: Failing, kind: type[BaseException], unraisable: list[Any]
) -> None:
    """Its finaliser calls nothing; the delivery thread does, and the chunks go with the pool."""
    pool = Pool(sim.device, backing=failing, chunk_size=PAGE, name="gone")
    for _ in range(3):
        pool.malloc(PAGE)
    failing.fail(*(kind(number) for number in range(3)))
    del pool
    gc.collect()
    eventually(lambda: len(unraisable) == 3)
    for told in unraisable:
        assert type(told) is growpool.ReleaseWarning
        assert type(told.__cause__) is kind
        assert "pool 'gone'" in str(told) and "2.0 MiB" in str(told)
    eventually(lambda: not any(chunk.is_in_use for chunk in failing.out))
    failing.out.clear()
    failing.fail()  # the exceptions refer to the frames of free
    unraisable.clear()
    del told
    gc.collect()
    eventually(lambda: sim.state.unreleased_count == 0)


# ---- telling ----------------------------------------------------------------------------------


def test_each_chunk_is_told_of_once_and_each_try_anew(failing: Failing) -> None:
    """Under Python's own filters, at one line; the texts differ by the chunk's number."""
    pool = Pool("host", backing=failing, chunk_size=PAGE, name="told")
    for address in [pool.malloc(PAGE) for _ in range(3)]:
        pool.free(address)
    told = []
    for call in (pool.trim, pool.return_unreturned, pool.return_unreturned):
        failing.fail(*(OSError("no") for _ in range(3)))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("default")
            call()
        told.append(sorted(str(entry.message) for entry in seen))
        assert len(set(told[-1])) == 3
        assert {entry.filename for entry in seen} == {__file__}
        assert pool.trim() == 0  # tells nobody of those that are known
    assert told[0] == told[1] == told[2]
    failing.fail()
    pool.return_unreturned()
    pool.close()


def test_an_exception_that_cannot_be_shown_is_named_by_its_type(failing: Failing) -> None:
    class Shy(Exception):
        def __repr__(self) -> str:
            raise ZeroDivisionError

    pool = Pool("host", backing=failing, name="shown")
    pool.free(pool.malloc(1))
    failing.fail(Shy())
    with pytest.warns(growpool.ReleaseWarning) as caught:
        pool.trim()
    (warning,) = caught
    assert type(warning.message.__cause__) is Shy  # type: ignore[union-attr]
    assert str(warning.message).startswith("the free of pool 'shown' raised Shy for chunk ")
    assert "of 2.0 MiB; the chunk is in unreturned" in str(warning.message)
    pool.return_unreturned()
    pool.close()


def test_an_interrupt_while_an_exception_is_shown_is_raised(failing: Failing) -> None:
    """It is not the exception's to swallow; the warning, with the cause, comes all the same."""

    class Slow(Exception):
        def __repr__(self) -> str:
            raise KeyboardInterrupt("meanwhile")

    pool = Pool("host", backing=failing)
    pool.free(pool.malloc(1))
    failing.fail(Slow())
    with (
        pytest.warns(growpool.ReleaseWarning, match="raised Slow for chunk"),
        pytest.raises(KeyboardInterrupt, match="meanwhile"),
    ):
        pool.trim()
    assert pool.return_unreturned() == PAGE
    pool.close()


def test_a_free_that_takes_other_arguments(sim: Any) -> None:
    made: list[Chunk] = []

    def alloc(size: int, device: int, stream: int) -> Chunk:
        made.append(Chunk.create(size, device))
        return made[-1]

    pool = Pool(sim.device, alloc=alloc, free=lambda chunk: None)
    pool.malloc(1)
    with pytest.warns(growpool.ReleaseWarning, match="takes 1 positional argument but 4 were"):
        pool.close()
    assert pool.unreturned == made
    del pool
    eventually(lambda: not made[0].is_in_use)
    made.clear()


SCENARIO = """
import growpool, warnings
{filters}
def free(*args):
    raise ZeroDivisionError("no")
pool = growpool.Pool("host", alloc=lambda size, device, stream: growpool.Chunk.create(size, device),
                     free=free, chunk_size=2 << 20, name="told")
pool.free(pool.malloc(2 << 20)); pool.free(pool.malloc(4 << 20))
pool.trim()
print(len(pool.unreturned), flush=True)
del pool
"""


def run(filters: str) -> subprocess.CompletedProcess[str]:
    return run_python(SCENARIO.format(filters=filters))


def test_as_a_program_sees_it() -> None:
    """Under -W error the first ends the program, the second goes to the hook; by default both are
    printed once, with what to do."""
    strict = run("")
    assert strict.returncode == 1
    assert strict.stderr.count("growpool._errors.ReleaseWarning: the free of pool 'told'") == 2
    assert strict.stderr.count("Exception ignored in") == 1
    assert "ZeroDivisionError: no\n\nThe above exception was the direct cause" in strict.stderr
    mild = run("warnings.simplefilter('default')")
    assert (mild.returncode, mild.stdout) == (0, "2\n")
    assert mild.stderr.count("ReleaseWarning: the free of pool 'told'") == 2
    assert mild.stderr.count("then call return_unreturned()") == 2
    assert "Exception ignored" not in mild.stderr


# ---- chunks that free handed on before it raised ----


@pytest.mark.parametrize("own", [True, False], ids=["its own pool", "another pool"])
def test_a_chunk_that_an_alloc_has_just_answered_with_is_not_unreturned(
    sim: Any, own: bool
) -> None:
    """alloc is back, and the pool that asked has not taken the chunk yet, when free raises."""
    shelf: list[Chunk] = []
    blocks: list[int] = []
    late = threading.Thread(target=lambda: blocks.append(taker.malloc(PAGE)))

    def alloc(size: int, device: int, stream: int) -> Chunk:
        if not shelf:
            return Chunk.create(size, device)
        sim.stop_at("leave")
        return shelf.pop()

    def free(chunk: Chunk, *request: int) -> None:
        if late.ident is None:
            shelf.append(chunk)
            late.start()
            eventually(sim.is_stopped)
            raise OSError("late")

    giver = Pool(sim.device, alloc=alloc, free=free, chunk_size=PAGE)
    taker = giver if own else Pool(sim.device, alloc=alloc, free=free, chunk_size=PAGE)
    giver.free(giver.malloc(PAGE))
    with pytest.warns(growpool.ReleaseWarning, match="another pool has taken the chunk"):
        giver.trim()
    assert sim.go_on()
    late.join(20)
    assert len(blocks) == 1 and giver.unreturned == taker.unreturned == []
    assert taker.stats.physical_bytes == PAGE
    assert own or giver.stats.physical_bytes == 0
    taker.free(blocks[0])
    taker.trim()
    giver.close()
    taker.close()
