# SPDX-License-Identifier: Apache-2.0
"""Plays a recorded trace on a pool: ``python -m growpool replay TRACE``, and rows of the benchmark.

Every block is allocated and freed on the stream of its number, as ints, in the recorded order and
without the recorded pauses. No work is enqueued, so streams are at rest and pass their fences as
soon as the device looks at them.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import growpool
from growpool import Chunk
from growpool._bench import traces
from growpool._bench.rows import GIB, MIB, Context, NotHere, Reading, Row, Target

PAGE = 2 * MIB
ADDRESSES = 16  # reserved, in peaks: so many that no replay ends for want of a place

# Peak physical bytes over peak live bytes with PyTorch 2.11's expandable segments, one H200.
EXPANDABLE = {
    "gpt_train": 1.038,
    "llm_generate": 1.045,
    "vision_multires": 1.010,
    "gnn_minibatch": 1.232,
    "rl_phases": 1.066,
    "streams": 1.018,
}


class Meter:
    """A backing that counts and times what is asked of the device, and growpool's own memory."""

    def __init__(self) -> None:
        self.made = self.given_back = 0
        self.seconds = 0.0
        self.before = growpool.bookkeeping_bytes()
        self.bookkeeping = self.chunk_bytes = 0  # bytes at most, and of an object that is a chunk

    def look(self) -> None:
        objects = (self.made - self.given_back) * self.chunk_bytes
        now = growpool.bookkeeping_bytes() - self.before + objects
        self.bookkeeping = max(self.bookkeeping, now)

    def alloc(self, size: int, device: int, stream: int) -> Chunk:
        begin = time.perf_counter()
        chunk = Chunk.create(size, device)
        self.seconds += time.perf_counter() - begin
        self.made += 1
        self.chunk_bytes = sys.getsizeof(chunk)
        self.look()
        return chunk

    def free(self, chunk: Chunk, size: int, device: int, stream: int) -> None:
        begin = time.perf_counter()
        chunk.close()
        self.seconds += time.perf_counter() - begin
        self.given_back += 1


@dataclass(frozen=True)
class Played:
    """What came of one replay; bytes and seconds."""

    trace: str
    rows: int
    complete: bool
    peak_live: int
    peak_physical: int
    limit: int | None
    chunks_made: int
    chunks_given_back: int
    backing_seconds: float
    seconds: float
    waits: int
    bookkeeping: int
    why: str  # where and why it ended early

    @property
    def ratio(self) -> float:
        return self.peak_physical / self.peak_live if self.peak_live else 1.0


def make_streams(device: str, count: int, kept: contextlib.ExitStack) -> list[int]:
    """Handles of new streams of the device, which live as long as `kept`."""
    if device == "host":
        return [kept.enter_context(growpool.host.Stream()).id for _ in range(count)]
    return [kept.enter_context(growpool.cuda.Stream(device)).handle for _ in range(count)]


