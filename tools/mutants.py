# SPDX-License-Identifier: Apache-2.0
"""Breaks growpool on purpose, one patch of tests/mutants at a time; the named tests must fail.

A patch begins with two lines: ``Caught-by:`` names C tests (test_pool) and Python tests
(tests/python/test_x.py::test_y), all of which must notice, and ``Breaks:`` says what is broken.
With ``Hangs: yes`` a test may notice by not coming to an end; else that proves nothing.
Works on copies of the tree under build/mutants, where every test must pass before any is broken.
Arguments: parts of names of the mutants to run; none: all of them.
"""

from __future__ import annotations

import os
import pathlib
import queue
import shutil
import signal
import subprocess
import sys
import threading

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "mutants"
FOLDERS = ("backing", "sync", "vmm", "python", "bench", "tests")
FILES = ("CMakeLists.txt", "pyproject.toml")
OPTIONS = ("-DGROWPOOL_TESTING=ON", "-DGROWPOOL_BUILD_TESTS=ON", "-DGROWPOOL_BUILD_EXTENSION=ON")
# Quick to build; the tests take little time.
FLAGS = ("-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_C_FLAGS=-w -O1 -g0")
WORKERS = max(1, min(4, os.cpu_count() or 1))
# A mutant may hang; so long may one test take. Unbroken ones share a machine with their builds.
MUTANT_SECONDS, UNBROKEN_SECONDS, BUILD_SECONDS = 20, 120, 300
# pytest's codes for a run in which no test decided anything.
PYTEST_NO_VERDICT = (2, 4, 5)
TIMED_OUT = 1000  # no process ends with that


class Problem(Exception):
    """Something that keeps a mutant from being judged."""


