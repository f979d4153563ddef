# SPDX-License-Identifier: Apache-2.0
"""Writes the fuzz target's first inputs: sequences that no mutation finds soon, in readable form.

    python tests/fuzz/seeds.py FOLDER

The names of operations and their order come from fuzz.c; which bytes each of them takes, from the
function that it names. The kept corpus holds what this writes and what the fuzzer made of it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

SOURCE = (Path(__file__).parent / "fuzz.c").read_text(encoding="utf-8")
NUMBER: dict[str, int] = {}
for position, name in enumerate(re.findall(r'^    \{\w+, "(\w+)", \w+\},', SOURCE, re.M)):
    NUMBER.setdefault(name, position)

# Numbers of block sizes: 1 MiB, one page, two pages, 9 MiB.
MIB, PAGE, TWO, NINE = 6, 8, 11, 13

Step = tuple[str | int, ...]


def options(
    chunk: int = 1, limit: int = 0, cache: int = 0, kinds: int = 0, peers: int = 0
) -> bytes:
    """Return the eight bytes that an input begins with.

    chunk 0: planned, 1: single pages; limit and cache: places in the tables of fuzz_pools.c; kinds:
    two bits for each stream (plain, blocking, legacy, this thread's).
    """
    return bytes([chunk | limit << 3 | cache << 6, 0, 0, 3, kinds, 0, peers, 0])


def seed(head: bytes, *steps: Step) -> bytes:
    """Return an input: each step is an operation's name and the bytes that it takes."""
    made = bytearray(head)
    for step in steps:
        made += bytes(NUMBER[part] if isinstance(part, str) else part for part in step)
    return bytes(made)


SEEDS: dict[str, bytes] = {}
SEEDS["block_export"] = seed(
    options(),
    ("malloc", PAGE, 0x20),
    ("pin", 0, 1),
    ("launch", 0, 1),
    ("unpin", 0),
    ("free", 0, 0),
    ("trim", 0),
    ("malloc", PAGE, 2),
)
SEEDS["block_export_reuse"] = seed(
    options(),
    ("malloc", PAGE, 0x20),
    ("pin", 0, 1),
    ("launch", 0, 1),
    ("unpin", 0),
    ("abandon", 0),
    ("malloc", PAGE, 2),
    ("malloc", PAGE, 0),
    ("complete_all",),
    ("trim", 0),
)
SEEDS["abandoned_pin"] = seed(
    options(),
    ("malloc", PAGE, 0x10),
    ("pin", 0, 1),
    ("abandon", 0),
    ("launch", 0, 3),
    ("close", 1),
    ("unpin", 0),
    ("trim", 0),
)
# exports of ranges
SEEDS["range_export"] = seed(
    options(),
    ("range_create", 0),
    ("commit", 0, 0x70, 0, 2),
    ("range_pin", 0, 0x1A | 1 << 5, 0),
    ("range_use", 0, 0x12),
    ("range_unpin", 0, 0),
    ("decommit", 0, 0x30, 0, 0x80),
)
SEEDS["range_export_keep"] = seed(
    options(chunk=0),
    ("range_create", 0),
    ("commit", 0, 0x70, 0, 4),
    ("range_pin", 0, 0x1A | 2 << 5, 1),
    ("range_unpin", 0, 0),
    ("decommit", 0, 0x70, 0, 2),
    ("commit", 0, 0x43, 0, 2),
    ("decommit", 0, 0x30, 0, 0x80),
    ("trim", 0),
)
SEEDS["range_drop_pinned"] = seed(
    options(),
    ("range_create", 1),
    ("commit", 0, 0x30, 0, 3),
    ("range_pin", 0, 0x1A | 3 << 5, 1),
    ("range_drop", 0),
    ("range_unpin", 0, 0),
    ("reaper",),
    ("trim", 0),
)
# kept by a cut, taken back by another stream
SEEDS["kept_rest"] = seed(
    options(chunk=0),
    ("range_create", 0),
    ("commit", 0, 0x30, 0, 4),
    ("decommit", 0, 0x70, 0, 2),
    ("commit", 0, 1, 0, 2),
    ("decommit", 0, 0x70, 1, 2),
    ("commit", 0, 2, 1, 1),
    ("decommit", 0, 0x30, 0, 0x80),
)
SEEDS["retiring_back"] = seed(
    options(),
    ("range_create", 0),
    ("commit", 0, 0x30, 0, 4),
    ("decommit", 0, 0x70, 0, 0x80),
    ("commit", 0, 1, 0, 4),
    ("reaper",),
    ("decommit", 0, 0x70, 0, 0x80),
    ("reaper",),
    ("complete_all",),
    ("reaper",),
)
SEEDS["grow_shrink"] = seed(
    options(chunk=0),
    ("resize", 0x18, 0x30, 20),
    ("range_use", 0, 1, 5),
    ("resize", 0, 0x70, 3),
    ("resize", 0, 1, 30),
    ("resize", 0, 0x30, 0),
    ("range_close", 0, 0),
)
SEEDS["interrupted"] = seed(
    options(),
    ("range_create", 0),
    ("commit", 0, 0x30, 0, 6),
    ("wait_mode", 3),
    ("decommit", 0, 0x30, 0, 0x80),
    ("wait_mode", 0),
    ("drain",),
)
# captures
GRAPH: list[Step] = [
    ("capture_begin", 0, 0),
    ("malloc", PAGE, 0),
    ("free", 0, 0),
    ("capture_end", 0),
]
SEEDS["graph"] = seed(
    options(),
    *GRAPH,
    ("graph_launch", 0, 1),
    ("trim", 0),
    ("malloc", PAGE, 2),
    ("graph_destroy", 0),
    ("trim", 0),
    ("complete_all",),
    ("trim", 0),
)
SEEDS["graph_close"] = seed(
    options(),
    *GRAPH,
    ("close", 1),
    ("graph_launch", 0, 1),
    ("graph_destroy", 0),
    ("close", 1),
    ("complete_all",),
    ("close", 1),
)
SEEDS["graph_finish"] = seed(
    options(),
    *GRAPH,
    ("finish", 1),
    ("reaper",),
    ("graph_launch", 0, 2),
    ("graph_destroy", 0),
    ("reaper",),
    ("complete_all",),
    ("reaper",),
)
SEEDS["graph_orphan"] = seed(
    options(),
    *GRAPH,
    ("release", 1),
    ("reaper",),
    ("graph_launch", 0, 2),
    ("reaper",),
    ("graph_destroy", 0),
    ("complete_all",),
    ("reaper",),
)
SEEDS["graph_join"] = seed(
    options(),
    ("capture_begin", 0, 0),
    ("capture_join", 1, 0),
    ("malloc", PAGE, 0),
    ("malloc", PAGE, 1),
    ("free", 0, 0),
    ("malloc", PAGE, 1),
    ("malloc", MIB, 0),
    ("capture_end", 0),
    ("graph_launch", 0, 3),
    ("free", 0, 0x12),
    ("graph_destroy", 0),
    ("trim", 0),
)
SEEDS["graph_blocking"] = seed(
    options(kinds=0x09),
    ("capture_begin", 0, 0),
    ("malloc", PAGE, 0),
    ("malloc", PAGE, 1),
    ("free", 1, 0),
    ("trim", 0),
    ("join", 1, 2),
    ("synchronize", 1, 0),
    ("capture_end", 0),
    ("trim", 0),
    ("graph_destroy", 0),
)
SEEDS["graph_spoilt"] = seed(
    options(),
    ("capture_begin", 0, 0),
    ("malloc", PAGE, 0),
    ("free", 0, 0),
    ("capture_spoil", 0),
    ("malloc", PAGE, 0),
    ("capture_end", 0),
    ("trim", 0),
)
SEEDS["capture_trim"] = seed(
    options(),
    ("malloc", PAGE, 0),
    ("free", 0, 0),
    ("malloc", PAGE, 1),
    ("free", 0, 0),
    ("capture_begin", 0, 1),
    ("trim", 0),
    ("drain",),
    ("trim_no_wait", 0),
    ("reaper",),
    ("close", 1),
    ("capture_end", 0),
    ("graph_destroy", 0),
    ("trim", 0),
)
# pools that are let go
SEEDS["orphan_unknown"] = seed(
    options(),
    ("malloc", PAGE, 0x20),
    ("pin", 0, 1),
    ("launch", 0, 1),
    ("unpin", 0),
    ("release", 1),
    ("reaper",),
    ("reaper",),
    ("select", 1),
    ("open", 1, 3),
    ("capture_begin", 2, 0),
    ("reaper",),
    ("trim", 0),
    ("capture_end", 2),
    ("graph_destroy", 0),
    ("trim", 0),
)
SEEDS["orphan_stranger"] = seed(
    options(),
    ("malloc", PAGE, 0x20),
    ("pin", 0, 1),
    ("launch", 0, 1),
    ("unpin", 0),
    ("release", 1),
    ("stranger", PAGE, 0),
    ("reaper",),
    ("select", 1),
    ("open", 1, 3),
    ("drain",),
)
SEEDS["orphan_busy"] = seed(
    options(),
    ("malloc", PAGE, 0),
    ("free", 0, 0),
    ("malloc", PAGE, 1),
    ("release", 1),
    ("capture_begin", 1, 0),
    ("reaper",),
    ("reaper",),
    ("capture_end", 1),
    ("graph_destroy", 0),
    ("reaper",),
)
SEEDS["finish_unknown"] = seed(
    options(),
    ("malloc", PAGE, 0x20),
    ("pin", 0, 1),
    ("launch", 0, 1),
    ("finish", 1),
    ("reaper",),
    ("unpin", 0),
    ("reaper",),
    ("reaper",),
    ("select", 1),
    ("open", 1, 3),
    ("drain",),
    ("select", 0),
    ("close", 1),
)
SEEDS["pins_hold_pool"] = seed(
    options(),
    ("malloc", PAGE, 0),
    ("pin", 0, 0),
    ("release", 1),
    ("reaper",),
    ("unpin", 0),
    ("reaper",),
)
SEEDS["range_holds_pool"] = seed(
    options(),
    ("commit", 0, 0x30, 0, 4),
    ("release", 1),
    ("resize", 0, 0x30, 6),
    ("range_use", 0, 1, 2),
    ("range_drop", 0),
    ("reaper",),
    ("reaper",),
)
# backings
SEEDS["unreturned"] = seed(
    options(limit=1),
    ("malloc", TWO, 0),
    ("malloc", TWO, 1),
    ("free", 0, 0),
    ("mood", 1 | 2 << 1, 3),
    ("trim", 0),
    ("malloc", TWO, 2),
    ("return_unreturned",),
    ("malloc", TWO, 2),
)
SEEDS["cached"] = seed(
    options(cache=3),
    ("malloc", TWO, 0),
    ("free", 0, 0),
    ("trim", 0),
    ("malloc", TWO, 1),
    ("free", 0, 0),
    ("trim", 0),
    ("cache_trim", 0),
    ("base_knobs", 0x2F),
    ("malloc", TWO, 1),
)
SEEDS["reenter"] = seed(
    options(),
    ("malloc", PAGE, 0),
    ("malloc", PAGE, 1),
    ("mood", 16, 4),
    ("malloc", NINE, 0),
    ("free", 0, 1),
    ("mood", 17, 4),
    ("free", 0, 0),
    ("trim", 0, "malloc", 1, PAGE, 2),
    ("drain",),
)
for m in range(1, 8):
    SEEDS[f"mood{m}"] = seed(
        options(chunk=0),
        ("malloc", PAGE, 0),
        ("mood", m << 1, 0),
        ("malloc", NINE, 0),
        ("malloc", NINE, 1),
        ("mood", m << 1, 15),
        ("commit", 0, 0x30, 0, 6),
        ("malloc", NINE, 2),
    )
# limits and reclaiming
SEEDS["limit_reclaim"] = seed(
    options(limit=1),
    ("malloc", PAGE, 0),
    ("malloc", PAGE, 0),
    ("malloc", PAGE, 0),
    ("malloc", PAGE, 0),
    ("free", 0, 0),
    ("free", 1, 0x11),
    ("malloc", TWO, 2),
    ("set_limit", 2),
    ("reaper",),
    ("complete_all",),
    ("reaper",),
    ("malloc", PAGE, 1),
)
SEEDS["cross_stream"] = seed(
    options(limit=7),
    ("malloc", MIB, 0),
    ("malloc", MIB, 1),
    ("free", 0, 0),
    ("malloc", MIB, 2),
    ("record_stream", 0, 2),
    ("free", 0, 0x13),
    ("malloc", MIB, 0),
)
SEEDS["device_short"] = seed(
    options(),
    ("malloc", NINE, 0),
    ("free", 0, 0),
    ("device_memory", 5),
    ("malloc", NINE, 1),
    ("malloc", NINE, 2),
    ("device_memory", 60),
    ("malloc", NINE, 2),
)
# streams
SEEDS["forget"] = seed(
    options(),
    ("malloc", PAGE, 0),
    ("malloc", PAGE, 1),
    ("forget_stream", 0, 1),
    ("free", 0, 0x11),
    ("malloc", PAGE, 0),
    ("trim", 0),
)
SEEDS["replace"] = seed(
    options(),
    ("malloc", PAGE, 0),
    ("malloc", PAGE, 1),
    ("free", 0, 0),
    ("replace_stream", 0),
    ("malloc", PAGE, 0),
    ("trim_no_wait", 0),
    ("reaper",),
    ("trim", 0),
)
SEEDS["thread_bound"] = seed(
    options(kinds=0x03),
    ("malloc", PAGE, 0),
    ("free_elsewhere", 0),
    ("malloc", PAGE, 1),
    ("trim", 0),
    ("malloc", PAGE, 0),
    ("free", 0, 0),
    ("trim_no_wait", 0),
    ("reaper",),
    ("complete_all",),
    ("reaper",),
)
SEEDS["crowd"] = seed(
    options(),
    ("malloc", PAGE, 0),
    ("crowd", 0xFF, 7),
    ("free", 0, 0),
    ("malloc", PAGE, 1),
    ("trim", 0),
    ("crowd", 0xFF, 7),
)
SEEDS["kill"] = seed(
    options(),
    ("malloc", PAGE, 0),
    ("free", 0, 0),
    ("capture_begin", 1, 0),
    ("malloc", PAGE, 1),
    ("kill", 1),
    ("trim", 0),
    ("malloc", PAGE, 0),
    ("close", 1),
)
SEEDS["join"] = seed(
    options(),
    ("malloc", PAGE, 0),
    ("join", 0, 1),
    ("record_stream", 0, 1),
    ("free", 0, 0),
    ("synchronize", 1, 0),
    ("malloc", PAGE, 1),
    ("copy", 0, 0, 1),
    ("fill", 0, 1),
    ("look", 0),
)
# peers
SEEDS["peers"] = seed(
    options(chunk=0, peers=1),
    ("malloc", PAGE, 0),
    ("malloc", NINE, 1),
    ("malloc", TWO, 1),
    ("commit", 0, 0x30, 0, 6),
    ("commit", 0, 0x30, 6, 1),
    ("range_use", 0, 1, 3),
)
# faults
for n in (0, 1, 2, 3, 5, 8, 12):
    for how in (0, 1, 2):
        SEEDS[f"fault{n}_{how}"] = seed(
            options(),
            ("malloc", PAGE, 0),
            ("free", 0, 0),
            ("driver_fault", n, how),
            ("malloc", TWO, 1),
            ("trim", 0),
            ("no_driver_fault",),
            ("malloc", PAGE, 1),
            ("drain",),
        )
for n in (0, 1, 3):
    SEEDS[f"heap{n}"] = seed(
        options(),
        ("malloc", PAGE, 0),
        ("heap_fault", n, 0, "malloc", TWO, 1),
        ("heap_fault", n, 0, "commit", 0, 0x30, 0, 4),
        ("free", 0, 0),
        ("heap_fault", n, 3, "trim", 0),
        ("heap_fault", n, 0, "close", 1),
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in SEEDS.items():
        (folder / name).write_bytes(data)
    print(f"{len(SEEDS)} inputs in {folder}")
