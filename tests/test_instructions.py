# SPDX-License-Identifier: Apache-2.0
"""Instructions of the C hot paths, counted by callgrind: the speed check that noise cannot break.

They depend on the compiler, so figures are kept for each version of gcc. Record them anew, after
a change that is meant, with ``python tests/test_instructions.py --record``.
"""

from __future__ import annotations

import json
import math
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "library"
RECORDED = ROOT / "tests" / "instructions.json"
CASES = ("pair", "pair-live", "miss", "miss-live", "cross", "record")
COUNT = 2000  # what happens once, such as the first call of each function, weighs a thousandth
BOUND = 0.05
STRANGE_BOUND = 0.25  # for a compiler without figures of its own


def tool(name: str) -> str:
    beside = Path(sys.prefix) / "bin" / name
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found, f"{name} is missing: tools/setup.sh test brings it"
    return found


def run(*command: object) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def program() -> Path:
    """The program, built as the C library is for its users."""
    options = ("-DCMAKE_C_COMPILER=gcc", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}")
    run(tool("cmake"), "-S", ROOT, "-B", BUILD, "-G", "Ninja", *options)
    run(tool("cmake"), "--build", BUILD, "--parallel", "2", "--target", "bench_hot_path")
    return BUILD / "bench_hot_path"


def compiler() -> str:
    version = run("gcc", "-dumpversion").split(".")[0].strip()
    return f"gcc {version} {platform.machine()}"


def count(binary: Path, case: str, rounds: int = COUNT) -> float:
    """Instructions of one round of the case."""
    name = "count_" + case.removesuffix("-live")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        run(
            tool("valgrind"),
            "--tool=callgrind",
            f"--toggle-collect={name}",
            f"--callgrind-out-file={out}",
            binary,
            case,
            rounds,
        )
        found = re.search(r"^(?:summary|totals): (\d+)", out.read_text(), re.M)
    assert found, "callgrind counted nothing"
    return int(found[1]) / rounds


def figures() -> tuple[dict[str, float], float, str]:
    """What to compare with, how closely, and why so."""
    recorded = json.loads(RECORDED.read_text())
    mine = compiler()
    if mine in recorded:
        return recorded[mine], BOUND, mine
    name = max(recorded)
    return recorded[name], STRANGE_BOUND, f"{mine}, for which nothing is recorded; {name} is near"


@pytest.fixture(scope="module")
def binary() -> Path:
    return program()


@pytest.mark.parametrize("case", CASES)
def test_a_hot_path_costs_what_it_cost(binary: Path, case: str) -> None:
    expected, bound, name = figures()
    counted = count(binary, case)
    assert abs(counted / expected[case] - 1) <= bound, (
        f"{case}: {counted:.0f} instructions, recorded are {expected[case]:.0f} ({name}). "
        "If that is meant: python tests/test_instructions.py --record"
    )


def test_cost_grows_no_faster_than_the_logarithm_of_what_lives(binary: Path) -> None:
    """Blocks of eight sizes, all alive at once, freed in no order; times are cache misses too."""
    few, many = 300, 30_000
    grown = count(binary, "fill", many) / count(binary, "fill", few)
    assert grown <= math.log(many) / math.log(few), f"{grown:.2f} times the instructions"


if __name__ == "__main__":
    if sys.argv[1:] != ["--record"]:
        sys.exit("usage: python tests/test_instructions.py --record")
    kept = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    built = program()
    kept[compiler()] = {case: round(count(built, case), 1) for case in CASES}
    RECORDED.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    print(json.dumps(kept[compiler()], indent=1))
