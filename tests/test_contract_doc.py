# SPDX-License-Identifier: Apache-2.0
"""docs/contract.md names the tests that hold each promise: they must exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROMISES = 10


def sections() -> dict[int, str]:
    """Return the text of each promise by its number."""
    text = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    parts = re.split(r"^## ", text, flags=re.M)[1:]
    return {int(part.split(".")[0]): part for part in parts if re.match(r"\d+\. ", part)}


def named_tests(section: str) -> list[tuple[Path, str]]:
    """Return (file, test) for each `path::test` in the list that ends a promise."""
    held = section.partition("Held by:")[2]
    pairs: list[tuple[Path, str]] = []
    for path, names in re.findall(r"^- `([^`]+)`: (.+?)(?=^- |\Z|^\n)", held, re.M | re.S):
        pairs += [(ROOT / path, name) for name in re.findall(r"`([^`]+)`", names)]
    return pairs


def is_test(path: Path, name: str) -> bool:
    """A function of pytest or of cmocka, or the id of a case in the file."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if path.suffix == ".c":
        return re.search(rf"\bTEST\w*\({name}\)|cmocka_unit_test\w*\(\s*{name}\b", text) is not None
    name, _, case = name.partition("[")
    made = re.search(rf"^(?:def {name}\(|{name} = )", text, re.M)
    return made is not None and case.rstrip("]") in text


def test_there_are_ten_promises() -> None:
    assert sorted(sections()) == list(range(1, PROMISES + 1))


@pytest.mark.parametrize("number", range(1, PROMISES + 1))
def test_a_promise_names_tests_that_exist(number: int) -> None:
    tests = named_tests(sections()[number])
    assert len(tests) >= 3, f"promise {number} names {len(tests)} tests"
    missing = [f"{path}::{name}" for path, name in tests if not is_test(path, name)]
    assert not missing, missing
