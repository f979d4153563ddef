# SPDX-License-Identifier: Apache-2.0
"""What growpool promises about captures, on every device that has them.

The host has none: its streams cannot be captured, so these tests pass there at once.
"""

from __future__ import annotations

import threading

import growpool
import pytest
from lab import PAGE, Lab, expect, gives_back

pytestmark = pytest.mark.contract


def test_a_graph_keeps_the_memory_of_its_capture(lab: Lab, pool: growpool.Pool) -> None:
    if not lab.has_captures:
        assert lab.device == "host"  # streams of the host are not captured
        return
    captured, other = lab.stream(), lab.stream()
    capture = lab.capture(captured)
    first = pool.malloc(PAGE, captured)
    pool.free(first, captured)
    assert pool.malloc(PAGE, captured) == first
    pool.free(first, captured)
    capture.end()
    block = pool.allocate(PAGE, stream=other)
    assert block.handle != first
    block.close()
    assert pool.trim() == PAGE
    with pytest.raises(growpool.CaptureError, match="graph"):
        pool.close()
    capture.close()
    assert pool.trim() == PAGE
    assert pool.stats.physical_bytes == 0


def test_a_growable_grows_in_a_capture_and_shrinks_after_it(lab: Lab, pool: growpool.Pool) -> None:
    if not lab.has_captures:
        assert lab.device == "host"
        return
    captured = lab.stream()
    with pool.growable(8 * PAGE, stream=captured) as growable:
        growable.resize(PAGE)
        growable.fill(1)
        capture = lab.capture(captured)
        growable.resize(2 * PAGE)
        with growable.view(PAGE, offset=PAGE) as view:
            view.fill(2)  # becomes a part of the graph
        with pytest.raises(growpool.CaptureError):
            growable.resize(0)
        assert growable.size == growable.physical_bytes == 2 * PAGE
        capture.end()
        capture.launch(captured)
        expect(lab, growable, (1, PAGE), (2, PAGE))
        capture.close()
        assert growable.resize(0).released_bytes == 2 * PAGE


def test_two_captures_share_nothing(lab: Lab, pool: growpool.Pool) -> None:
    if not lab.has_captures:
        assert lab.device == "host"
        return
    streams = [lab.stream(), lab.stream()]
    captures = [lab.capture(stream) for stream in streams]
    blocks = []
    for stream in streams * 2:
        blocks.append(pool.malloc(PAGE, stream))
        pool.free(blocks[-1], stream)
    assert blocks[:2] == blocks[2:] and blocks[0] != blocks[1]
    for capture in captures:
        capture.end()
    captures[0].close()
    gives_back(pool, down_to=PAGE)
    captures[1].launch(streams[0])
    captures[1].close()
    gives_back(pool)


def test_a_capture_that_an_exception_ends_leaves_no_memory_behind(
    lab: Lab, pool: growpool.Pool
) -> None:
    if not lab.has_captures:
        assert lab.device == "host"
        return
    captured = lab.stream()
    for _ in range(3):
        capture = lab.capture(captured)
        kept: list[growpool.Buffer] = []
        with pytest.raises(ZeroDivisionError):
            try:
                pool.free(pool.malloc(PAGE, captured), captured)
                kept.append(pool.allocate(2 * PAGE, stream=captured))
                raise ZeroDivisionError
            finally:
                capture.end()
                capture.close()
        kept.clear()
        gives_back(pool)


def test_another_thread_allocates_beside_a_capture(lab: Lab, pool: growpool.Pool) -> None:
    if not lab.has_captures:
        assert lab.device == "host"
        return
    captured, other = lab.stream(), lab.stream()
    capture = lab.capture(captured)
    mine = pool.malloc(PAGE, captured)
    theirs: list[int] = []

    def work() -> None:
        for _ in range(5):
            theirs.append(pool.malloc(PAGE, other))
            pool.free(theirs[-1], other)
            pool.trim()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(theirs) == 5 and mine not in theirs
    pool.free(mine, captured)
    capture.end()
    capture.launch(other)
    capture.close()
    gives_back(pool)


def test_a_snapshot_shows_what_a_graph_holds(lab: Lab, pool: growpool.Pool) -> None:
    if not lab.has_captures:
        assert lab.device == "host"
        return
    captured = lab.stream()
    capture = lab.capture(captured)
    block = pool.malloc(2 * PAGE, captured)
    pool.free(block, captured)
    capture.end()
    spans = [span for s in pool.snapshot()["segments"] for span in s["spans"]]
    held = [(span["address"], span["bytes"]) for span in spans if span["state"] == "held"]
    assert held == [(block, 2 * PAGE)]
    assert pool.stats.used_bytes == 0 and pool.stats.physical_bytes == 2 * PAGE
    capture.close()
    gives_back(pool)
    spans = [span for s in pool.snapshot()["segments"] for span in s["spans"]]
    assert {span["state"] for span in spans} == {"hole"}
