# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the Python tests. What needs the simulated device fails without a testing build."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import growpool
import pytest
from helpers import Supplier, eventually
from misbehaviour_kit import World, check_ledger

_ordinals = itertools.count()


class Sim:
    """One simulated device, new for each test: ``sim.launch(stream, address, bytes)`` and so on."""

    def __init__(self, module: Any, ordinal: int) -> None:
        self._module = module
        self.ordinal = ordinal
        self.device = f"sim:{ordinal}"
        self.device_id = -2 - ordinal

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._module, name)
        return lambda *args: function(self.ordinal, *args)

    def stream(self, blocking: bool = False) -> int:
        """Make a stream and return its handle."""
        return int(self.stream_create(blocking))

    @property
    def state(self) -> SimpleNamespace:
        """The ledger by attribute."""
        return SimpleNamespace(**self.ledger())


def new_sim() -> Sim:
    module = getattr(growpool._core, "_sim", None)
    if module is None:
        pytest.fail("the simulated device is in testing builds only: put build/testing first")
    return Sim(module, next(_ordinals))


def check_sim(device: Sim) -> None:
    gc.collect()
    eventually(lambda: device.state.entered == 0)  # a chunk that `free` forgot is let go after it
    assert device.violations() == (0, "")


@pytest.fixture
def sim() -> Iterator[Sim]:
    """A simulated device; the test fails if anything is left in its ledger at the end."""
    device = new_sim()
    yield device
    check_sim(device)


@pytest.fixture
def sims() -> Iterator[list[Sim]]:
    """Four simulated devices."""
    devices = [new_sim() for _ in range(4)]
    yield devices
    for device in devices:
        check_sim(device)


@pytest.fixture
def supplier() -> Iterator[Supplier]:
    """Callbacks that keep books; every chunk must be back at the end unless the test says so."""
    supplier = Supplier()
    yield supplier
    if supplier.must_be_empty:
        assert supplier.out == []
        assert supplier.taken == supplier.given


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The exceptions that sys.unraisablehook was given."""
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: seen.append(told.exc_value))
    yield seen
    seen.clear()  # they refer to the frames that they went through, and so to chunks


@pytest.fixture
def pool(supplier: Supplier) -> Iterator[growpool.Pool]:
    """A host pool fed by the supplier, closed at the end."""
    pool = growpool.Pool("host", alloc=supplier.alloc, free=supplier.free, name="test")
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def one_sim() -> Sim:
    """One simulated device for all cells of a matrix: each leaves it empty."""
    return new_sim()


@pytest.fixture
def world(device: str, one_sim: Sim) -> Iterator[World]:
    """A pool of a matrix's cell, on the host or on the simulated device."""
    world = World(one_sim.device if device == "sim" else device, one_sim)
    gc.disable()  # what a collection lets go would blur the counts of references
    yield world
    gc.enable()
    world.books.behave()
    if world.pool is not None:
        world.pool.close()
    world.drop()
    check_ledger(one_sim)
