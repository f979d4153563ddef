# SPDX-License-Identifier: Apache-2.0
"""The peers: what users would pick instead. Each is measured where it can be imported, and else is
a reading without a value, never a pass."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from growpool._bench import timing
from growpool._bench.rows import MIB, Context

Figures = dict[str, float]
TORCH_NAMES = {
    "default": "PyTorch",
    "expandable": "PyTorch expandable_segments",
    "async": "PyTorch cudaMallocAsync",
}


def is_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def child(module: str, *arguments: object) -> tuple[Figures, str]:
    """What a program of ours prints in a process of its own, and ""; or nothing and why."""
    command = [sys.executable, "-m", f"growpool._bench.{module}", *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    except subprocess.TimeoutExpired:
        return {}, "took longer than 240 s"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {}, lines[-1]
    return dict(json.loads(done.stdout.strip().splitlines()[-1])), ""


def torch_is_missing() -> str:
    return "" if is_here("torch") else "torch is not installed"


@functools.cache
def torch_pairs(ordinal: int, mode: str, rounds: int) -> tuple[Figures, str]:
    """PyTorch's pairs, in a process of their own: its allocator is chosen before CUDA starts."""
    why = torch_is_missing()
    return ({}, why) if why else child("peer_torch", mode, "pairs", ordinal, rounds)


@dataclass
class Outcome:
    """What one player's processes said."""

    figures: list[Figures] = field(default_factory=list)
    why: str = ""  # it is missing

    def median(self, name: str) -> float | None:
        """Of the readings of this name; None where there are none."""
        return statistics.median(one[name] for one in self.figures) if self.figures else None

    def least(self, name: str) -> float | None:
        return min(one[name] for one in self.figures) if self.figures else None


def in_new_processes(players: Mapping[str, tuple[object, ...]], rounds: int) -> dict[str, Outcome]:
    """Let everybody play in every round, each time in a process of its own: child()'s arguments."""
    found = {name: Outcome() for name in players}
    for name in timing.turns(list(players), rounds):
        outcome, (module, *arguments) = found[name], players[name]
        if module == "peer_torch":
            outcome.why = outcome.why or torch_is_missing()
        if outcome.why:
            continue
        figures, outcome.why = child(str(module), *arguments)
        if not outcome.why:
            outcome.figures.append(figures)
    return found


def pairs(context: Context, rounds: int, count: int) -> dict[str, tuple[float | None, str]]:
    """Seconds of a 1 MiB pair by CuPy, cuda.core and RMM in this process; None with the reason."""
    found: dict[str, tuple[float | None, str]] = {}
    for name, module, make in (
        ("CuPy pool", "cupy", _cupy),
        ("cuda.core memory pool", "cuda.core", _cuda_core),
        ("RMM pool", "rmm", _rmm),
    ):
        if not is_here(module):
            found[name] = (None, f"{module} is not installed")
            continue
        try:
            one = make(context)

            def many(times: int, one: Any = one) -> None:
                for _ in range(times):
                    one()

            found[name] = (timing.each(many, count, rounds)[0], "")
        except Exception as problem:  # a peer's trouble is its own row's
            found[name] = (None, f"{type(problem).__name__}: {problem}")
    return found


def _cupy(context: Context) -> Any:
    cupy: Any = importlib.import_module("cupy")
    cupy.cuda.Device(context.ordinal).use()
    pool = cupy.cuda.MemoryPool()
    return lambda: pool.malloc(MIB)


def _cuda_core(context: Context) -> Any:
    try:
        core: Any = importlib.import_module("cuda.core")
        device = core.Device(context.ordinal)
    except AttributeError:
        core = importlib.import_module("cuda.core.experimental")
        device = core.Device(context.ordinal)
    device.set_current()
    stream = device.create_stream()
    resource = device.memory_resource
    return lambda: resource.allocate(MIB, stream=stream).close()


def _rmm(context: Context) -> Any:
    rmm: Any = importlib.import_module("rmm")
    memory: Any = importlib.import_module("rmm.mr")
    pool = memory.PoolMemoryResource(memory.CudaMemoryResource(), initial_pool_size=64 * MIB)
    stream = importlib.import_module("rmm.pylibrmm.stream").DEFAULT_STREAM
    del rmm
    return lambda: pool.deallocate(pool.allocate(MIB, stream), MIB, stream)
