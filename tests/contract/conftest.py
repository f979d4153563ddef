# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the contract suite: a device under test, and a backing that keeps books."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import growpool
import lab as labs
import pytest


class Supplier:
    """Callbacks that keep books, refuse when told to, and want every chunk back."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.lock = threading.Lock()
        self.out: list[growpool.Chunk] = []
        self.given = 0
        self.refusals = 0  # how many requests to come are refused
        self.error: BaseException | None = None  # raised instead of an answer
        self.allowed: int | None = None  # so many chunks are still given before any of that

    def alloc(self, size: int, device: int, stream: int) -> growpool.Chunk | None:
        if self.allowed:
            self.allowed -= 1
        elif self.error is not None:
            raise self.error
        elif self.allowed == 0:
            return None
        if self.refusals > 0:
            self.refusals -= 1
            return None
        chunk = growpool.Chunk.create(size, self.device)
        assert chunk.device_id == device
        with self.lock:
            self.out.append(chunk)
            self.given += 1
        return chunk

    def free(self, chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
        assert chunk.size == size and chunk.device_id == device
        with self.lock:
            self.out.remove(chunk)

    @property
    def bytes_out(self) -> int:
        with self.lock:
            return sum(chunk.size for chunk in self.out)

    def pool(self, **options: Any) -> growpool.Pool:
        return growpool.Pool(self.device, alloc=self.alloc, free=self.free, **options)


@pytest.fixture
def lab(contract_device: str) -> Iterator[labs.Lab]:
    lab = labs.make(contract_device)
    yield lab
    gc.collect()
    lab.close()


@pytest.fixture
def supplier(lab: labs.Lab) -> Iterator[Supplier]:
    supplier = Supplier(lab.device)
    yield supplier
    gc.collect()
    assert supplier.out == [], "chunks that never came back"


@pytest.fixture
def pool(supplier: Supplier) -> Iterator[growpool.Pool]:
    """Exact: every page is a chunk of its own."""
    with supplier.pool(chunk_size=labs.PAGE, name="contract") as pool:
        yield pool