def play(
    trace: traces.Trace,
    device: str,
    *,
    limit: int | None = None,
    chunk_size: int | None = None,
    streams: list[int] | None = None,
) -> Played:
    """Replay the trace on a new pool, on these streams by number; no memory ends it early."""
    addresses = ADDRESSES * (trace.peak_live // PAGE + 1) * PAGE
    with contextlib.ExitStack() as kept:
        handles = streams or make_streams(device, trace.streams, kept)
        meter = Meter()
        pool = kept.enter_context(
            growpool.Pool(
                device, backing=meter, limit=limit, chunk_size=chunk_size, address_space=addresses
            )
        )
        malloc, free, address = pool.malloc, pool.free, {}
        done, why = 0, ""
        gc.collect()
        begin = time.perf_counter()
        try:
            for is_allocation, block, size, stream in trace.rows:
                if is_allocation:
                    address[block] = malloc(size, handles[stream])
                else:
                    free(address.pop(block), handles[stream])
                done += 1
        except growpool.OutOfMemoryError as error:
            why = f"row {done + 1}: {error}"
        seconds = time.perf_counter() - begin
        meter.look()
        stats = pool.stats
        played = Played(
            trace.name,
            done,
            not why,
            trace.peak_live,
            stats.peak_physical_bytes,
            limit,
            meter.made,
            meter.given_back,
            meter.seconds,
            seconds,
            stats.wait_count,
            meter.bookkeeping,
            why,
        )
    return played


def limit_of(trace: traces.Trace, text: str) -> int:
    """Bytes from "1.02" (times the trace's peak), a number of bytes, or "8 GiB"; whole pages."""
    try:
        value = float(text)
    except ValueError:
        with growpool.Pool("host", limit=text) as pool:  # reads sizes as pools do
            return int(pool.limit or 0)
    wanted = value * trace.peak_live if value < 1024 else value
    return int(wanted) // PAGE * PAGE


def describe(played: Played) -> str:
    limit = "no limit" if played.limit is None else f"limit {played.limit / MIB:,.0f} MiB"
    end = "complete" if played.complete else f"ENDED EARLY, {played.why}"
    return (
        f"{played.trace}, {limit}: {end}\n"
        f"  rows               {played.rows:,}\n"
        f"  peak live          {played.peak_live / MIB:,.0f} MiB\n"
        f"  peak physical      {played.peak_physical / MIB:,.0f} MiB, {played.ratio:.4f} of it\n"
        f"  chunks             {played.chunks_made:,} made, "
        f"{played.chunks_given_back:,} given back\n"
        f"  in the backing     {played.backing_seconds * 1e3:,.1f} ms\n"
        f"  in all             {played.seconds * 1e3:,.1f} ms, "
        f"{played.seconds / max(1, played.rows) * 1e9:,.0f} ns a row\n"
        f"  waits              {played.waits}\n"
        f"  bookkeeping        {played.bookkeeping / 1024:,.0f} KiB of host memory at most, "
        f"{played.bookkeeping / max(1, played.peak_physical):.3%} of peak physical"
    )


def run(
    name: str,
    device: str | None = None,
    limit: str | None = None,
    chunk_size: str | None = None,
    json_file: str | None = None,
) -> int:
    """The command: 0 when all was played, 1 when memory ran out, 2 for bad input."""
    try:
        trace = traces.load(name)
        bytes_of_limit = None if limit is None else limit_of(trace, limit)
        if device is None:
            device = "cuda:0" if growpool.is_cuda_available() else "host"
        sized: Any = chunk_size
        played = play(trace, device, limit=bytes_of_limit, chunk_size=sized)
    except (traces.TraceError, ValueError, TypeError) as error:
        print(error, file=sys.stderr)
        return 2
    print(describe(played))
    if json_file:
        with open(json_file, "w", encoding="utf-8") as file:
            json.dump({**asdict(played), "ratio": played.ratio}, file, indent=1)
    return 0 if played.complete else 1


# ---- rows of the benchmark ----------------------------------------------------------------------


def named(context: Context) -> list[str]:
    """The kept traces, and those in the folder that GROWPOOL_TRACES names."""
    names = {name: name for name in traces.kept_names()}
    folder = os.environ.get("GROWPOOL_TRACES", "")
    if folder:
        for path in pathlib.Path(folder).glob("*.csv.gz"):
            names[path.name.removesuffix(".csv.gz")] = str(path)
    chosen = sorted(names)[:1] if context.quick else sorted(names)
    return [names[name] for name in chosen]


def fits(trace: traces.Trace, context: Context) -> bool:
    if not context.is_cuda:
        return True
    from growpool._bench import _native

    return bool(trace.peak_live * 1.3 + 8 * GIB < _native.cuda_memory(context.ordinal)[0])


def loaded(context: Context) -> Iterator[traces.Trace]:
    """The traces, one after the other; NotHere at one that the device has no room for."""
    for name in named(context):
        trace = traces.load(name)
        if not fits(trace, context):
            raise NotHere(f"{trace.name} needs {trace.peak_live / GIB:.0f} GiB and some")
        yield trace


def readings(played: Played, what: str, target: Target | None) -> list[Reading]:
    note = (
        f"{played.chunks_made:,} chunks made, {played.chunks_given_back:,} given back, "
        f"{played.backing_seconds * 1e3:.1f} ms in the backing, {played.seconds * 1e3:.1f} ms in "
        f"all, {played.waits} waits; {played.why or 'complete'}"
    )
    return [Reading(f"{played.trace}{what}", played.ratio, "x", target=target, note=note)]


def unlimited(context: Context) -> list[Reading]:
    found: list[Reading] = []
    for trace in loaded(context):
        bound = EXPANDABLE.get(trace.name)
        target = Target("<=", bound, "of peak live") if bound else None
        found += readings(play(trace, context.device), "", target)
    return found


def limited(context: Context) -> list[Reading]:
    found: list[Reading] = []
    for trace in loaded(context):
        limit = limit_of(trace, "1.02")
        played = play(trace, context.device, limit=limit, chunk_size=PAGE)
        done = Target(">=", 1, "of the rows")
        found += readings(played, ", chunks of 2 MiB", None)
        share = played.rows / len(trace.rows)
        found.append(Reading(f"{trace.name}: rows played", share, "x", target=done))
        found.append(lowest(trace, context))
    return found


def bookkeeping(context: Context) -> list[Reading]:
    """growpool's own host memory, the objects of Python's chunks included."""
    target = Target("<=", 0.001, "of peak physical")
    found: list[Reading] = []
    for trace in loaded(context):
        played = play(trace, context.device)
        share = played.bookkeeping / max(1, played.peak_physical)
        note = f"{played.bookkeeping / 1024:,.0f} KiB for {played.peak_physical / MIB:,.0f} MiB"
        found.append(Reading(played.trace, share, "x", target=target, note=note))
    return found


def lowest(trace: traces.Trace, context: Context) -> Reading:
    """The lowest limit, to half a percent, that the default chunk plan completes under."""
    low, high = 1.0, 1.0
    while high < 2 and not play(trace, context.device, limit=limit_of(trace, str(high))).complete:
        low, high = high, high + 0.04
    while high - low > 0.005:
        middle = (low + high) / 2
        if play(trace, context.device, limit=limit_of(trace, str(middle))).complete:
            high = middle
        else:
            low = middle
    return Reading(f"{trace.name}: lowest limit, default plan", high, "x")


ROWS = [
    Row("replay", "traces, no limit: peak physical / peak live", ("cuda", "host"), unlimited),
    Row("bookkeeping", "traces: growpool's own host memory", ("cuda", "host"), bookkeeping),
    Row("replay-limit", "traces under a limit of 1.02 of peak live", ("cuda", "host"), limited),
]
