# SPDX-License-Identifier: Apache-2.0
"""What a row of the benchmark is, and how its verdicts come from its readings. Measures nothing."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace

MIB, GIB = 1 << 20, 1 << 30


MACHINE_FREE = ("replay", "replay-limit", "bookkeeping")  # rows whose targets hold everywhere


class NotHere(Exception):
    """This machine cannot run the row, or this part of it; the text says what is missing."""


@dataclass(frozen=True)
class Target:
    """What a value is held against: "<=" or ">=" a bound, in the reading's own unit or as ratio."""

    comparison: str
    bound: float
    what: str  # in words, for the table

    def met(self, value: float) -> bool:
        if self.comparison not in ("<=", ">="):
            raise ValueError(f"a target compares by <= or >=, not {self.comparison}")
        return value <= self.bound if self.comparison == "<=" else value >= self.bound

    def text(self) -> str:
        word = "at most" if self.comparison == "<=" else "at least"
        return f"{word} {self.bound:g} {self.what}".rstrip()


@dataclass(frozen=True)
class Reading:
    """One player's figure. A target is held against the ratio where there is one, else the value.

    `value` is None where the player is missing: then `note` says why, and the verdict is
    what `absent` says.
    """

    player: str
    value: float | None
    unit: str  # "s", "B", "B/s", "x" or ""
    ratio: float | None = None
    ratio_to: str = ""
    target: Target | None = None
    note: str = ""
    least: float | None = None  # the best of the repetitions
    absent: str = "peer missing"  # the verdict where there is no value

    @property
    def verdict(self) -> str:
        if self.value is None:
            return self.absent
        if self.target is None:
            return ""
        judged = self.ratio if self.ratio_to else self.value
        if judged is None:
            return "peer missing"
        return "met" if self.target.met(judged) else "missed"


@dataclass
class Context:
    """What a row's function gets: the device, and how much to do."""

    device: str
    quick: bool = False  # tiny counts, for tests: figures mean nothing
    plots: dict[str, dict[str, list[tuple[float, float]]]] = field(default_factory=dict)

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def ordinal(self) -> int:
        return int(self.device.partition(":")[2] or 0)

    def count(self, full: int, quick: int = 2) -> int:
        return quick if self.quick else full


@dataclass(frozen=True)
class Row:
    name: str
    work: str
    kinds: tuple[str, ...]  # device kinds that it runs on: "cuda", "host"
    run: Callable[[Context], list[Reading]]


@dataclass
class Result:
    row: Row
    readings: list[Reading] = field(default_factory=list)
    verdict: str = ""  # of the row as a whole where it did not run
    error: str = ""  # a traceback
    seconds: float = 0.0


def run_row(row: Row, context: Context) -> Result:
    """Run one row; whatever it raises is in the result, so the others go on."""
    kind = "cuda" if context.is_cuda else "host"
    if kind not in row.kinds:
        return Result(row, verdict="no GPU" if kind == "host" else "host only")
    try:
        readings = row.run(context)
        if kind == "host" and "cuda" in row.kinds and row.name not in MACHINE_FREE:
            readings = [replace(reading, target=None) for reading in readings]  # GPU targets
        return Result(row, readings)
    except NotHere as missing:
        return Result(row, verdict=f"not here: {missing}")
    except Exception:
        return Result(row, verdict="error", error=traceback.format_exc())


def over(mine: float, other: float | None) -> float | None:
    """mine / other, or None where the other is missing."""
    return mine / other if other else None
