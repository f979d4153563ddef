# SPDX-License-Identifier: Apache-2.0
"""Emergency mode (GP_TEST_EMERGENCY=1): each growth is told "no memory" once, before its backing.

The refusal makes a pool give idle memory back, wait for its streams, and ask again. Which tests
cannot hold then is said here, with the reason; tests that count use :func:`refusals`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

IS_ON = os.environ.get("GP_TEST_EMERGENCY", "0") not in ("", "0")

# Files about something else than how a pool grows: processes, arguments, the build.
FILES_LEFT_OUT = {
    "test_arguments.py": "no pool grows",
    "test_bench.py": "the benchmark, not what it measures",
    "test_chunk_share.py": "chunks between processes",
    "test_commands.py": "the make commands",
    "test_cuda_views.py": "what views say of themselves",
    "test_cycles.py": "how things end, not how they grow",
    "test_devices.py": "no pool grows",
    "test_dlpack.py": "how memory is exported, not how it is got",
    "test_errors.py": "no pool grows",
    "test_example.py": "uses the package without the mode's switch",
    "test_examples.py": "uses the package without the mode's switch",
    "test_exit.py": "processes, in which nothing is short",
    "test_export_lifetimes.py": "processes, in which nothing is short",
    "test_exports.py": "how memory is exported, not how it is got",
    "test_foreign.py": "processes, in which nothing is short",
    "test_fork.py": "processes, in which nothing is short",
    "test_fork_workers.py": "processes, in which nothing is short",
    "test_gate.py": "processes, in which nothing is short",
    "test_host_streams.py": "holds streams up, for which a refused growth waits",
    "test_install.py": "the build",
    "test_ladder.py": "the order and number of the rungs, of which the refusal takes one",
    "test_lifecycles.py": "holds locks over a growth, and the refused one calls free",
    "test_no_memory.py": "no memory for Python's own objects",
    "test_review_arguments.py": "no pool grows",
    "test_review_memory.py": "objects and their references",
    "test_signals.py": "waits that signals end",
    "test_tree.py": "reads files",
    "test_replay.py": "counts every chunk of long traces",
}

# By file and function, every parameter of it.
LEFT_OUT = {
    "test_callbacks.py::test_small_blocks_are_served_inside_a_callback_without_growing": (
        "the refused growth gives back the free memory that the callback wants"
    ),
    "test_misbehaving_free.py::test_a_growth_gets_through_although_a_free_raised": (
        "counts the idle chunks that go, and the refused growth gives all of them back"
    ),
    "test_misbehaving_free.py::test_what_it_may_do": (
        "counts the frees of an operation, and the refused growth gives all idle chunks back"
    ),
    "test_sim.py::test_cross_stream_reuse_waits_for_the_ticket": (
        "the refused growth waits for the stream that the test holds up"
    ),
    "test_unreturned.py::test_as_a_program_sees_it": (
        "counts warnings, and the refused growth meets the free that warns once more"
    ),
}


def begin() -> None:
    """Switch the mode on where the environment asks for it."""
    if IS_ON:
        import growpool

        growpool._core._testing.emergency(True)  # type: ignore[attr-defined]


def refusals() -> int:
    """Return how many refusals of each growth are the mode's, and so never reach the backing."""
    return int(IS_ON)


def is_not_for(file: str) -> bool | None:
    """Return True for a file that is left out; None leaves it to pytest."""
    return True if IS_ON and file in FILES_LEFT_OUT else None


def _name(item: pytest.Item) -> str:
    return f"{item.path.name}::{getattr(item, 'originalname', item.name)}"


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the collected tests that are left out; a ValueError when one of them is gone."""
    if not IS_ON:
        return []
    names = {_name(item) for item in items}
    files = {item.path.name for item in items}
    gone = [name for name in LEFT_OUT if name.partition("::")[0] in files and name not in names]
    if gone and len(files) > 1:
        raise ValueError(f"emergency.py leaves out tests that are not there: {gone}")
    return [item for item in items if _name(item) in LEFT_OUT]
