# SPDX-License-Identifier: Apache-2.0
"""The demo: one pool's life in seven steps, each shown as a picture and checked.

It uses nothing but the public API, so it is also a worked example of it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import growpool

if TYPE_CHECKING:
    from growpool._core import _SpanInfo

MIB = 1 << 20
ROW_CELLS = 64
# For each state of a span: its cell, the same for terminals without Unicode, and its colour.
CELLS = {
    "used": ("█", "#", "green"),
    "free": ("░", "-", "cyan"),
    "claimed": ("▓", "+", "yellow"),
    "retiring": ("▒", "~", "magenta"),
    "abandoned": ("×", "x", "red"),
    "hole": ("·", ".", "bright_black"),
}


class DemoFailure(Exception):
    """A check of the demo did not hold."""


def check(holds: bool, claim: str) -> None:
    """Raise `DemoFailure` unless the claim holds."""
    if not holds:
        raise DemoFailure(f"this should hold and does not: {claim}")


def size_text(nbytes: int) -> str:
    """Bytes for people: whole MiB where they are whole."""
    return f"{nbytes // MIB} MiB" if nbytes % MIB == 0 else f"{nbytes / MIB:.2f} MiB"


# ---- the screen ----------------------------------------------------------------------------------


class Screen:
    """Prints lines of styled pieces: through rich where it can be imported, else as plain text."""

    def __init__(self) -> None:
        encoding = (sys.stdout.encoding or "ascii").replace("-", "").lower()
        self.unicode = encoding.startswith("utf")
        self._steps = 0
        self._write: Callable[[list[tuple[str, str]]], None] = self._plain
        with contextlib.suppress(ImportError):
            self._write = self._rich()

    @staticmethod
    def _plain(pieces: list[tuple[str, str]]) -> None:
        print("".join(text for text, _ in pieces), flush=True)

    @staticmethod
    def _rich() -> Callable[[list[tuple[str, str]]], None]:
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False, soft_wrap=True)
        return lambda pieces: console.print(Text.assemble(*pieces))

    def say(self, text: str, style: str = "") -> None:
        """Print one line."""
        self._write([(text, style)])

    def step(self, title: str) -> None:
        """Print the heading of the next step."""
        self._steps += 1
        self.say("")
        self.say(f"{self._steps}. {title}", "bold")

    def row(self, states: list[str], tail: str) -> None:
        """Print one cell for each state, then the tail."""
        column = 0 if self.unicode else 1
        cells = [(CELLS[state][column], CELLS[state][2]) for state in states]
        self._write([("   ", ""), *cells, (tail, "bright_black")])

    def legend(self, cell_bytes: int) -> None:
        """Explain the cells."""
        column = 0 if self.unicode else 1
        pieces = [(f"   one cell is {size_text(cell_bytes)}: ", "")]
        for state in ("used", "free", "retiring", "hole"):
            pieces += [(CELLS[state][column], CELLS[state][2]), (f" {state}  ", "")]
        self._write(pieces)


def segment_cells(spans: list[_SpanInfo], cell_bytes: int) -> list[str]:
    """Return the state of each cell: that of the span with the largest part in it.

    The row ends with the last span that holds memory, or after `ROW_CELLS` cells.
    """
    backed = [span for span in spans if span["state"] != "hole"]
    if not backed:
        return []
    start = spans[0]["address"]
    end = backed[-1]["address"] + backed[-1]["bytes"]
    cells: list[str] = []
    for low in range(start, min(end, start + ROW_CELLS * cell_bytes), cell_bytes):
        high = low + cell_bytes

        def part(span: _SpanInfo, low: int = low, high: int = high) -> int:
            first, last = span["address"], span["address"] + span["bytes"]
            return min(last, high) - max(first, low)

        cells.append(max(spans, key=part)["state"])
    return cells


def show(screen: Screen, pool: growpool.Pool, cell_bytes: int) -> None:
    """Print the pool's memory as a row of cells for each segment, and its figures."""
    rows = [segment_cells(s["spans"], cell_bytes) for s in pool.snapshot()["segments"]]
    if not any(rows):
        screen.say("   (no memory)", "bright_black")
    for cells in rows:
        if cells:
            screen.row(cells, " ...")
    stats = pool.stats
    figures = (
        f"used {size_text(stats.used_bytes)}, free {size_text(stats.free_bytes)}, "
        f"physical {size_text(stats.physical_bytes)}"
    )
    if stats.retiring_bytes:
        figures += f" (retiring {size_text(stats.retiring_bytes)})"
    limit = "none" if stats.limit is None else size_text(stats.limit)
    screen.say(f"   {figures}, limit {limit}, chunks {stats.chunk_count}")


