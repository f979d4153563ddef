# SPDX-License-Identifier: Apache-2.0
"""Promise 1: how callbacks are called, and that nothing that may block holds the interpreter.

Every test on the simulated device watches the second half anyway: a driver call that may block,
made with the interpreter held, is a violation there. Here each such call is made to block, from
everything in Python that leads to it, while another thread runs.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import growpool
import pytest
from helpers import PAGE, Supplier, eventually, run_python, run_quietly

Pool = growpool.Pool
Chunk = growpool.Chunk
SUPPORT = Path(__file__).resolve().parents[1] / "support"


class Lab:
    """A simulated device, a pool on it with Python callbacks, and what a scenario has to end."""

    def __init__(self, sim: Any) -> None:
        self.sim = sim
        self.supplier = Supplier()
        self.kept = contextlib.ExitStack()

    def pool(self, **options: Any) -> Pool:
        options.setdefault("backing", self.supplier)
        return self.kept.enter_context(Pool(self.sim.device, chunk_size=PAGE, **options))

    def idle(self, **options: Any) -> Pool:
        """A pool with four idle chunks that a stream still uses."""
        pool, stream = self.pool(**options), self.sim.stream()
        with pool.allocate(4 * PAGE, stream) as buffer:
            self.sim.launch(stream, buffer.handle, 4 * PAGE)
        return pool

    def exported(self) -> Pool:
        """A pool with an idle chunk that was exported: only a whole context's fence covers it."""
        pool = self.pool()
        with pool.allocate(PAGE) as buffer:
            buffer.__dlpack__(stream=-1)
        return pool

    def buffer(self) -> growpool.Buffer:
        return self.pool().allocate(PAGE, self.sim.stream())

    def chunk(self, **options: Any) -> Chunk:
        return Chunk.create(PAGE, self.sim.device, **options)

    def descriptor(self) -> int:
        descriptor = self.chunk(handle_type="posix_fd").export_fd()
        self.kept.callback(os.close, descriptor)
        return descriptor

    def captured(self) -> tuple[Pool, int]:
        pool, stream = self.pool(), self.sim.stream()
        self.sim.capture_begin(stream, 0)
        self.kept.callback(self.sim.capture_end, stream)
        return pool, stream


Operation = Callable[[], object]


def drop(objects: list[Any]) -> Operation:
    """Lets go of the last reference to what the list holds."""
    return objects.clear


def caching(lab: Lab) -> Operation:
    backing = growpool.CachingBacking(growpool.DeviceBacking(), keep="1 GiB")
    backing.free(lab.chunk(), PAGE, lab.sim.device_id)
    return backing.trim


def alloc_in_c(lab: Lab) -> Operation:
    return lambda: growpool.DeviceBacking().alloc(PAGE, lab.sim.device_id)


def free_in_c(lab: Lab) -> Operation:
    chunks = [lab.chunk()]
    return lambda: growpool.DeviceBacking().free(chunks.pop(), PAGE, lab.sim.device_id)


def shrink(lab: Lab) -> Operation:
    grown = lab.pool().growable(8 * PAGE)
    grown.resize(4 * PAGE)
    return lambda: grown.resize(PAGE)


def decommit(lab: Lab) -> Operation:
    sparse = lab.pool().range(8 * PAGE)
    sparse.commit(0, 4 * PAGE)
    return lambda: sparse.decommit(0, 4 * PAGE)


def at_the_limit(lab: Lab) -> Operation:
    """The pool has to give idle memory back first."""
    pool = lab.idle(limit=4 * PAGE)
    return lambda: pool.malloc(2 * PAGE, lab.sim.stream())


def forget(lab: Lab) -> Operation:
    pool, stream = lab.pool(), lab.sim.stream()
    address = pool.malloc(PAGE, stream)
    lab.sim.launch(stream, address, PAGE)
    pool.free(address)
    return lambda: pool.forget_stream(stream)


def capture(lab: Lab) -> Operation:
    pool, stream = lab.captured()
    return lambda: pool.allocate(PAGE, stream).close()


def copied(lab: Lab, method: str) -> Operation:
    pool = lab.pool()
    one, two = pool.allocate(PAGE), pool.allocate(PAGE)
    return lambda: one.fill(7) if method == "fill" else getattr(one, method)(two)


PER_THREAD = 2  # CUDA's handle for the calling thread's own default stream

