# SPDX-License-Identifier: Apache-2.0
"""Reads JUnit files and says in one line each how a suite went. A skip is a failure, and so is a
suite without tests.

usage: report.py NAME=FILE...
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def counts(path: Path) -> tuple[int, int, int, float]:
    """Tests, failures, skips and seconds of a JUnit file of pytest's or ctest's."""
    root = ElementTree.parse(path).getroot()
    cases = list(root.iter("testcase"))
    failed = sum(
        case.find("failure") is not None
        or case.find("error") is not None
        or case.get("status") == "fail"
        for case in cases
    )
    skipped = sum(
        case.find("skipped") is not None or case.get("status") in ("notrun", "disabled")
        for case in cases
    )
    return len(cases), failed, skipped, sum(float(case.get("time") or 0) for case in cases)


def main(arguments: list[str]) -> int:
    code = 0
    print(f"{'suite':28}  {'tests':>6}  {'failed':>6}  {'skipped':>7}  {'seconds':>8}")
    for argument in arguments:
        name, _, file = argument.partition("=")
        if not Path(file).exists():
            print(f"{name:28}  did not run")
            code = 1
            continue
        tests, failed, skipped, seconds = counts(Path(file))
        print(f"{name:28}  {tests:6}  {failed:6}  {skipped:7}  {seconds:8.1f}")
        if tests == 0 or failed or skipped:
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
