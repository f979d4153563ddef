# SPDX-License-Identifier: Apache-2.0
"""The callback contract: answers, exceptions, re-entry, frees that fail."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import growpool
import pytest
from helpers import PAGE, Supplier, eventually

Pool = growpool.Pool
Chunk = growpool.Chunk


def make(alloc: Callable[..., Any], supplier: Supplier, **options: Any) -> Pool:
    return Pool("host", alloc=alloc, free=supplier.free, name="odd", **options)


def check_unharmed(pool: Pool) -> None:
    """The pool is as it was before the failed call."""
    stats = pool.stats
    assert (stats.used_bytes, stats.physical_bytes, stats.chunk_count) == (0, 0, 0)
    assert pool.unreturned == []


# ---- wrong answers: the object stays the callback's ----


@pytest.mark.parametrize("answer", ["chunk", 7, [], object(), Chunk])
def test_an_answer_that_is_no_chunk(supplier: Supplier, answer: Any) -> None:
    with make(lambda *_: answer, supplier) as pool:
        with pytest.raises(TypeError, match=r"'odd' must return a growpool.Chunk or None, not"):
            pool.allocate(1000)
        check_unharmed(pool)


def test_a_chunk_of_another_size(supplier: Supplier) -> None:
    mine = Chunk.create(64 * PAGE, "host")
    with make(lambda *_: mine, supplier, chunk_size=PAGE) as pool:
        with pytest.raises(ValueError, match=rf"asked for {PAGE} bytes .* of {64 * PAGE} bytes"):
            pool.allocate(1000)
        check_unharmed(pool)
        assert not mine.is_in_use
        mine.close()


def test_a_closed_chunk(supplier: Supplier) -> None:
    def alloc(size: int, device: int, stream: int) -> Chunk:
        chunk = Chunk.create(size, device)
        chunk.close()
        return chunk

    with make(alloc, supplier) as pool, pytest.raises(ValueError, match="is closed"):
        pool.allocate(1000)


def test_a_chunk_of_another_device(sim: Any, supplier: Supplier) -> None:
    with make(lambda size, *_: Chunk.create(size, sim.device), supplier) as pool:
        with pytest.raises(ValueError, match=f"on {sim.device}, which is on another device"):
            pool.allocate(1000)
        check_unharmed(pool)
    gc.collect()
    assert sim.state.unreleased_count == 0


def test_a_chunk_that_a_pool_holds_already(supplier: Supplier) -> None:
    with Pool("host", backing=supplier) as owner:
        owner.allocate(1000)
        (held,) = supplier.out
        with make(lambda *_: held, supplier, chunk_size=held.size) as pool:
            with pytest.raises(ValueError, match="a pool holds already"):
                pool.allocate(1000)
            check_unharmed(pool)


def test_the_same_chunk_twice(supplier: Supplier) -> None:
    chunk = Chunk.create(PAGE, "host")

    def free(*_: Any) -> None:
        pass

    with Pool("host", alloc=lambda *_: chunk, free=free, chunk_size=PAGE) as pool:
        first = pool.allocate(PAGE)
        with pytest.raises(ValueError, match="a pool holds already"):
            pool.allocate(PAGE)
        first.close()
        pool.trim()
        pool.allocate(PAGE)  # given back, so it may be given again
    assert not chunk.is_in_use


def test_free_may_keep_close_or_forget_a_chunk() -> None:
    kept: list[Chunk] = []

    def free(chunk: Chunk, size: int, device: int, stream: int) -> None:
        assert not chunk.is_in_use
        if not kept:
            kept.append(chunk)
        else:
            chunk.close()

    with Pool("host", alloc=lambda s, d, _: Chunk.create(s, d), free=free, chunk_size=PAGE) as pool:
        pool.allocate(3 * PAGE)
    assert [chunk.is_closed for chunk in kept] == [False]


def test_free_gets_the_very_object_that_alloc_gave() -> None:
    given: list[int] = []
    taken: list[int] = []

    def alloc(size: int, device: int, stream: int) -> Chunk:
        chunk = Chunk.create(size, device)
        given.append(id(chunk))
        return chunk  # nobody but the pool keeps it

    with Pool("host", alloc=alloc, free=lambda c, *_: taken.append(id(c)), chunk_size=PAGE) as pool:
        pool.allocate(4 * PAGE)
        gc.collect()
    assert sorted(given) == sorted(taken)


# ---- no memory ----


def test_none_means_no_memory(supplier: Supplier) -> None:
    asked: list[int] = []

    def alloc(size: int, device: int, stream: int) -> None:
        asked.append(size)

    with make(alloc, supplier) as pool:
        with pytest.raises(growpool.OutOfMemoryError) as caught:
            pool.allocate(16 * PAGE)
        assert type(caught.value) is growpool.OutOfMemoryError
        assert caught.value.size == 16 * PAGE
        assert caught.value.limit is None
        assert caught.value.__cause__ is None
        check_unharmed(pool)
    assert 1 <= len(asked) <= 12


def test_memory_error_becomes_the_cause(supplier: Supplier) -> None:
    mine = MemoryError("the reserve is empty")

    def alloc(size: int, device: int, stream: int) -> Chunk:
        raise mine

    with make(alloc, supplier) as pool:
        with pytest.raises(growpool.OutOfMemoryError) as caught:
            pool.malloc(1000)
        assert caught.value.__cause__ is mine
        check_unharmed(pool)
        assert pool.stats.callback_errors == 0


def test_a_refusal_that_smaller_chunks_can_meet_is_met(supplier: Supplier) -> None:
    def alloc(size: int, device: int, stream: int) -> Chunk | None:
        if size > 2 * PAGE:
            raise MemoryError
        return supplier.alloc(size, device, stream)

    with make(alloc, supplier) as pool:
        kept = pool.allocate(8 * PAGE)
        assert pool.stats.used_bytes == kept.size


def test_idle_memory_is_given_back_before_out_of_memory(supplier: Supplier) -> None:
    def alloc(size: int, device: int, stream: int) -> Chunk | None:
        if supplier.out_bytes + size > 8 * PAGE:
            return None
        return supplier.alloc(size, device, stream)

    with make(alloc, supplier, chunk_size=2 * PAGE) as pool:
        pieces = [pool.allocate(2 * PAGE) for _ in range(4)]
        for piece in pieces[::2]:
            piece.close()
        pool.allocate(3 * PAGE)  # does not fit into either hole
        assert supplier.out_bytes <= 8 * PAGE


# ---- exceptions of alloc propagate unchanged ----


class Custom(BaseException):
    pass


@pytest.mark.parametrize(
    "kind", [ZeroDivisionError, KeyboardInterrupt, SystemExit, Custom, GeneratorExit]
)
def test_any_other_exception_reaches_the_caller(
    supplier: Supplier, kind: type[BaseException]
) -> None:
    mine = kind("mine")
    mine.note = "kept"  # type: ignore[attr-defined]

    def alloc(size: int, device: int, stream: int) -> Chunk:
        raise mine

    with make(alloc, supplier) as pool:
        for call in (pool.allocate, pool.malloc):
            with pytest.raises(kind) as caught:
                call(1000)
            assert caught.value is mine
            assert caught.value.__cause__ is None
            names = [entry.name for entry in caught.traceback]
            assert names[-1] == "alloc"
            check_unharmed(pool)
        assert pool.stats.callback_errors == 2


def test_an_exception_after_some_chunks_gives_those_back(supplier: Supplier) -> None:
    def alloc(size: int, device: int, stream: int) -> Chunk | None:
        if supplier.given == 3:
            raise ZeroDivisionError
        return supplier.alloc(size, device, stream)

    with make(alloc, supplier, chunk_size=PAGE) as pool:
        with pytest.raises(ZeroDivisionError):
            pool.allocate(5 * PAGE)
        check_unharmed(pool)
        assert (supplier.given, supplier.taken) == (3, 3)


def test_wrong_signatures_are_type_errors(supplier: Supplier) -> None:
    with (
        make(lambda: None, supplier) as pool,
        pytest.raises(TypeError, match="positional argument"),
    ):
        pool.allocate(1000)


# ---- re-entry ----


def test_operations_that_would_call_the_same_backing(supplier: Supplier) -> None:
    errors: dict[str, BaseException | None] = {}

    def attempt(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:
            errors[name] = error
        else:
            errors[name] = None

    def alloc(size: int, device: int, stream: int) -> Chunk | None:
        attempt("allocate", lambda: pool.allocate(64 * PAGE))
        attempt("malloc", lambda: pool.malloc(64 * PAGE))
        attempt("trim", pool.trim)
        attempt("drain", pool.drain)
        attempt("close", pool.close)
        attempt("return_unreturned", pool.return_unreturned)
        return supplier.alloc(size, device, stream)

    with make(alloc, supplier) as pool:
        pool.allocate(1000)
        assert set(errors) == {"allocate", "malloc", "trim", "drain", "close", "return_unreturned"}
        for name, error in errors.items():
            assert type(error) is RuntimeError, name
            assert "odd" in str(error)


def test_closing_inside_free_is_an_error_too(supplier: Supplier) -> None:
    caught: list[BaseException] = []

    def free(chunk: Chunk, size: int, device: int, stream: int) -> None:
        try:
            pool.close()
        except RuntimeError as error:
            caught.append(error)
        supplier.free(chunk, size, device, stream)

    pool = Pool("host", alloc=supplier.alloc, free=free)
    pool.allocate(1000)
    pool.close()
    assert len(caught) == 1
    assert pool.is_closed


def test_what_callbacks_may_do(supplier: Supplier) -> None:
    with Pool("host", name="other") as other:
        dropped: list[growpool.Buffer] = []

        def alloc(size: int, device: int, stream: int) -> Chunk | None:
            other.allocate(1000)  # another pool grows
            dropped.clear()  # buffers of this pool are freed
            gc.collect()
            assert pool.stats.used_bytes == 0
            assert repr(pool)
            assert pool.set_limit("1 GiB").limit == 1 << 30
            return supplier.alloc(size, device, stream)

        with make(alloc, supplier) as pool:
            dropped.append(pool.allocate(1000))
            pool.allocate(8 * PAGE)
            assert supplier.given == 2


def test_small_blocks_are_served_inside_a_callback_without_growing(supplier: Supplier) -> None:
    got: list[int] = []

    def alloc(size: int, device: int, stream: int) -> Chunk | None:
        if supplier.given >= 3:
            got.append(pool.malloc(512))
            pool.free(got[-1])
        return supplier.alloc(size, device, stream)

    with make(alloc, supplier, chunk_size=PAGE) as pool:
        first = pool.allocate(2 * PAGE)
        second = pool.allocate(PAGE)
        first.close()
        pool.allocate(8 * PAGE)
        assert got != []
        del second


# ---- free raises ----


class Failing(Supplier):
    """free raises while `error` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None

    def free(self, chunk: Chunk, size: int, device: int, stream: int) -> None:
        if self.error is not None:
            raise self.error
        super().free(chunk, size, device, stream)


