# SPDX-License-Identifier: Apache-2.0
"""What the GPU tests share beside fixtures: a backing that keeps the books, and bounded waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import growpool

MIB = 1 << 20
# What the driver itself may take or let go of between two readings: channels of new streams, say.
DRIVER_NOISE = 32 * MIB


class Supplier:
    """A backing in Python that keeps the books: chunks it made, and chunks it got back."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.held: list[growpool.Chunk] = []
        self.made = 0
        self.made_bytes = 0
        self.freed = 0
        self.freed_bytes = 0

    def alloc(self, size: int, device: int, stream: int) -> growpool.Chunk:
        chunk = growpool.Chunk.create(size, device)
        with self.lock:
            self.held.append(chunk)
            self.made += 1
            self.made_bytes += size
        return chunk

    def free(self, chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
        assert chunk.size == size
        with self.lock:
            self.held.remove(chunk)
            self.freed += 1
            self.freed_bytes += size

    def pool(self, **options: Any) -> growpool.Pool:
        return growpool.Pool("cuda:0", alloc=self.alloc, free=self.free, **options)


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True