# What ends the use of memory on that stream records an event at once.
ENDS: dict[str, Callable[[Pool], object]] = {
    "free": lambda pool: pool.free(pool.malloc(PAGE, PER_THREAD)),
    "free on it": lambda pool: pool.free(pool.malloc(PAGE), PER_THREAD),
    "Buffer.close": lambda pool: pool.allocate(PAGE, PER_THREAD).close(),
    "a buffer dropped": lambda pool: [pool.allocate(PAGE, PER_THREAD)].clear(),
    "an export dropped": lambda pool: [pool.allocate(PAGE, PER_THREAD).__dlpack__()].clear(),
    "Range.close": lambda pool: committed(pool).close(),
    "a range dropped": lambda pool: [committed(pool)].clear(),
}


def committed(pool: Pool) -> growpool.Range:
    sparse = pool.range(2 * PAGE, stream=PER_THREAD)
    sparse.commit(0, PAGE)
    return sparse


def on_its_own_stream(lab: Lab, end: str) -> Operation:
    """The thread that runs it is the one whose stream it is."""
    pool = lab.pool()
    return lambda: ENDS[end](pool)


def exit_block(lab: Lab) -> Operation:
    pool = lab.idle()
    return lambda: pool.__exit__(None, None, None)


# Every driver call that may block, and what leads to it from Python.
TABLE: dict[str, dict[str, Callable[[Lab], Operation]]] = {
    "memory_info": {"Pool": lambda lab: lab.pool},
    "can_access": {"Pool with peers": lambda lab: partial(lab.pool, peers=["sim:998"])},
    "reserve": {
        "malloc": lambda lab: partial(lab.pool().malloc, PAGE),
        "growable": lambda lab: partial(lab.pool().growable, 4 * PAGE),
        "range": lambda lab: partial(lab.pool().range, 4 * PAGE),
    },
    "free_address": {"close": lambda lab: lab.idle().close, "__exit__": exit_block},
    "create": {
        "malloc, callbacks in Python": lambda lab: partial(lab.pool().malloc, PAGE),
        "malloc, a backing in C": lambda lab: partial(lab.pool(backing=None).malloc, PAGE),
        "Chunk.create": lambda lab: lab.chunk,
        "DeviceBacking.alloc": alloc_in_c,
    },
    "release": {
        "Chunk.close": lambda lab: lab.chunk().close,
        "a chunk dropped": lambda lab: drop([lab.chunk()]),
        "trim, callbacks in Python": lambda lab: lab.idle().trim,
        "trim, a backing in C": lambda lab: lab.idle(backing=None).trim,
        "DeviceBacking.free": free_in_c,
        "CachingBacking.trim": caching,
    },
    "export_fd": {"export_fd": lambda lab: lab.chunk(handle_type="posix_fd").export_fd},
    "import_fd": {
        "from_fd": lambda lab: partial(Chunk.from_fd, lab.descriptor(), PAGE, lab.sim.device)
    },
    "map": {
        "allocate": lambda lab: partial(lab.pool().allocate, PAGE),
        "resize": lambda lab: partial(lab.pool().growable(4 * PAGE).resize, 2 * PAGE),
        "commit": lambda lab: partial(lab.pool().range(4 * PAGE).commit, 0, PAGE),
        "commit_many": lambda lab: partial(lab.pool().range(4 * PAGE).commit_many, [(0, PAGE)]),
    },
    "set_access": {"malloc": lambda lab: partial(lab.pool().malloc, PAGE)},
    "unmap": {
        "trim": lambda lab: lab.idle().trim,
        "close": lambda lab: lab.idle().close,
        "__exit__": exit_block,
        "resize": shrink,
        "decommit": decommit,
        "malloc at the limit": at_the_limit,
    },
    "event_create": {"trim": lambda lab: lab.idle().trim, "forget_stream": forget},
    "event_record": {
        "trim": lambda lab: lab.idle().trim,
        "close": lambda lab: lab.idle().close,
        "forget_stream": forget,
        "malloc at the limit": at_the_limit,
        **{end: partial(on_its_own_stream, end=end) for end in ENDS},
    },
    "event_record_context": {"trim": lambda lab: lab.exported().trim},
    "event_wait": {
        "trim": lambda lab: lab.idle().trim,
        "close": lambda lab: lab.idle().close,
        "forget_stream": forget,
        "malloc at the limit": at_the_limit,
    },
    "event_destroy": {"close": lambda lab: lab.idle().close},
    "copy": {
        "copy_to": lambda lab: copied(lab, "copy_to"),
        "copy_from": lambda lab: copied(lab, "copy_from"),
    },
    "fill": {"fill": lambda lab: copied(lab, "fill")},
    "stream_wait": {
        "__dlpack__": lambda lab: partial(lab.buffer().__dlpack__, stream=lab.sim.stream())
    },
    "capture_keep": {"allocate in a capture": capture},
}
CELLS = [(call, operation) for call in TABLE for operation in TABLE[call]]


