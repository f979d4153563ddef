# SPDX-License-Identifier: Apache-2.0
"""Tests that are a program: it ends while growpool is in use, in many copies, and each end counts.

All programs of a file begin with its first test, so that those which only wait cost nobody time.
"""

from __future__ import annotations

import os
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from helpers import run_python

COPIES = 200 if os.environ.get("GP_TEST_LONG", "0") == "1" else 10
# From its first step on, the end has ten seconds; then the watchdog prints every stack and ends it.
CLOCK = """
import signal, threading
def begin_end(join_threads=threading._shutdown, setitimer=signal.setitimer):
    setitimer(signal.ITIMER_REAL, 10)
    join_threads()
threading._shutdown = begin_end
"""

Result = subprocess.CompletedProcess[str]


def nothing(text: str) -> bool:
    return text == ""


@dataclass(frozen=True)
class Program:
    """What to run, and how it must end. Without `stdout` it may print anything."""

    code: str
    exit_code: int = 0
    stdout: str | None = None
    stderr: Callable[[str], object] = nothing
    waits: bool = False
    options: tuple[str, ...] = ()

    def run(self) -> Result:
        return run_python(CLOCK + textwrap.dedent(self.code), timeout=60, options=self.options)

    def ended_well(self, result: Result) -> bool:
        told = self.stdout is None or result.stdout == self.stdout
        return result.returncode == self.exit_code and told and bool(self.stderr(result.stderr))


def ends(
    code: str | dict[str, str],
    *,
    exit_code: int = 0,
    stdout: str | None = None,
    stderr: Callable[[str], object] = nothing,
    waits: bool = False,
    options: tuple[str, ...] = (),
) -> Callable[..., None]:
    """Make a test of a program, or of several by name. `waits`: it sleeps more than it works."""

    def make(text: str) -> Program:
        return Program(text, exit_code, stdout, stderr, waits, options)

    if isinstance(code, dict):

        @pytest.mark.parametrize(
            "program", [pytest.param(make(text), id=name) for name, text in code.items()]
        )
        def test(copies: Copies, program: Program) -> None:
            copies.check(program)

        return test
    only = make(code)

    def test_one(copies: Copies) -> None:
        copies.check(only)

    test_one.program = only  # type: ignore[attr-defined]
    return test_one


def program_of(item: Any) -> Program | None:
    """The program behind a test that pytest collected."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return parameters.get("program", getattr(item.function, "program", None))


class Copies:
    """The copies of all programs: as many at once as there are processors, and of those that only
    wait, many."""

    def __init__(self, programs: list[Program]) -> None:
        self._busy = ThreadPoolExecutor(os.cpu_count())
        self._waiting = ThreadPoolExecutor(20)
        self._results: dict[Program, list[Future[Result]]] = {}
        for program in sorted(programs, key=lambda program: not program.waits):
            executor = self._waiting if program.waits else self._busy
            self._results[program] = [executor.submit(program.run) for _ in range(COPIES)]

    def check(self, program: Program) -> None:
        results = [future.result() for future in self._results[program]]
        wrong = [result for result in results if not program.ended_well(result)]
        if wrong:
            pytest.fail(
                f"{len(wrong)} of {len(results)} copies ended wrong; the first with code "
                f"{wrong[0].returncode}\n{wrong[0].stdout}\n{wrong[0].stderr}\nof{program.code}"
            )

    def close(self) -> None:
        self._busy.shutdown(cancel_futures=True)
        self._waiting.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def copies(request: pytest.FixtureRequest) -> Iterator[Copies]:
    items = [item for item in request.session.items if item.path == request.path]
    copies = Copies([program for item in items if (program := program_of(item)) is not None])
    yield copies
    copies.close()
