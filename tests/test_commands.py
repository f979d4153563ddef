# SPDX-License-Identifier: Apache-2.0
"""What the README promises a reader works: its example, and the demo, each in its own process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"


def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def test_the_examples_in_the_readme_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    assert blocks
    for block in blocks:
        done = run("-c", block)
        assert re.search("limit|released_bytes", done.stdout)
        assert done.stderr == ""


def test_the_demo_tells_its_story_on_the_host() -> None:
    done = run("-m", "growpool", "demo", "--device", "host")
    assert done.stderr == ""
    assert "LimitExceededError" in done.stdout
    steps = re.findall(r"^(\d)\. ", done.stdout, re.M)
    assert steps == list("12345678")
    assert done.stdout.rstrip().endswith("Every check held; all 22 chunks went back.")


def test_the_demo_works_without_rich_and_without_unicode() -> None:
    code = (
        "import sys; sys.stdout.reconfigure(encoding='ascii')\n"
        "sys.modules['rich.console'] = None\n"
        "from growpool.__main__ import main; sys.exit(main(['demo', '--device', 'host']))"
    )
    done = run("-c", code)
    assert done.stdout.isascii()
    assert "####" in done.stdout


def test_a_broken_promise_ends_the_demo_with_a_failure() -> None:
    code = (
        "import sys; from growpool import _demo\n"
        "_demo.HostWork.fill = lambda self, stream, buffer, value: None\n"
        "sys.exit(_demo.run('host'))"
    )
    done = run("-c", code, code=1)
    assert "demo failed: this should hold and does not: every byte" in done.stderr


@pytest.mark.parametrize("device", ["nonsense", "cuda:99", "cuda:x", ""])
def test_a_device_that_is_not_there_is_named(device: str) -> None:
    done = run("-m", "growpool", "demo", "--device", device, code=1)
    assert done.stderr.startswith("demo failed: ")
    assert "Traceback" not in done.stderr


def test_without_a_command_there_is_help() -> None:
    assert "demo" in run("-m", "growpool").stdout
    assert "usage" in run("-m", "growpool", "nonsense", code=2).stderr