@pytest.fixture
def counting(sim: Any) -> Iterator[Any]:
    """A simulated device whose violations fail the test, and do not end the process."""
    sim.count_violations(True)
    yield sim
    sim.complete_all()


def run_while_stopped(sim: Any, call: str, operation: Operation) -> None:
    """While a thread stands inside the driver, this one runs, and that takes the interpreter."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            operation()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    sim.stop_at(call)
    thread.start()
    try:
        eventually(sim.is_stopped, 15)
    finally:
        stood = sim.go_on()
        thread.join(20)
    assert stood, "the thread did not wait for this one, so this one never ran beside it"
    assert not thread.is_alive()
    assert failures == []


@pytest.mark.parametrize(("call", "operation"), CELLS, ids=[f"{c}-{o}" for c, o in CELLS])
def test_another_thread_runs_while_a_driver_call_blocks(
    counting: Any, call: str, operation: str
) -> None:
    lab = Lab(counting)
    with lab.kept:
        run_while_stopped(counting, call, TABLE[call][operation](lab))


def test_the_table_has_every_driver_call_that_may_block() -> None:
    pattern = re.compile(r'(?:kind = )?\{"(\w+)", true,')
    named = {
        name
        for source in SUPPORT.glob("sim*.c")
        for name in pattern.findall(source.read_text(encoding="utf-8"))
    }
    assert set(TABLE) == named


def test_a_blocking_call_with_the_interpreter_held_is_reported(counting: Any) -> None:
    """The watch itself: without it the rest of this file could pass for nothing."""
    counting.call_attached()
    count, text = counting.violations()
    assert count == 1
    assert "the interpreter is held" in text
    counting.forget_violations()


@pytest.mark.parametrize("make", [committed, lambda pool: pool.allocate(PAGE, PER_THREAD)])
def test_what_is_finalised_while_its_close_stands_in_the_driver_ends_once(
    sim: Any, supplier: Supplier, make: Callable[[Pool], Any]
) -> None:
    """By a program that calls finalisers itself, on another thread; the pool's too."""
    pool = Pool(sim.device, backing=supplier, chunk_size=PAGE)
    made: list[Any] = []

    def work() -> None:
        made.append(make(pool))
        sim.stop_at("event_record")
        made[0].close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        eventually(sim.is_stopped, 15)
        made[0].__del__()
        pool.__del__()  # type: ignore[attr-defined]
    finally:
        sim.go_on()
        thread.join(20)
    assert made[0].is_closed
    eventually(lambda: supplier.out == [])
    eventually(lambda: sim.state.reservation_count == 0)


def test_an_export_is_let_go_without_the_interpreter_beside_a_subinterpreter() -> None:
    """Once there was one, PyGILState_Check() says to every thread that it has the interpreter."""
    run_quietly(
        f"""
        try:
            import _interpreters as interpreters
        except ImportError:
            import _xxsubinterpreters as interpreters
        interpreters.create()
        import growpool
        from dlpack_reader import Taken
        with growpool.Pool("sim:1") as pool:
            taken = Taken(pool.allocate({PAGE}, {PER_THREAD}).__dlpack__(stream=-1))
            taken.delete()
            assert pool.stats.used_bytes == 0
        """
    )


# ---- locks ----


def test_a_lock_held_on_the_way_into_python_is_reported() -> None:
    """The witness stands at every entry, so the suite proves that no callback runs under one."""
    ended = run_python("import growpool; growpool._core._testing.enter_under_a_lock()")
    assert ended.returncode == -signal.SIGABRT
    assert "lock witness: calling out while holding rank 30" in ended.stderr


# ---- the context and the capture mode around callbacks ----


class Watched(Supplier):
    """Callbacks that note whether their device's context was current."""

    def __init__(self, sim: Any) -> None:
        super().__init__()
        self.sim = sim
        self.seen: list[tuple[str, bool | None]] = []

    def note(self, what: str) -> None:
        self.seen.append((what, self.sim.is_current()))

    def alloc(self, size: int, device: int, stream: int) -> Chunk | None:
        self.note("alloc")
        chunk = super().alloc(size, device, stream)
        self.note("alloc")
        return chunk

    def free(self, chunk: Chunk, size: int, device: int, stream: int) -> None:
        self.note("free")
        super().free(chunk, size, device, stream)

    def check(self) -> None:
        assert {what for what, _ in self.seen} == {"alloc", "free"}
        assert all(current is True for _, current in self.seen), self.seen


