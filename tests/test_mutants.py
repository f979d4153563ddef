# SPDX-License-Identifier: Apache-2.0
"""That the mutants fit the tree: `make mutants` proves the rest, when it is asked to."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PATCHES = sorted((ROOT / "tests" / "mutants").glob("*.patch"))


def line(patch: Path, key: str) -> str:
    found = re.search(rf"^{key}: (.+)$", patch.read_text(encoding="utf-8"), re.M)
    assert found, f"no line '{key}: ...'"
    return found.group(1)


def test_there_are_mutants() -> None:
    assert len(PATCHES) >= 20


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: str(patch.stem))
def test_a_mutant_applies_and_names_tests_that_exist(patch: Path) -> None:
    words = ("patch", "-p1", "-F0", "--dry-run", "--force", "--silent", "-i", str(patch))
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"make it anew: {result.stdout}"
    assert patch.read_text(encoding="utf-8").count("\n@@ ") == 1, "a mutant breaks one place"
    assert line(patch, "Breaks")
    for test in line(patch, "Caught-by").split():
        file, separator, name = test.partition("::")
        if not separator:
            assert (ROOT / "tests" / "c" / f"{file}.c").exists(), f"there is no C test {file}"
            continue
        text = (ROOT / file).read_text(encoding="utf-8")
        named = re.search(rf"^(def {re.escape(name)}\(|{re.escape(name)} = )", text, re.M)
        assert named, f"{file} has no {name}"
