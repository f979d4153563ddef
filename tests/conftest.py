# SPDX-License-Identifier: Apache-2.0
"""For the whole tree: over which devices the contract suite (tests/contract) runs, and garbage."""

from __future__ import annotations

import gc

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--contract-devices",
        default="host,sim",
        help="devices for tests/contract, separated by commas: host, sim, cuda:0",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "contract_device" in metafunc.fixturenames:
        devices = metafunc.config.getoption("--contract-devices").split(",")
        metafunc.parametrize("contract_device", devices)


def pytest_collection_finish() -> None:
    """Keep the thousands of tests themselves out of every garbage collection that a test makes."""
    gc.collect()
    gc.freeze()