def grow_and(pool: Pool, step: str, sim: Any) -> None:
    buffer = pool.allocate(2 * PAGE, sim.stream())
    if step == "trim":
        buffer.close()
        pool.trim()
    elif step == "the delivery thread":
        buffer.close()
        pool.trim(wait=False)
        eventually(lambda: (sim.complete_all(), pool.stats.physical_bytes == 0)[1])
    elif step == "resize":
        with pool.growable(8 * PAGE) as grown:
            grown.resize(4 * PAGE)
            grown.resize(0)
    elif step == "set_limit":
        buffer.close()
        pool.set_limit(0)
        eventually(lambda: (sim.complete_all(), pool.stats.physical_bytes == 0)[1])
    elif step == "at the limit":
        pool.set_limit(4 * PAGE)
        buffer.close()
        pool.allocate(4 * PAGE, sim.stream()).close()
    pool.close()


STEPS = ["trim", "the delivery thread", "resize", "set_limit", "at the limit", "close"]


@pytest.mark.parametrize("step", STEPS)
def test_callbacks_run_with_the_context_current_and_it_is_restored(sim: Any, step: str) -> None:
    """On the simulated device a current context comes with the relaxed capture mode."""
    watched = Watched(sim)
    pool = Pool(sim.device, backing=watched, chunk_size=PAGE)
    assert sim.is_current() is None
    grow_and(pool, step, sim)
    assert sim.is_current() is None
    watched.check()
    assert watched.out == []


def test_backings_called_from_python_keep_the_contract_too(sim: Any) -> None:
    watched = Watched(sim)
    backing = growpool.CachingBacking(watched, keep=0)
    chunk = backing.alloc(PAGE, sim.device_id)
    assert sim.is_current() is None
    backing.free(chunk, PAGE, sim.device_id)
    assert sim.is_current() is None
    watched.check()


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (None, TypeError),
        (MemoryError(), growpool.OutOfMemoryError),
        (KeyError("mine"), KeyError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_the_context_is_restored_whatever_a_callback_does(
    sim: Any, error: BaseException | None, raised: type[BaseException]
) -> None:
    def alloc(size: int, device: int, stream: int) -> Any:
        assert sim.is_current() is True
        if error is not None:
            raise error
        return "no chunk"

    with Pool(sim.device, alloc=alloc, free=lambda *_: None) as pool:
        with pytest.raises(raised):
            pool.malloc(PAGE)
        assert sim.is_current() is None


def test_another_devices_pool_inside_a_callback_has_its_own_context(sims: list[Any]) -> None:
    outer, inner = sims[:2]
    order: list[tuple[bool | None, bool | None]] = []

    def alloc_inner(size: int, device: int, stream: int) -> Chunk:
        order.append((outer.is_current(), inner.is_current()))
        return Chunk.create(size, device)

    def alloc_outer(size: int, device: int, stream: int) -> Chunk:
        order.append((outer.is_current(), inner.is_current()))
        other.free(other.malloc(PAGE))
        other.trim()
        order.append((outer.is_current(), inner.is_current()))
        return Chunk.create(size, device)

    with (
        Pool(inner.device, alloc=alloc_inner, free=lambda *_: None) as other,
        Pool(outer.device, alloc=alloc_outer, free=lambda *_: None) as pool,
    ):
        pool.malloc(PAGE)
    assert order == [(True, False), (False, True), (True, False)]
    assert (outer.is_current(), inner.is_current()) == (None, None)


def test_a_capture_of_the_callers_thread_survives_what_a_callback_asks(sim: Any) -> None:
    """A query under the thread's own mode would invalidate it: callbacks run in relaxed mode."""
    busy, captured = sim.stream(), sim.stream()

    def alloc(size: int, device: int, stream: int) -> Chunk:
        other.trim()  # queries and waits for `busy`
        return Chunk.create(size, device)

    with Pool(sim.device) as other, Pool(sim.device, alloc=alloc, free=lambda *_: None) as pool:
        address = other.malloc(PAGE, busy)
        sim.launch(busy, address, PAGE)
        other.free(address)
        sim.capture_begin(captured, 0)  # global: any thread's query counts
        pool.malloc(PAGE)
        assert sim.capture_end(captured)
        assert other.stats.physical_bytes == 0
    gc.collect()
