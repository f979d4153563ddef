# SPDX-License-Identifier: Apache-2.0
"""growpool.torch without PyTorch: its guards, and its logic with NumPy in PyTorch's place.

tests/gpu/test_gpu_torch.py has the same on a GPU with PyTorch itself.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import growpool
import growpool.torch
import numpy as np
import pytest
from growpool.torch import _versions
from helpers import PAGE, run_quietly


def stand_in(version: str) -> Any:
    """What growpool.torch uses of PyTorch, over NumPy."""
    torch: Any = types.ModuleType("torch")
    torch.__version__ = version
    torch.uint8, torch.float32 = np.dtype("uint8"), np.dtype("float32")
    torch.from_dlpack = np.from_dlpack
    return torch


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch = stand_in("2.11.0+cu130")
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


@pytest.fixture
def pool() -> Iterator[growpool.Pool]:
    with growpool.Pool("host", chunk_size=PAGE) as pool:
        yield pool


# ---- guards ----


def test_importing_it_imports_no_pytorch() -> None:
    told = run_quietly("import growpool.torch, sys; print('torch' in sys.modules)")
    assert told == "False\n"


def test_without_pytorch_it_says_what_to_install(pool: growpool.Pool) -> None:
    told = run_quietly(
        """
        import sys
        sys.modules["torch"] = None  # as if it were not there
        import growpool, growpool.torch
        pool = growpool.Pool("host")
        for call in (
            lambda: growpool.torch.tensor(pool.allocate(8)),
            lambda: growpool.torch.growable(pool, 8),
        ):
            try:
                call()
            except ImportError as error:
                print(error)
        """
    )
    assert told == "growpool.torch needs PyTorch: pip install torch\n" * 2


@pytest.mark.parametrize("version", ["2.10.1", "2.12.0a0", "1.13.1+cu117", "3.11.0", "strange"])
def test_other_versions_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setitem(sys.modules, "torch", stand_in(version))
    monkeypatch.delenv(_versions.SWITCH, raising=False)
    with pytest.raises(ImportError) as caught:
        _versions.import_torch()
    assert version in str(caught.value) and "2.11" in str(caught.value)
    monkeypatch.setenv(_versions.SWITCH, "untested")
    assert _versions.import_torch().__version__ == version


def test_a_pytorch_that_is_broken_says_so_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'sympy'", name="sympy")

    monkeypatch.setattr("importlib.import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="sympy"):
        _versions.import_torch()


# ---- tensors ----


def test_a_tensor_is_the_memory(torch: Any, pool: growpool.Pool) -> None:
    buffer = pool.allocate(64)
    whole = growpool.torch.tensor(buffer)
    assert growpool.torch.tensor(buffer, None, [4, 16]).shape == (4, 16)
    assert growpool.torch.tensor(buffer, None, np.int64(8)).shape == (8,)  # an int in another coat
    part = growpool.torch.tensor(buffer, torch.float32, (2, 3), offset=16)
    rest = growpool.torch.tensor(buffer, torch.float32, offset=40)
    assert whole.shape == (64,) and part.shape == (2, 3) and rest.shape == (6,)
    part[:] = 1.5
    assert bytes(whole[16:40]) == np.full(6, 1.5, "float32").tobytes()
    assert part.ctypes.data == buffer.handle + 16
    with pytest.raises(BufferError):
        buffer.close()
    with pytest.raises(ValueError, match="end behind"):
        growpool.torch.tensor(buffer, torch.float32, 20)
    del whole, part, rest
    buffer.close()
    with pytest.raises(growpool.PoolStateError):
        growpool.torch.tensor(buffer)


def test_a_tensor_over_a_part_of_a_range(torch: Any, pool: growpool.Pool) -> None:
    with pool.range(8 * PAGE) as pages:
        pages.commit(2 * PAGE, PAGE)
        part = growpool.torch.tensor(pages, torch.float32, 1000, offset=2 * PAGE)
        part[:] = 7
        with pytest.raises(ValueError, match="not all committed"):
            growpool.torch.tensor(pages, torch.float32, 1000, offset=PAGE)
        with pytest.raises(BufferError):
            pages.decommit(2 * PAGE, PAGE)
        del part
        pages.decommit(2 * PAGE, PAGE)


# ---- tensors that grow ----


def test_it_grows_in_place_and_keeps_what_it_has(torch: Any, pool: growpool.Pool) -> None:
    row = PAGE // 4  # elements
    with growpool.torch.growable(pool, (64, row), torch.float32) as grown:
        assert len(grown) == 0 and grown.tensor.shape == (0, row)
        grown.resize(3)
        first = grown.tensor
        first[:] = np.arange(3)[:, None]
        grown.resize(64)  # a live tensor does not keep it from growing
        second = grown.tensor
        assert second.shape == grown.shape == grown.max_shape == (64, row)
        assert second.ctypes.data == first.ctypes.data == grown.memory.handle
        assert (second[:3] == np.arange(3)[:, None]).all()
        assert grown.memory.physical_bytes == 64 * PAGE and grown.dtype == torch.float32
        del first, second


def test_live_tensors_keep_it_from_shrinking_below_them(torch: Any, pool: growpool.Pool) -> None:
    with growpool.torch.growable(pool, (8, PAGE // 4)) as grown:
        grown.resize(8)
        low, high = grown.tensor[:2], grown.tensor
        with pytest.raises(BufferError):
            grown.resize(4)
        assert len(grown) == 8
        with pytest.raises(BufferError):
            grown.close()
        del high
        with pytest.raises(BufferError):
            grown.resize(4)  # a slice keeps the whole tensor that it was cut from
        del low
        grown.resize(4)
        assert pool.stats.physical_bytes == 4 * PAGE and grown.tensor.shape == (4, PAGE // 4)
    assert "closed" in repr(grown)


def test_bad_shapes_and_lengths(torch: Any, pool: growpool.Pool) -> None:
    for shape in ((), (0, 4), (4, -1)):
        with pytest.raises(ValueError, match="dimensions of 1 and more"):
            growpool.torch.growable(pool, shape)
    with growpool.torch.growable(pool, 100) as grown:
        for length in (-1, 101):
            with pytest.raises(ValueError, match="not within 0 and 100"):
                grown.resize(length)
        assert len(grown) == 0 and "(0,) of (100,)" in repr(grown)


def test_a_limit_leaves_it_as_it_was(torch: Any) -> None:
    with (
        growpool.Pool("host", chunk_size=PAGE, limit=4 * PAGE) as pool,
        growpool.torch.growable(pool, (16, PAGE // 4)) as grown,
    ):
        grown.resize(3)
        grown.tensor[:] = 5
        with pytest.raises(growpool.LimitExceededError):
            grown.resize(5)
        assert len(grown) == 3 and (grown.tensor == 5).all()