@pytest.fixture
def failing() -> Failing:
    return Failing()


def test_a_free_that_raises_warns_and_keeps_the_chunk(failing: Failing) -> None:
    with Pool("host", backing=failing, name="stuck", chunk_size=PAGE) as pool:
        pool.allocate(3 * PAGE).close()
        failing.error = ZeroDivisionError("no")
        with pytest.warns(growpool.ReleaseWarning) as caught:
            pool.trim()
        assert len(caught) == 3
        message = str(caught[0].message)
        assert "stuck" in message
        assert "ZeroDivisionError('no')" in message
        assert "2.0 MiB" in message
        assert caught[0].filename == __file__
        assert sorted(map(id, pool.unreturned)) == sorted(map(id, failing.out))
        stats = pool.stats
        assert (stats.unreturned_bytes, stats.physical_bytes) == (3 * PAGE, 3 * PAGE)
        assert stats.callback_errors == 3
        with pytest.warns(growpool.ReleaseWarning):
            assert pool.return_unreturned() == 0
        failing.error = None
        assert pool.return_unreturned() == 3 * PAGE
        assert pool.unreturned == []
        assert failing.out == []
        assert pool.stats.physical_bytes == 0


def test_where_warnings_are_errors_the_warning_is_raised(failing: Failing) -> None:
    with Pool("host", backing=failing) as pool:
        pool.allocate(1000).close()
        failing.error = mine = ValueError("no")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(growpool.ReleaseWarning) as caught:
                pool.trim()
        assert caught.value.__cause__ is mine
        assert len(pool.unreturned) == 1
        failing.error = None
        pool.return_unreturned()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, Custom])
