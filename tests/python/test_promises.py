# SPDX-License-Identifier: Apache-2.0
"""Corners of the callback contract, each of which a mutant of tests/mutants breaks."""

from __future__ import annotations

import weakref
from typing import Any

import growpool
import pytest
from helpers import PAGE, Supplier, run_quietly

Chunk, Pool = growpool.Chunk, growpool.Pool


def test_a_finaliser_in_the_course_of_an_exception(sim: Any) -> None:
    """What C enters Python for while an exception is under way neither sees it nor loses it."""
    seen: list[int] = []

    class Owner:
        def __del__(self) -> None:
            seen.append(1)

    first = Chunk.create(PAGE, sim.device)
    with pytest.raises(ZeroDivisionError):
        [Chunk.from_handle(first.handle, PAGE, sim.device, owner=Owner()), 1 // len(seen)]
    assert seen == [1]
    first.close()


def test_a_call_that_comes_late_is_parked() -> None:
    """Even where nothing else of the thread's would meet the gate: it must not raise."""
    output = run_quietly(
        """
        import atexit, threading
        go_on, about = threading.Event(), threading.Event()
        def late():
            go_on.set()
            end.join(0.5)  # longer than it takes to be raised at
        atexit.register(late)  # runs after growpool's own, which is registered later
        import growpool
        pool = growpool.Pool("host")
        def work():
            about.set()
            go_on.wait()
            try:
                pool.malloc(1 << 21)
            finally:
                print("came back", flush=True)
        end = threading.Thread(target=work, daemon=True)
        end.start()
        about.wait()
        """
    )
    assert output == ""


@pytest.mark.parametrize("kind", ["large", "closed"])
def test_a_wrong_answer_is_kept_by_nobody(supplier: Supplier, kind: str) -> None:
    """The chunk goes with the callback's last reference to it."""
    seen: list[weakref.ref[Chunk]] = []

    def alloc(size: int, device: int, stream: int) -> Chunk:
        chunk = Chunk.create(size + PAGE if kind == "large" else size, device)
        if kind == "closed":
            chunk.close()
        seen.append(weakref.ref(chunk))
        return chunk

    with Pool("host", alloc=alloc, free=supplier.free) as pool:
        with pytest.raises(ValueError, match="stays yours"):
            pool.malloc(PAGE)
        assert [chunk() for chunk in seen] == [None]