class Mutant:
    """One patch."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.tests = self._line("Caught-by").split()
        self.breaks = self._line("Breaks")
        self.hangs = "\nHangs: yes\n" in path.read_text(encoding="utf-8")

    def _line(self, key: str) -> str:
        for line in self.path.read_text(encoding="utf-8").splitlines():
            if line.startswith(key + ": "):
                return line.removeprefix(key + ": ")
        raise Problem(f"{self.path.name} has no line '{key}: ...'")


def mutants() -> list[Mutant]:
    return [Mutant(path) for path in sorted((ROOT / "tests" / "mutants").glob("*.patch"))]


def is_python(test: str) -> bool:
    return "::" in test


class Tree:
    """One copy of the tree with its build folder."""

    def __init__(self, number: int) -> None:
        self.source = WORK / f"source{number}"
        self.build_folder = WORK / f"build{number}"

    def run(self, seconds: float, *words: object) -> int:
        """Run a command quietly; its code, or TIMED_OUT when it had to be ended."""
        environment = os.environ | {
            "PYTHONPATH": str(self.build_folder / "python"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "GP_TEST_OPS": "10000",
        }
        process = subprocess.Popen(
            [str(word) for word in words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self.source,
            env=environment,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return TIMED_OUT
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()

    def prepare(self) -> None:
        self.source.mkdir(parents=True, exist_ok=True)
        for folder in FOLDERS:
            self._refresh(ROOT / folder, self.source / folder)
        for file in FILES:
            self._copy(ROOT / file, self.source / file)
        words = ("cmake", "-S", self.source, "-B", self.build_folder, "-G", "Ninja")
        python = f"-DPython_EXECUTABLE={sys.executable}"
        if self.run(BUILD_SECONDS, *words, python, *OPTIONS, *FLAGS) != 0:
            raise Problem("cmake failed")

    @staticmethod
    def _copy(source: pathlib.Path, target: pathlib.Path) -> None:
        """Copy a file unless it is the same already, so that only what changed is built."""
        if not target.exists() or target.read_bytes() != source.read_bytes():
            shutil.copy(source, target)

    def _refresh(self, source: pathlib.Path, target: pathlib.Path) -> None:
        target.mkdir(exist_ok=True)
        names = {path.name for path in source.iterdir() if path.name != "__pycache__"}
        for path in target.iterdir():
            if path.name not in names:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name in names:
            if (source / name).is_dir():
                self._refresh(source / name, target / name)
            else:
                self._copy(source / name, target / name)

    def build(self, tests: list[str]) -> None:
        targets = [test for test in tests if not is_python(test)]
        if len(targets) < len(tests):
            targets.append("growpool_test_package")
        words = ("cmake", "--build", self.build_folder, "--parallel", WORKERS, "--target")
        if self.run(BUILD_SECONDS, *words, *targets) != 0:
            raise Problem("it does not build")

    def code_of(self, tests: list[str], seconds: float) -> int:
        """Run one C test, or Python tests in one go; 0 when all passed."""
        if not is_python(tests[0]):
            return self.run(seconds, self.build_folder / tests[0])
        words = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider")
        code = self.run(seconds, *words, *tests)
        if code in PYTEST_NO_VERDICT:
            raise Problem(f"pytest ran no test of {tests}")
        return code

    def patch(self, mutant: Mutant, *options: str) -> None:
        words = ("patch", "-p1", "-F0", "--no-backup-if-mismatch", *options, "-i", mutant.path)
        if self.run(BUILD_SECONDS, *words) != 0:
            raise Problem("it does not apply: make it anew")

    def missed_by(self, mutant: Mutant) -> list[str]:
        """Return the named tests that do not notice the mutant."""
        self.patch(mutant)
        try:
            self.build(mutant.tests)
            codes = {test: self.code_of([test], MUTANT_SECONDS) for test in mutant.tests}
        finally:
            self.patch(mutant, "-R")
        if TIMED_OUT in codes.values() and not mutant.hangs:
            raise Problem("a test did not come to an end, and the mutant has no line 'Hangs: yes'")
        return [test for test, code in codes.items() if code == 0]


class Judge:
    """Trees that work side by side on one list of mutants."""

    def __init__(self, chosen: list[Mutant]) -> None:
        self.waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
        for mutant in chosen:
            self.waiting.put(mutant)
        self.lock = threading.Lock()
        self.failures = 0

    def say(self, text: str, failures: int = 0) -> None:
        with self.lock:
            self.failures += failures
            print(text, flush=True)

    def judge(self, tree: Tree, mutant: Mutant) -> None:
        try:
            missed = tree.missed_by(mutant)
        except Problem as problem:
            self.say(f"{mutant.path.stem}: {problem}", 1)
            return
        verdict = f"MISSED by {', '.join(missed)}" if missed else "caught"
        self.say(f"{mutant.path.stem}: {mutant.breaks}: {verdict}", len(missed))

    def work(self, number: int, tests: list[str]) -> None:
        tree = Tree(number)
        try:
            tree.prepare()
            tree.build(tests)
            # One tree proves the tests for all; they differ in nothing.
            if number == 0:
                groups = [[test] for test in tests if not is_python(test)]
                groups += [python] if (python := [t for t in tests if is_python(t)]) else []
                for group in groups:
                    if tree.code_of(group, UNBROKEN_SECONDS) != 0:
                        raise Problem(f"{group} fails before anything was broken")
            while True:
                self.judge(tree, self.waiting.get_nowait())
        except queue.Empty:
            return
        except Problem as problem:
            self.say(str(problem), 1)


def main() -> int:
    parts = sys.argv[1:]
    chosen = [m for m in mutants() if not parts or any(part in m.path.stem for part in parts)]
    tests = sorted({test for mutant in chosen for test in mutant.tests})
    judge = Judge(chosen)
    threads = [
        threading.Thread(target=judge.work, args=(number, tests)) for number in range(WORKERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not judge.waiting.empty():
        judge.say("not every mutant was judged", 1)
    print(f"{len(chosen)} mutants, {judge.failures} problems")
    return min(judge.failures, 1)


if __name__ == "__main__":
    sys.exit(main())
