# SPDX-License-Identifier: Apache-2.0
"""Tensors over memory that growpool owns.

WORDS. A tensor here is a view: it pins the part of the memory that it shows, as every export does,
and while it lives that part can be neither closed nor shrunk. It goes through DLPack, so PyTorch's
current stream is ordered behind what was enqueued on the memory before, and the pool waits for
every stream of the device before it unmaps memory that PyTorch saw: PyTorch does not say which
streams it used.

WHY A FRESH VIEW EACH TIME. A tensor's shape is its own, so one that was made before the memory grew
does not grow with it. Making one costs microseconds; that the old ones pin is what keeps a shrink
from taking memory from under them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from growpool import Buffer, Growable, Pool, Range
from growpool.torch._versions import import_torch


def tensor(
    memory: Buffer | Growable | Range,
    dtype: Any = None,
    shape: int | Sequence[int] | None = None,
    *,
    offset: int = 0,
) -> Any:
    """A tensor over the memory, or over a part of it; nothing is copied.

    Parameters
    ----------
    memory : Buffer, Growable or Range
        Of a range the part must be committed.
    dtype : torch.dtype, optional
        ``torch.uint8`` if left out.
    shape : int or sequence of int, optional
        All elements behind `offset`, in one dimension, if left out.
    offset : int, optional
        Bytes in front of the first element, a multiple of the element's size.

    Returns
    -------
    torch.Tensor
        While it or anything made of it lives, its part of the memory stays.

    Raises
    ------
    ImportError
        No PyTorch, or one that growpool was not tested with.
    ValueError
        It would end behind the memory; a part is not committed; an odd offset; no such dtype.
    PoolStateError
        The memory is closed.

    Notes
    -----
    Any thread.
    """
    torch = import_torch()
    kind = torch.uint8 if dtype is None else dtype
    if shape is None:
        shape = max(memory.nbytes - offset, 0) // kind.itemsize
    elif isinstance(shape, Sequence):
        shape = tuple(shape)
    return torch.from_dlpack(memory.view(shape, kind, offset=offset))


class GrowableTensor:
    """A tensor whose first dimension grows and shrinks in place: made by :func:`growable`.

    Its address never changes, so growing copies nothing. A context manager: leaving it closes.
    """

    def __init__(self, memory: Growable, max_shape: tuple[int, ...], dtype: Any) -> None:
        self._memory = memory
        self._max_shape = max_shape
        self._dtype = dtype
        self._row = math.prod(max_shape[1:]) * dtype.itemsize  # bytes of one entry

    @property
    def tensor(self) -> Any:
        """A fresh view of the present length; see the module about what it pins."""
        return tensor(self._memory, self._dtype, self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """What ``tensor`` has now."""
        return (len(self), *self._max_shape[1:])

    @property
    def max_shape(self) -> tuple[int, ...]:
        """What it can grow to."""
        return self._max_shape

    @property
    def dtype(self) -> Any:
        """The elements' ``torch.dtype``."""
        return self._dtype

    @property
    def memory(self) -> Growable:
        """The memory below, for ``physical_bytes`` and ``record_stream()``."""
        return self._memory

    def __len__(self) -> int:
        return int(self._memory.size // self._row)

    def resize(self, length: int) -> None:
        """Set the length of the first dimension; entries below the smaller length stay.

        Growing maps chunks behind the old ones; what new entries contain is undefined. Shrinking
        gives whole chunks back once all work that may use them is done.

        Raises
        ------
        ValueError
            More than ``max_shape`` allows, or negative.
        BufferError
            Shrinking, while a tensor or anything made of it shows a page that would go.
        LimitExceededError, OutOfMemoryError
            There is no memory for the new entries; the length is as before.

        Notes
        -----
        Any thread, one at a time. PyTorch's current stream counts as the one that uses the new
        entries first, or the old ones last.
        """
        if not 0 <= length <= self._max_shape[0]:
            raise ValueError(f"a length of {length} is not within 0 and {self._max_shape[0]}")
        self._memory.resize(length * self._row, current_stream(self._memory))

    def close(self) -> None:
        """Give the memory back; a second call does nothing. BufferError while tensors live."""
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._memory.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        shown = "closed" if self._memory.is_closed else f"{self.shape} of {self._max_shape}"
        return f"<growpool.torch.GrowableTensor: {shown}, {self._dtype}, on {self._memory.device}>"


def current_stream(memory: Pool | Growable) -> Any:
    """PyTorch's current stream of the device; None on the host."""
    if not memory.device.startswith("cuda:"):
        return None
    return import_torch().cuda.current_stream(memory.device_id)


def growable(pool: Pool, max_shape: int | Sequence[int], dtype: Any = None) -> GrowableTensor:
    """A tensor that grows in place along its first dimension; empty at first.

    Parameters
    ----------
    pool : Pool
        Of a CUDA device or of the host.
    max_shape : int or sequence of int
        What it can grow to: so many addresses are reserved, which cost no memory.
    dtype : torch.dtype, optional
        ``torch.float32`` if left out.

    Returns
    -------
    GrowableTensor

    Raises
    ------
    ImportError
        No PyTorch, or one that growpool was not tested with.
    ValueError
        A shape without elements.
    AddressSpaceError
        There are not so many addresses.
    PoolStateError
        The pool is closed.

    Notes
    -----
    Any thread. PyTorch's current stream becomes its own stream.
    """
    torch = import_torch()
    kind = torch.float32 if dtype is None else dtype
    shape = tuple(max_shape) if isinstance(max_shape, Sequence) else (max_shape,)
    if not shape or min(shape) < 1:
        raise ValueError(f"a growable tensor needs dimensions of 1 and more, not {shape}")
    size = math.prod(shape) * kind.itemsize
    return GrowableTensor(pool.growable(size, stream=current_stream(pool)), shape, kind)
