# SPDX-License-Identifier: Apache-2.0
"""What a pool tries when memory is short, in which order, and how often it asks: the second promise
of the callback contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import growpool
import pytest
from helpers import MIB, PAGE, Supplier
from misbehaviour_kit import CHUNK, DEVICES, GROW, GROWTH, World

Pool = growpool.Pool
Chunk = growpool.Chunk

MOST_REFUSALS = 12


class Log:
    """Callbacks that write down every call; `refuses` says which alloc is refused."""

    def __init__(self) -> None:
        self.pool: Any = None
        self.calls: list[tuple[str, int]] = []
        self.out: list[Chunk] = []
        self.refuses: Callable[[int], bool] = lambda size: False
        self.refusals = 0

    def alloc(self, size: int, device: int, stream: int) -> Chunk | None:
        self.calls.append(("alloc", size))
        if self.refuses(size):
            self.refusals += 1
            return None
        self.out.append(Chunk.create(size, device))
        return self.out[-1]

    def free(self, chunk: Chunk, size: int, device: int, stream: int) -> None:
        self.calls.append(("free", size))
        self.out.remove(chunk)

    def sizes(self, name: str = "alloc") -> list[int]:
        """Of the calls of one name, in MiB."""
        return [size // MIB for call, size in self.calls if call == name]


@pytest.fixture
def log(sim: Any) -> Iterator[Log]:
    """A log around a pool of the simulated device, where gigabytes cost nothing."""
    log = Log()
    sim.set_memory(1 << 40)
    log.pool = Pool(sim.device, backing=log, name="short")
    yield log
    log.pool.close()
    assert log.out == []
    log.pool = None


def refused(log: Log, grow: Callable[[Any], Any]) -> growpool.OutOfMemoryError:
    """The growth fails for want of memory, and left nothing; the exception."""
    before = log.pool.stats
    out = list(log.out)
    log.calls.clear()
    log.refusals = 0
    with pytest.raises(growpool.OutOfMemoryError) as caught:
        grow(log.pool)
    assert type(caught.value) is growpool.OutOfMemoryError
    assert 1 <= log.refusals <= MOST_REFUSALS
    after = log.pool.stats
    assert log.out == [chunk for chunk in out if chunk in log.out]
    gone = sum(chunk.size for chunk in out if chunk not in log.out)
    assert (after.used_bytes, after.physical_bytes) == (
        before.used_bytes,
        before.physical_bytes - gone,
    )
    assert growpool._core._testing.check_pool(log.pool) == ""
    return caught.value


# ---- a limit that cannot be met ---------------------------------------------------------------


@DEVICES
@pytest.mark.parametrize("grow", GROW)
def test_a_limit_that_reclaiming_cannot_meet_is_an_error_at_once(world: World, grow: str) -> None:
    """Nothing is asked for, given back, or waited for: what is idle stays."""
    world.pool.free(world.pool.malloc(2 * CHUNK))
    idle = 2 * CHUNK
    held = world.pool.stats.physical_bytes
    world.pool.set_limit(held - idle + (GROWTH - 1) * CHUNK)
    limit = world.pool.limit
    before, stats = world.state(), world.pool.stats
    calls = (world.books.alloc_calls, world.books.free_calls)
    with pytest.raises(growpool.LimitExceededError) as caught:
        GROW[grow](world)
    assert world.state() == before
    assert (world.books.alloc_calls, world.books.free_calls) == calls
    assert world.pool.stats.wait_count == stats.wait_count
    assert world.pool.stats.trim_count == stats.trim_count
    error = caught.value
    wanted = (GROWTH + (grow == "resize")) * CHUNK
    assert (error.size, error.physical, error.limit) == (wanted, held, limit)
    assert error.largest_free == idle
    assert error.__cause__ is None
    for text in ("pool 'cell' has no room for", "20 MiB of physical", "under a limit of 24 MiB"):
        assert text in str(error)
    world.pool.set_limit(limit + CHUNK)
    GROW[grow](world)  # with one chunk more the idle ones are given back for it
    assert world.books.free_calls - calls[1] == (0 if grow in ("malloc", "allocate") else 2)
    world.pool.set_limit(None)
    world.check_works()


@pytest.mark.parametrize("limit", [0, PAGE, 7 * PAGE])
def test_more_than_the_whole_limit_asks_for_nothing(log: Log, limit: int) -> None:
    log.pool.set_limit(limit)
    growable, sparse = log.pool.growable(64 * PAGE), log.pool.range(64 * PAGE)
    spaces = log.pool.stats.address_bytes
    for grow in (
        lambda: log.pool.malloc(8 * PAGE),
        lambda: growable.resize(8 * PAGE),
        lambda: sparse.commit_many([(n * PAGE, PAGE) for n in range(0, 16, 2)]),
    ):
        with pytest.raises(growpool.LimitExceededError) as caught:
            grow()
        assert (caught.value.size, caught.value.limit) == (8 * PAGE, limit)
        assert ("smaller than one chunk" in str(caught.value)) == (limit == 0)
    assert log.calls == []
    assert log.pool.stats.address_bytes == spaces


def test_addresses_that_run_short_ask_for_nothing(sim: Any) -> None:
    log = Log()
    with Pool(sim.device, backing=log, address_space=8 * PAGE) as pool:
        with pytest.raises(growpool.AddressSpaceError):
            pool.malloc(9 * PAGE)
        assert log.calls == []


# ---- the rungs, in their order ----------------------------------------------------------------


def test_the_size_wanted_then_the_size_needed_then_halves(log: Log) -> None:
    """The growth step is given up first."""
    log.pool.malloc(512 * MIB)
    log.refuses = lambda size: True
    error = refused(log, lambda pool: pool.malloc(8 * MIB))
    assert log.sizes() == [32, 8, 8, 4, 2]
    assert (error.size, error.physical) == (8 * MIB, 512 * MIB)
    assert f"asked {log.refusals} times" in str(error)
    # A step that was refused does not cost the request, nor does one that is not wanted.
    log.refuses = lambda size: size > 8 * MIB
    log.calls.clear()
    log.pool.malloc(8 * MIB)
    assert log.sizes() == [32, 8]


def test_idle_chunks_go_back_before_chunks_are_halved(log: Log) -> None:
    """Oldest first, and the size needed is asked for again."""
    pool = log.pool
    for address in [pool.malloc(n * MIB) for n in (4, 6)]:
        pool.free(address)
    log.refuses = lambda size: True
    refused(log, lambda pool: pool.malloc(16 * MIB))
    calls = [(name, size // MIB) for name, size in log.calls]
    assert calls[0] == ("alloc", 6)  # beside the ten that are free already
    assert calls[1:4] == [("free", 4), ("free", 6), ("alloc", 16)]
    assert calls[4:] == [("alloc", size) for size in (16, 8, 4, 2)]


def test_idle_memory_is_given_back_before_out_of_memory(supplier: Supplier) -> None:
    def alloc(size: int, device: int, stream: int) -> Chunk | None:
        if supplier.out_bytes + size > 8 * PAGE:
            return None
        return supplier.alloc(size, device, stream)

    with Pool("host", alloc=alloc, free=supplier.free, chunk_size=2 * PAGE) as pool:
        pieces = [pool.allocate(2 * PAGE) for _ in range(4)]
        for piece in pieces[::2]:
            piece.close()
        pool.allocate(3 * PAGE)  # does not fit into either hole
        assert supplier.out_bytes <= 8 * PAGE


def test_memory_of_another_stream_is_waited_for_and_searched_before_halving(
    log: Log, sim: Any
) -> None:
    """Once its work is done the request is served from it, without another chunk.

    It lies in a chunk that is in use, so it cannot be given back instead.
    """
    pool, stream = log.pool, sim.stream()
    pool.free(pool.malloc(16 * MIB, stream))
    pool.malloc(2 * MIB, stream)
    address = pool.malloc(8 * MIB, stream)
    pool.malloc(6 * MIB, stream)
    sim.launch(stream, address, PAGE)
    pool.free(address)
    waits = pool.stats.wait_count
    log.refuses = lambda size: pool.stats.wait_count > waits or log.refusals < 1
    log.calls.clear()
    assert pool.malloc(6 * MIB) == address
    assert log.calls == [("alloc", 6 * MIB)]
    assert pool.stats.wait_count == waits + 1
    assert sim.work_all() == 0


def test_a_request_that_needs_no_chunk_asks_for_none(log: Log) -> None:
    pool = log.pool
    address = pool.malloc(64 * MIB)
    pool.free(address)
    log.calls.clear()
    log.refuses = lambda size: True
    for _ in range(3):
        pool.free(pool.malloc(48 * MIB))
    assert log.calls == []


# ---- how often it asks ------------------------------------------------------------------------


GIB = 1 << 30
SHAPES: dict[str, Callable[[Pool], Any]] = {
    "a page": lambda pool: pool.malloc(PAGE),
    "three pages": lambda pool: pool.malloc(3 * PAGE),
    "100 MiB": lambda pool: pool.malloc(100 * MIB),
    "128 MiB": lambda pool: pool.malloc(128 * MIB),
    "1 GiB": lambda pool: pool.malloc(GIB),
    "5 GiB and a byte": lambda pool: pool.malloc(5 * GIB + 1),
    "a growable": lambda pool: pool.growable(64 * GIB).resize(3 * GIB),
    "a range": lambda pool: pool.range(64 * GIB).commit(GIB, 2 * GIB),
    "200 holes": lambda pool: pool.range(64 * GIB).commit_many(
        [(2 * n * PAGE, PAGE) for n in range(200)]
    ),
    "holes of all sizes": lambda pool: pool.range(64 * GIB).commit_many(
        [(4 * n * n * PAGE, (2 * n + 1) * PAGE) for n in range(40)]
    ),
    "holes, the largest last": lambda pool: pool.range(64 * GIB).commit_many(
        [(0, PAGE), (GIB, 16 * PAGE), (8 * GIB, 3 * GIB)]
    ),
}


def refuse_all(log: Log) -> Callable[[int], bool]:
    return lambda size: True


def refuse_after(count: int) -> Callable[[Log], Callable[[int], bool]]:
    """Let so many chunks pass in all."""

    def make(log: Log) -> Callable[[int], bool]:
        start = len(log.calls)
        return lambda size: len(log.calls) - start > count

    return make


def refuse_every_second(log: Log) -> Callable[[int], bool]:
    return lambda size: len(log.calls) % 2 == 0


def refuse_beyond(most: int) -> Callable[[Log], Callable[[int], bool]]:
    """Have so many bytes in all."""
    return lambda log: lambda size: sum(chunk.size for chunk in log.out) + size > most


REFUSE: dict[str, Callable[[Log], Callable[[int], bool]]] = {
    "all": refuse_all,
    "after 1": refuse_after(1),
    "after 3": refuse_after(3),
    "after 150": refuse_after(150),
    "every second": refuse_every_second,
    "beyond 64 MiB": refuse_beyond(64 * MIB),
    "beyond 1 GiB": refuse_beyond(GIB),
}


# Thousands of chunks show nothing more, and holes are of pages.
PLANS = [(shape, None) for shape in SHAPES]
PLANS += [(shape, PAGE if "holes" in shape else 64 * MIB) for shape in SHAPES]


@pytest.mark.parametrize(
    ("shape", "chunk_size"), PLANS, ids=[f"{shape}-{chunk_size}" for shape, chunk_size in PLANS]
)
@pytest.mark.parametrize("refuse", REFUSE)
def test_a_growth_is_refused_at_most_twelve_times(
    one_sim: Any, shape: str, refuse: str, chunk_size: int | None
) -> None:
    """Whatever its shape, and beside idle memory, which goes back for it."""
    one_sim.set_memory(1 << 40)
    log = Log()
    with Pool(one_sim.device, backing=log, chunk_size=chunk_size) as pool:
        for address in [pool.malloc(size) for size in (PAGE, 40 * PAGE, 3 * PAGE)]:
            pool.free(address)
        given = len(log.sizes())
        log.refuses = REFUSE[refuse](log)
        try:
            SHAPES[shape](pool)
            served = True
        except growpool.OutOfMemoryError as error:
            served = False
            assert type(error) is growpool.OutOfMemoryError
            assert error.physical == pool.stats.physical_bytes
            assert f"asked {log.refusals} time" in str(error)
        assert log.refusals <= MOST_REFUSALS
        assert served or log.refusals > 0
        asked = len(log.sizes()) - given
        assert refuse != "all" or asked == log.refusals  # an attempt ends with the first refusal
        served_in = len(log.out)
        assert pool.stats.physical_bytes == sum(chunk.size for chunk in log.out)
        assert growpool._core._testing.check_pool(pool) == ""
        log.refuses = lambda size: False
        log.calls.clear()
        SHAPES[shape](pool)
        # There are five attempts at most, and each asks for every chunk of the growth once.
        assert asked <= MOST_REFUSALS + 5 * max(len(log.sizes()), served_in)
    assert log.out == []


def test_the_twelfth_refusal_is_the_last(log: Log, sim: Any) -> None:
    """Every rung asks in vain, and halving a gigabyte would take ten more."""
    pool, stream = log.pool, sim.stream()
    pool.free(pool.malloc(16 * MIB, stream))
    pool.malloc(MIB, stream)
    busy = pool.malloc(14 * MIB, stream)  # in a chunk that is in use before and behind it
    pool.malloc(MIB, stream)
    idle = pool.malloc(20 * MIB)
    sim.launch(stream, busy, PAGE)
    pool.free(busy)
    pool.free(idle)
    log.refuses = lambda size: True
    refused(log, lambda pool: pool.malloc(16 * GIB, stream))
    assert log.sizes("free") == [20]
    assert log.refusals == MOST_REFUSALS
    assert log.sizes() == [1024, 1024, 1024, *(1024 >> n for n in range(9))]


@pytest.mark.parametrize("idle", [0, 3])
@pytest.mark.parametrize("good", [0, 1, 62, 63])
def test_a_fixed_chunk_size_is_asked_for_once_for_each_attempt(
    sim: Any, good: int, idle: int
) -> None:
    """There is nothing to halve: without idle memory there is one attempt."""
    log = Log()
    with Pool(sim.device, backing=log, chunk_size=PAGE) as pool:
        sparse = pool.range(64 * PAGE)
        for address in [pool.malloc(PAGE) for _ in range(idle)]:
            pool.free(address)
        log.calls.clear()
        count = good

        def refuses(size: int) -> bool:
            nonlocal count
            count -= 1
            return count < 0

        log.refuses = refuses
        with pytest.raises(growpool.OutOfMemoryError):
            sparse.commit(0, 64 * PAGE)
        attempts = 2 if idle else 1
        assert log.refusals == attempts
        assert len(log.sizes()) == good + attempts
        assert len(log.sizes("free")) == good + idle
        assert (sparse.committed, log.out) == ([], [])


def test_a_cache_in_between_asks_no_more_often(sim: Any) -> None:
    """With something to give back it asks once more; then it is empty."""
    log = Log()
    caching = growpool.CachingBacking(log, keep="1 GiB")
    with Pool(sim.device, backing=caching) as pool:
        for size in (PAGE, 5 * PAGE, 9 * PAGE):
            pool.allocate(size).close()
            pool.trim()
        assert caching.cached_bytes == 15 * PAGE
        log.refuses = lambda size: True
        with pytest.raises(growpool.OutOfMemoryError):
            pool.malloc(100 * MIB)
        assert log.refusals <= MOST_REFUSALS + 1
        assert (caching.cached_bytes, log.out) == (0, [])


def test_what_the_error_says_is_free_is_free(log: Log, sim: Any) -> None:
    """The largest free range, whoever may use it."""
    pool, stream = log.pool, sim.stream()
    held = [pool.malloc(2 * MIB, stream) for _ in range(8)]
    for address in (held[2], held[5], held[6]):
        pool.free(address)
    log.refuses = lambda size: True
    with pytest.raises(growpool.OutOfMemoryError) as caught:
        pool.malloc(16 * MIB, stream)
    error = caught.value
    assert (error.size, error.limit) == (16 * MIB, None)
    assert error.physical == pool.stats.physical_bytes == sum(chunk.size for chunk in log.out)
    largest = max(
        [
            span["bytes"]
            for segment in pool.snapshot()["segments"]
            for span in segment["spans"]
            if span["state"] == "free"
        ],
        default=0,
    )
    assert error.largest_free == largest
