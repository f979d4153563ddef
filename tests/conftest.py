# SPDX-License-Identifier: Apache-2.0
"""The whole tree's options: the contract suite's devices, and emergency mode."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "python"))
import emergency


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--contract-devices",
        default="host,sim",
        help="devices for tests/contract, separated by commas: host, sim, cuda:0",
    )


def pytest_configure() -> None:
    emergency.begin()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return emergency.is_not_for(collection_path.name)


def pytest_collection_finish() -> None:
    """Leave what pytest has made by now to itself: tests collect garbage thousands of times."""
    gc.collect()
    gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "contract_device" in metafunc.fixturenames:
        devices = metafunc.config.getoption("--contract-devices").split(",")
        metafunc.parametrize("contract_device", devices)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = emergency.left_out(items)
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
