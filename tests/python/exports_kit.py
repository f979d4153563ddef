# SPDX-License-Identifier: Apache-2.0
"""What the tests of exports share: memory of each kind, and uses of it by something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import growpool
from dlpack_reader import Taken
from helpers import PAGE

Pool = growpool.Pool


class Export:
    """One use of memory by something else: ``end()`` ends it."""

    def __init__(self, memory: Any, how: str) -> None:
        self.how = how
        self.thing: Any
        if how == "view":
            self.thing = memory.view(memory.nbytes)
        elif how == "memoryview":
            self.thing = memoryview(memory)
        else:
            self.thing = Taken(memory.__dlpack__())

    def end(self) -> None:
        if self.how == "view":
            self.thing.close()
        elif self.how == "memoryview":
            self.thing.release()
        else:
            self.thing.delete()
        self.thing = None


def make_buffer(pool: Pool) -> growpool.Memory:
    return pool.allocate(2 * PAGE)


def make_growable(pool: Pool) -> growpool.Memory:
    growable = pool.growable(8 * PAGE)
    growable.resize(2 * PAGE)
    return growable


def make_range(pool: Pool) -> growpool.Memory:
    sparse = pool.range(2 * PAGE)
    sparse.commit(0, 2 * PAGE)
    return sparse


MAKERS = [make_buffer, make_growable, make_range]
Maker = Callable[[Pool], Any]
