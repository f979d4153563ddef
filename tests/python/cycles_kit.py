# SPDX-License-Identifier: Apache-2.0
"""What the tests of cycles share: books that notice a collection, and a collector in a hurry."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import growpool
import pytest
from helpers import Supplier, eventually


@pytest.fixture(autouse=True, params=[1, 700], ids="threshold {}".format)
def eager_collector(request: pytest.FixtureRequest) -> Iterator[int]:
    """Collect at almost every allocation, and as a program usually does."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()  # what is there is not the test's: collections are quick
    gc.set_threshold(request.param)
    yield request.param
    gc.set_threshold(*before)


class Ledger(Supplier):
    """Also checks that no garbage collection runs free."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.collecting = threading.local()
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        self.collecting.now = phase == "start"

    def free(self, chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
        if getattr(self.collecting, "now", False):
            self.problems.append("free ran inside a garbage collection")
        super().free(chunk, size, device, stream)

    def done(self) -> None:
        """Everything came back once, and nothing was odd."""
        gc.collect()
        eventually(lambda: self.given and self.taken == self.given)
        assert self.out == []
        assert self.problems == []


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    ledger = Ledger()
    yield ledger
    gc.callbacks.remove(ledger._note)
