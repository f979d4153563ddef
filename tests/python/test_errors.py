# SPDX-License-Identifier: Apache-2.0
"""growpool's exceptions: their family, their attributes, and that all of them pickle."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import growpool
import pytest
from helpers import PAGE

EXAMPLES: list[tuple[growpool.Error, dict[str, Any]]] = [
    (growpool.Error("a"), {}),
    (
        growpool.OutOfMemoryError("b", 1, 2, None, 3),
        {"size": 1, "physical": 2, "limit": None, "largest_free": 3},
    ),
    (
        growpool.LimitExceededError("c", 1, 2, 4, 3),
        {"size": 1, "physical": 2, "limit": 4, "largest_free": 3},
    ),
    (growpool.AddressSpaceError("d"), {}),
    (
        growpool.DriverError("e", 2, "CUDA_ERROR_OUT_OF_MEMORY", "cuMemCreate"),
        {"code": 2, "name": "CUDA_ERROR_OUT_OF_MEMORY", "call": "cuMemCreate"},
    ),
    (growpool.CaptureError("f"), {}),
    (growpool.PoolStateError("g", "closed"), {"reason": "closed"}),
]


@pytest.mark.parametrize(("error", "attributes"), EXAMPLES)
def test_errors_pickle_and_copy(error: growpool.Error, attributes: dict[str, Any]) -> None:
    error.extra = "kept"  # type: ignore[attr-defined]
    again = [pickle.loads(pickle.dumps(error, protocol)) for protocol in range(6)]
    for other in (*again, copy.copy(error), copy.deepcopy(error)):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert other.args == error.args == (str(error),)
        for name, value in {**attributes, "extra": "kept"}.items():
            assert getattr(other, name) == value


def test_the_family() -> None:
    assert issubclass(growpool.OutOfMemoryError, MemoryError)
    assert issubclass(growpool.LimitExceededError, growpool.OutOfMemoryError)
    assert issubclass(growpool.AddressSpaceError, MemoryError)
    assert not issubclass(growpool.AddressSpaceError, growpool.OutOfMemoryError)
    for kind in (growpool.DriverError, growpool.CaptureError, growpool.PoolStateError):
        assert issubclass(kind, RuntimeError)
    assert issubclass(growpool.ReleaseWarning, RuntimeWarning)
    assert all(isinstance(error, growpool.Error) for error, _ in EXAMPLES)


def test_errors_of_the_core_pickle() -> None:
    caught: list[growpool.Error] = []
    with growpool.Pool("host", limit=4 * PAGE, name="source") as pool:
        kept = pool.allocate(2 * PAGE)
        for call in (lambda: pool.allocate(4 * PAGE), lambda: pool.malloc(1 << 50)):
            try:
                call()
            except growpool.Error as error:
                caught.append(error)
        kept.close()
    try:
        pool.malloc(1)
    except growpool.Error as error:
        caught.append(error)
    assert len(caught) == 3
    for mine in caught:
        again = pickle.loads(pickle.dumps(mine))
        assert (type(again), str(again), vars(again)) == (type(mine), str(mine), vars(mine))


def test_messages_say_sizes_and_what_to_do() -> None:
    with growpool.Pool("host", limit=4 * PAGE, name="source") as pool:
        kept = pool.allocate(2 * PAGE)
        with pytest.raises(growpool.LimitExceededError) as caught:
            pool.allocate(4 * PAGE)
        text = str(caught.value)
        for part in ("source", "8 MiB", "4 MiB", "limit", "free blocks"):
            assert part in text
        kept.close()


def test_public_classes_say_that_they_are_growpools() -> None:
    for name in growpool.__all__:
        value = getattr(growpool, name)
        if isinstance(value, type):
            assert value.__name__ == name
            assert value.__doc__, name
    assert pickle.loads(pickle.dumps(growpool.Stats)) is growpool.Stats