# ---- the supplier: the two callbacks -------------------------------------------------------------


class Supplier:
    """Makes chunks on request, takes them back, and tells of both. It may run on any thread."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._lock = threading.Lock()
        self.out: list[growpool.Chunk] = []
        self.made = 0
        self.taken_back = 0

    def alloc(self, size: int, device: int, stream: int) -> growpool.Chunk:
        """Make a chunk of exactly `size` bytes."""
        chunk = growpool.Chunk.create(size, device)
        with self._lock:
            self.out.append(chunk)
            self.made += 1
        self._screen.say(f"   -> alloc({size_text(size)}, device={device})", "yellow")
        return chunk

    def free(self, chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
        """Take a chunk back; dropping the last reference releases its memory."""
        with self._lock:
            self.out.remove(chunk)
            self.taken_back += 1
        self._screen.say(f"   <- free({size_text(size)}, device={device})", "yellow")

    @property
    def out_bytes(self) -> int:
        """Bytes of all chunks that are out."""
        with self._lock:
            return sum(chunk.size for chunk in self.out)


# ---- work on streams -----------------------------------------------------------------------------


class Work(Protocol):
    """What the demo does with memory; one implementation for each kind of device."""

    unit: int

    def stream(self) -> Any:
        """Make a stream."""

    def fill(self, stream: Any, buffer: growpool.Buffer, value: int) -> None:
        """Enqueue: every byte of the buffer becomes `value`."""

    def check(self, stream: Any, buffer: growpool.Buffer, value: int) -> None:
        """Check that every byte of the buffer is `value`."""

    def begin_slow(self, stream: Any, buffer: growpool.Buffer) -> None:
        """Enqueue work on the buffer that is still running when this returns."""

    def end_slow(self, stream: Any) -> None:
        """Check that the slow work was still running until now, and wait for it."""


class HostWork:
    """Work on host streams: Python callables that a worker thread runs in order."""

    unit = 16 * MIB

    def __init__(self) -> None:
        self._gate = threading.Event()
        self._slow_touched = 0

    def stream(self) -> growpool.host.Stream:
        return growpool.host.Stream()

    def fill(self, stream: growpool.host.Stream, buffer: growpool.Buffer, value: int) -> None:
        import numpy as np

        def work() -> None:
            np.frombuffer(memoryview(buffer), dtype=np.uint8)[:] = value

        stream.submit(work)

    def check(self, stream: growpool.host.Stream, buffer: growpool.Buffer, value: int) -> None:
        import numpy as np

        stream.synchronize()
        equal = bool((np.frombuffer(memoryview(buffer), dtype=np.uint8) == value).all())
        check(equal, f"every byte of {size_text(buffer.size)} is {value}")

    def begin_slow(self, stream: growpool.host.Stream, buffer: growpool.Buffer) -> None:
        import ctypes

        # An address instead of an export: the buffer is closed while this work is pending, as
        # memory on a stream may be, and a live export would forbid that.
        address, size = buffer.handle, buffer.size

        def work() -> None:
            check(self._gate.wait(20), "the demo opens the gate in time")
            ctypes.memset(address, 7, size)
            self._slow_touched = ctypes.string_at(address, size).count(7)

        stream.submit(work)

    def end_slow(self, stream: growpool.host.Stream) -> None:
        check(self._slow_touched == 0, "the first stream is still at work")
        self._gate.set()
        stream.synchronize()
        check(self._slow_touched > 0, "the first stream wrote to memory that was still there")


class CudaWork:
    """Work on CUDA streams: fills and copies by the driver."""

    unit = 64 * MIB
    _slow_copies = 800

    def __init__(self, device: str) -> None:
        self._device = device

    def stream(self) -> growpool.cuda.Stream:
        return growpool.cuda.Stream(self._device)

    def fill(self, stream: growpool.cuda.Stream, buffer: growpool.Buffer, value: int) -> None:
        stream.fill(buffer.handle, value, buffer.size)

    def check(self, stream: growpool.cuda.Stream, buffer: growpool.Buffer, value: int) -> None:
        import numpy as np

        copy = np.zeros(buffer.size, dtype=np.uint8)
        stream.copy(copy.ctypes.data, buffer.handle, buffer.size)
        stream.synchronize()
        check(bool((copy == value).all()), f"every byte of {size_text(buffer.size)} is {value}")

    def begin_slow(self, stream: growpool.cuda.Stream, buffer: growpool.Buffer) -> None:
        half = buffer.size // 2
        for _ in range(self._slow_copies):
            stream.copy(buffer.handle + half, buffer.handle, half)

    def end_slow(self, stream: growpool.cuda.Stream) -> None:
        begin = time.perf_counter()
        stream.synchronize()
        waited = time.perf_counter() - begin
        check(waited > 0.001, f"the first stream is still at work (it was for {waited:.4f} s)")


# ---- the story -----------------------------------------------------------------------------------


class Demo:
    """One pool and what happens to it; each method is a step and leaves its checks behind."""

    def __init__(self, screen: Screen, work: Work, supplier: Supplier, pool: growpool.Pool) -> None:
        self.screen, self.work, self.supplier, self.pool = screen, work, supplier, pool
        self.unit = work.unit
        self.first, self.second = work.stream(), work.stream()

    def _end_step(self) -> None:
        show(self.screen, self.pool, self.unit // 2)
        stats = self.pool.stats
        check(stats.physical_bytes == self.supplier.out_bytes, "the pool holds what is out")
        check(stats.limit is None or stats.physical_bytes <= stats.limit, "the limit holds")

    def grow(self) -> None:
        self.screen.step("It grows through the callbacks, chunk by chunk, in place")
        self.a = self.pool.allocate(2 * self.unit, stream=self.first)
        self.b = self.pool.allocate(3 * self.unit, stream=self.second)
        self.work.fill(self.first, self.a, 1)
        self.work.fill(self.second, self.b, 2)
        self.work.check(self.first, self.a, 1)
        self.work.check(self.second, self.b, 2)
        check(self.pool.stats.used_bytes == 5 * self.unit, "five units are in use")
        self._end_step()

    def meet_limit(self) -> None:
        self.screen.step("It meets its limit: the request fails, and nothing else changes")
        before = self.pool.stats
        try:
            self.pool.allocate(8 * self.unit, stream=self.first)
        except growpool.LimitExceededError as error:
            self.screen.say(f"   LimitExceededError: {error}", "red")
        else:
            raise DemoFailure("a request beyond the limit was met")
        after = self.pool.stats
        check(after.physical_bytes == before.physical_bytes, "physical bytes did not change")
        self.work.check(self.first, self.a, 1)
        self._end_step()

    def raise_limit(self) -> None:
        self.screen.step("The limit is raised while the pool lives: the same request is met")
        address = self.a.handle
        self.pool.set_limit(16 * self.unit)
        self.c = self.pool.allocate(8 * self.unit, stream=self.first)
        self.small = self.pool.malloc(self.unit // 2, self.second)
        self.screen.say(f"   the first block was at {address:#x} and is at {self.a.handle:#x}")
        check(self.a.handle == address, "live memory did not move")
        self.work.check(self.second, self.b, 2)
        self._end_step()

    def trim_beside_work(self) -> None:
        self.screen.step("One stream works; idle memory of the other is trimmed meanwhile")
        self.work.begin_slow(self.first, self.c)
        self.b.close()
        begin = time.perf_counter()
        released = self.pool.trim()
        took = (time.perf_counter() - begin) * 1000
        self.screen.say(f"   trim() gave back {size_text(released)} in {took:.1f} ms")
        self.screen.say("   (a chunk with a live block in it stays whole, its free half too)")
        check(released == 3 * self.unit, "the three idle units went back")
        self._end_step()

    def retire_under_work(self) -> None:
        self.screen.step("Memory still at work is freed: its chunks retire, but stay mapped")
        self.c.close()
        retiring = self.pool.trim(wait=False)
        self.screen.say(f"   trim(wait=False) set {size_text(retiring)} retiring")
        check(retiring == 8 * self.unit, "eight units are retiring")
        check(self.supplier.taken_back == 3, "no chunk went back under running work")
        self._end_step()
        self.work.end_slow(self.first)
        self.pool.drain()
        self.screen.say("   the stream has finished, and the chunks went back:")
        check(self.pool.stats.retiring_bytes == 0, "nothing is retiring after drain()")
        self._end_step()

    def shrink(self) -> None:
        self.screen.step("It shrinks to nothing")
        self.work.check(self.first, self.a, 1)
        self.a.close()
        self.pool.free(self.small)
        self.pool.trim()
        check(self.pool.stats.physical_bytes == 0, "no physical memory is left")
        check(not self.pool.snapshot()["chunks"], "no chunk is left")
        self._end_step()

    def grow_in_place(self) -> None:
        self.screen.step("An object that grows: its address stays, and nothing is copied")
        with self.pool.growable(8 * self.unit) as growable:
            growable.resize(self.unit)
            growable.fill(7)
            address = growable.handle
            for times in (2, 4, 8):
                growable.resize(times * self.unit)
            grown = f"{size_text(self.unit)} became {size_text(growable.size)}"
            self.screen.say(f"   {grown} in three steps, all at {address:#x}")
            check(growable.handle == address, "the address is the same")
            first = bytearray(self.unit)
            with growable.view(self.unit) as view:
                view.copy_to(first)
            check(first.count(7) == self.unit, "what was there is still there")
            self._end_step()
            released = growable.resize(self.unit).released_bytes
            self.screen.say(f"   {size_text(released)} went back at its tail")
            check(released == 7 * self.unit, "seven units went back")
            self._end_step()
        self.pool.trim()


@contextlib.contextmanager
def open_pool(device: str, supplier: Supplier, unit: int) -> Iterator[growpool.Pool]:
    """A pool of fixed chunk size, so that its picture is the same on every run."""
    pool = growpool.Pool(
        device,
        alloc=supplier.alloc,
        free=supplier.free,
        limit=10 * unit,
        name="demo",
        chunk_size=unit,
    )
    with pool:
        yield pool


def tell(screen: Screen, device: str) -> None:
    """Run the whole story on one device; raise `DemoFailure` when a check does not hold."""
    work: Work = HostWork() if device in ("host", "cpu") else CudaWork(device)
    supplier = Supplier(screen)
    with open_pool(device, supplier, work.unit) as pool:
        screen.step(f"A pool on {device} that may hold {size_text(10 * work.unit)}")
        screen.legend(work.unit // 2)
        show(screen, pool, work.unit // 2)
        check(supplier.made == 0, "an empty pool asks for nothing")
        demo = Demo(screen, work, supplier, pool)
        demo.grow()
        demo.meet_limit()
        demo.raise_limit()
        demo.trim_beside_work()
        demo.retire_under_work()
        demo.shrink()
        demo.grow_in_place()
    check(not supplier.out, "every chunk went back")
    check(supplier.made == supplier.taken_back == 22, "22 chunks were made and taken back")
    screen.say("")
    screen.say("Every check held; all 22 chunks went back.", "bold green")


def run(device: str | None = None) -> int:
    """Run the demo on `device`, or on the first GPU, or on the host; return the exit code."""
    screen = Screen()
    if device is None:
        device = "cuda:0" if growpool.is_cuda_available() else "host"
        if device == "host":
            screen.say("This demo uses host memory, for want of a GPU:")
            screen.say(f"{growpool.cuda_unavailable_reason()}.")
    try:
        import numpy  # noqa: F401
    except ImportError:
        print("demo: NumPy is missing: pip install 'growpool[demo]'", file=sys.stderr)
        return 2
    try:
        tell(screen, device)
    except DemoFailure as failure:
        print(f"demo failed: {failure}", file=sys.stderr)
        return 1
    except (growpool.Error, ValueError) as error:
        print(f"demo failed: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0
