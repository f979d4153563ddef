# SPDX-License-Identifier: Apache-2.0
"""One option for the whole tree: which devices the contract suite (tests/contract) runs over."""

from __future__ import annotations

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