def test_other_base_exceptions_of_free_are_raised_at_the_end(
    failing: Failing, kind: type[BaseException]
) -> None:
    with Pool("host", backing=failing, chunk_size=PAGE) as pool:
        pool.allocate(2 * PAGE).close()
        failing.error = mine = kind("stop")
        with pytest.raises(kind) as caught:
            pool.trim()
        assert caught.value is mine
        assert len(pool.unreturned) == 2  # the rest of the operation was done
        assert pool.stats.retiring_bytes == 0
        failing.error = None
        pool.return_unreturned()


def test_close_finishes_although_free_raises(failing: Failing) -> None:
    pool = Pool("host", backing=failing, name="closing")
    pool.allocate(1000)
    failing.error = OSError("no")
    with pytest.warns(growpool.ReleaseWarning, match="closing"):
        pool.close()
    assert pool.is_closed
    assert len(pool.unreturned) == 1
    failing.error = None
    assert pool.return_unreturned() > 0
    assert failing.out == []


def test_a_raising_undo_is_reported_beside_the_first_error(failing: Failing) -> None:
    def alloc(size: int, device: int, stream: int) -> Chunk | None:
        if failing.given == 1:
            failing.error = OSError("undo")
            raise ZeroDivisionError
        return failing.alloc(size, device, stream)

    with Pool("host", alloc=alloc, free=failing.free, chunk_size=PAGE) as pool:
        with pytest.warns(growpool.ReleaseWarning), pytest.raises(ZeroDivisionError):
            pool.allocate(2 * PAGE)
        assert len(pool.unreturned) == 1
        failing.error = None
        pool.return_unreturned()


