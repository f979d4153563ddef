# SPDX-License-Identifier: Apache-2.0
"""Builds what lies in tests/consumer as a user would: linked to nothing of growpool."""

from __future__ import annotations

import importlib.util
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import growpool

INCLUDE = Path(growpool.get_include())
CONSUMER = Path(__file__).resolve().parents[1] / "consumer"


def build(name: str, folder: Path) -> Path:
    """The shared object made of ``tests/consumer/NAME.c``."""
    module = folder / f"{name}.so"
    flags = "-std=c11 -D_GNU_SOURCE -O1 -fPIC -shared -pthread -Wall -Wextra -Werror".split()
    folders = [f"-I{sysconfig.get_path('include')}", f"-I{INCLUDE}"]
    command = ["gcc", *flags, *folders, str(CONSUMER / f"{name}.c"), "-o", str(module)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return module


def load(path: str | Path) -> ModuleType:
    """Import the extension module at that path."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded
