# SPDX-License-Identifier: Apache-2.0
"""The examples in Python run as a newcomer would run them, and tell what they should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import growpool

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "python"


def run_example(name: str) -> str:
    """Run one with warnings as errors; it must end well and say nothing on stderr."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(growpool.__file__).parents[1])},
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def test_no_example_is_forgotten() -> None:
    tests = [name.removeprefix("test_") for name in globals() if name.startswith("test_")]
    for example in EXAMPLES.glob("*.py"):
        assert example.stem in tests


def test_first_pool() -> None:
    told = run_example("first_pool.py")
    assert "    alloc: 48 MiB\n" in told or "    alloc: 50 MiB\n" in told
    assert "limit" in told.partition("the limit holds:\n")[2].splitlines()[0]
    given = sum(map(int, re.findall(r"alloc: (\d+) MiB", told)))
    assert given == sum(map(int, re.findall(r"free: (\d+) MiB", told)))
    assert f"    {given} MiB went back\n    0 bytes are left\n" in told
    assert told.endswith("\n0 chunks are out\n")


def test_growable() -> None:
    told = run_example("growable.py")
    assert re.search(r"^reserved: 64 GiB of addresses at 0x\w+, 0 bytes of memory$", told, re.M)
    assert re.search(r"^grown: 256 MiB with [1-9] chunks$", told, re.M)
    assert "unmoved: here from the start\n" in told
    assert "cut to 130 MiB: 0 MiB went back, 126 MiB stay in a chunk that was cut\n" in told
    assert "cut to 128 MiB: 128 MiB went back\n" in told
    assert told.endswith("\nclosed\n")


def test_kv_cache() -> None:
    told = run_example("kv_cache.py")
    assert re.search(r"^step 0: 32 sequences hold 64 MiB$", told, re.M)
    found = re.search(r"^100 sequences finished; at most (\d+) MiB of 2048 MiB were", told, re.M)
    assert found and 64 < int(found[1]) < 1536
    assert told.endswith("\n0 bytes are left\n")


def test_share() -> None:
    told = run_example("share.py")
    assert told == ("the second process reads: hello\nthe first process reads: hello to you\n")