def test_a_free_that_raises_in_the_background_goes_to_the_unraisable_hook(
    failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        sys, "unraisablehook", lambda info: seen.append((info.exc_type, info.exc_value))
    )
    pool = Pool("host", backing=failing, name="behind")
    pool.allocate(1000).close()
    failing.error = mine = OSError("no")
    pool.trim(wait=False)
    eventually(lambda: seen)
    kind, value = seen[0]
    assert kind is growpool.ReleaseWarning
    assert value.__cause__ is mine
    assert "behind" in str(value)
    failing.error = None
    eventually(lambda: pool.unreturned)  # the pool hears of it after the hook did
    assert pool.return_unreturned() > 0
    pool.close()


def test_an_unreturned_chunk_is_still_the_pools(failing: Failing) -> None:
    with Pool("host", backing=failing) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore", growpool.ReleaseWarning)
        pool.allocate(1000).close()
        failing.error = OSError("no")
        pool.trim()
        (chunk,) = pool.unreturned
        assert chunk.is_in_use
        with pytest.raises(growpool.PoolStateError):
            chunk.close()
        failing.error = None
        pool.return_unreturned()
        assert not chunk.is_in_use


# ---- threads ----


def test_callbacks_run_detached_from_growpools_locks(supplier: Supplier) -> None:
    """While one thread sits in alloc, another uses the pool."""
    inside, leave = threading.Event(), threading.Event()

    def alloc(size: int, device: int, stream: int) -> Chunk | None:
        if size >= 8 * PAGE:
            inside.set()
            assert leave.wait(20)
        return supplier.alloc(size, device, stream)

    with make(alloc, supplier) as pool:
        thread = threading.Thread(target=lambda: pool.free(pool.malloc(32 * PAGE)))
        thread.start()
        assert inside.wait(20)
        other = pool.allocate(1000)
        other.close()
        assert pool.stats.used_bytes == 0
        assert pool.trim() >= 0
        leave.set()
        thread.join(20)
        assert not thread.is_alive()
