# SPDX-License-Identifier: Apache-2.0
"""Breaks growpool on purpose, one patch of tests/mutants at a time; the named tests must fail.

Works on a copy of the tree under build/mutants, where every test must pass before any is broken.
"""

import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "mutants"
SOURCE, BUILD = WORK / "source", WORK / "build"
FOLDERS = ("backing", "sync", "vmm", "python", "tests")
SECONDS = 120


def run(*command: object, quiet: bool = True) -> int:
    output = subprocess.DEVNULL if quiet else None
    words = [str(word) for word in command]
    try:
        return subprocess.run(
            words, stdout=output, stderr=output, timeout=SECONDS, cwd=SOURCE
        ).returncode
    except subprocess.TimeoutExpired:
        return -1


def build(tests: list[str]) -> bool:
    command = ["cmake", "--build", BUILD, "--parallel", "2", "--target", *tests]
    return subprocess.run(command, stdout=subprocess.DEVNULL, cwd=SOURCE).returncode == 0


def prepare() -> None:
    SOURCE.mkdir(parents=True, exist_ok=True)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, SOURCE / folder, dirs_exist_ok=True)
    for file in ("CMakeLists.txt", "pyproject.toml"):
        shutil.copy2(ROOT / file, SOURCE / file)
    options = ("-DGROWPOOL_TESTING=ON", "-DGROWPOOL_BUILD_TESTS=ON", "-DCMAKE_C_FLAGS=-w")
    if run("cmake", "-S", SOURCE, "-B", BUILD, "-G", "Ninja", *options, quiet=False) != 0:
        sys.exit("cmake failed")


def header(patch: pathlib.Path, key: str) -> str:
    for line in patch.read_text().splitlines():
        if line.startswith(key + ": "):
            return line.removeprefix(key + ": ")
    sys.exit(f"{patch.name} has no line '{key}: ...'")


def main() -> int:
    patches = sorted((ROOT / "tests" / "mutants").glob("*.patch"))
    wanted = sorted({test for patch in patches for test in header(patch, "Caught-by").split()})
    prepare()
    if not build(wanted):
        sys.exit("the tests do not build")
    for test in wanted:
        if run(BUILD / test) != 0:
            sys.exit(f"{test} fails before anything was broken")
    missed = 0
    for patch in patches:
        tests = header(patch, "Caught-by").split()
        if run("patch", "-p1", "-i", patch) != 0:
            sys.exit(f"{patch.name} does not apply: make it anew")
        try:
            if not build(tests):
                sys.exit(f"{patch.name} does not build")
            alive = [test for test in tests if run(BUILD / test) == 0]
        finally:
            run("patch", "-p1", "-R", "-i", patch)
        missed += len(alive)
        verdict = "caught by " + ", ".join(tests) if not alive else "MISSED by " + ", ".join(alive)
        print(f"{patch.stem}: {header(patch, 'Breaks')}: {verdict}", flush=True)
    print(f"{len(patches)} mutants, {missed} missed")
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
