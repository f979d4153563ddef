# SPDX-License-Identifier: Apache-2.0
"""Which PyTorch this works with. The only place that imports it."""

from __future__ import annotations

import importlib
import os
import re
from typing import Any

TESTED = ((2, 11),)  # on an H200, driver 580.159
SWITCH = "GROWPOOL_TORCH"


def import_torch() -> Any:
    """The module ``torch``, imported when it is first asked for.

    Raises
    ------
    ImportError
        It is not installed, or another version than those that growpool was tested with. The
        environment's ``GROWPOOL_TORCH=untested`` lets every version pass.
    """
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError("growpool.torch needs PyTorch: pip install torch") from None
    version = str(torch.__version__)
    found = re.match(r"(\d+)\.(\d+)", version)
    known = found is not None and (int(found[1]), int(found[2])) in TESTED
    if not known and os.environ.get(SWITCH) != "untested":
        tested = ", ".join(f"{major}.{minor}" for major, minor in TESTED)
        raise ImportError(
            f"growpool.torch was tested with PyTorch {tested}, and {version} is installed; install "
            f"one of those, or set {SWITCH}=untested in the environment to try this one"
        )
    return torch
