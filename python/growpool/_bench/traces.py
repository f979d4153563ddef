# SPDX-License-Identifier: Apache-2.0
"""Reads recorded allocation traces: which blocks came and went. Plays none of them."""

from __future__ import annotations

import gzip
import pathlib
from collections.abc import Iterable
from dataclasses import dataclass

KEPT = pathlib.Path(__file__).parent / "traces"
HEADER = ["t_us", "op", "id", "size", "stream"]


class TraceError(Exception):
    """A trace that cannot be replayed; the text names the line and what is wrong with it."""


@dataclass(frozen=True)
class Trace:
    name: str
    rows: list[tuple[bool, int, int, int]]  # (is it an allocation, id, bytes, stream)
    peak_live: int  # bytes
    allocations: int
    streams: int


def kept_names() -> list[str]:
    """The traces that come with the benchmark."""
    return sorted(path.name.removesuffix(".csv.gz") for path in KEPT.glob("*.csv.gz"))


def find(name: str) -> pathlib.Path:
    """A file of that name, else the kept trace; TraceError when there is neither."""
    path = pathlib.Path(name)
    if path.is_file():
        return path
    kept = KEPT / f"{name}.csv.gz"
    if kept.is_file():
        return kept
    raise TraceError(f"no trace {name!r}: neither a file nor one of {', '.join(kept_names())}")


def parse(lines: Iterable[str], name: str) -> Trace:
    """The trace in the lines, checked; TraceError at the first that makes no sense."""
    rows: list[tuple[bool, int, int, int]] = []
    size_of: dict[int, int] = {}
    seen: set[int] = set()
    live = peak = streams = 0
    numbered = enumerate(lines, 1)
    first = next(numbered, (1, ""))[1].strip().split(",")
    if first != HEADER:
        raise TraceError(f"{name}, line 1: the columns are {','.join(HEADER)}, not {first}")
    for number, line in numbered:
        where = f"{name}, line {number}"
        parts = line.strip().split(",")
        try:
            _, op, *texts = parts
            block, size, stream = (int(text) for text in texts)
        except ValueError:
            raise TraceError(f"{where}: {line.strip()!r} is no row of a trace") from None
        if op not in ("a", "f") or size < 0 or stream < 0:
            raise TraceError(f"{where}: op is a or f, size and stream are not negative: {parts}")
        if op == "a":
            if block in seen:
                raise TraceError(f"{where}: block {block} was allocated before")
            seen.add(block)
            size_of[block] = size
            live += size
            peak = max(peak, live)
        else:
            if block not in size_of:
                raise TraceError(f"{where}: block {block} is not allocated")
            live -= size_of.pop(block)
        streams = max(streams, stream + 1)
        rows.append((op == "a", block, size, stream))
    return Trace(name, rows, peak, len(seen), streams)


def load(name: str) -> Trace:
    """A trace by path (.csv or .csv.gz) or by the name of a kept one."""
    path = find(name)
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            return parse(file, path.name.removesuffix(".gz").removesuffix(".csv"))
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error
