# SPDX-License-Identifier: Apache-2.0
"""What growpool raises. Every class can be pickled, its attributes included."""

from __future__ import annotations

from typing import Any


class Error(Exception):
    """Base of growpool's own exceptions."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from the attributes: the arguments of the constructor are more than ``args``."""
        return _reduce(self)


def _reduce(error: Exception) -> tuple[Any, ...]:
    """Describe an error for pickle without its constructor: a subclass may change the signature."""
    return (_rebuild, (type(error), error.args, object.__getstate__(error)))


def _rebuild(kind: type[Exception], arguments: tuple[Any, ...], state: Any) -> Exception:
    error = BaseException.__new__(kind, *arguments)
    error.args = arguments
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    error.__dict__.update(attributes or {})
    for name, value in (slots or {}).items():
        setattr(error, name, value)
    return error


class OutOfMemoryError(Error, MemoryError):
    """The backing has no more memory; what it raised is the ``__cause__``.

    Attributes
    ----------
    size : int
        Bytes asked for.
    physical : int
        Bytes that the pool held when it failed.
    limit : int or None
        The pool's limit.
    largest_free : int
        Bytes of the largest free range of the pool when it failed.
    """

    def __init__(
        self,
        message: str = "",
        size: int = 0,
        physical: int = 0,
        limit: int | None = None,
        largest_free: int = 0,
    ) -> None:
        super().__init__(message)
        self.size = size
        self.physical = physical
        self.limit = limit
        self.largest_free = largest_free


class LimitExceededError(OutOfMemoryError):
    """The pool's limit leaves no room, even after reclaiming all that is idle."""


class AddressSpaceError(Error, MemoryError):
    """No range of virtual addresses is left. Physical memory may well be."""


class DriverError(Error, RuntimeError):
    """The device refused a call, or there is no such device on this machine.

    Attributes
    ----------
    code : int
        The driver's result (``CUresult``, or errno on the host); 0 when no call was made.
    name : str
        The driver's name for it, such as ``CUDA_ERROR_INVALID_VALUE``.
    call : str
        The driver's function, such as ``cuMemMap``.
    """

    def __init__(self, message: str = "", code: int = 0, name: str = "", call: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.name = name
        self.call = call


class CaptureError(Error, RuntimeError):
    """A capture is in the way: it would have to be waited for, or its graph uses the memory."""


class PoolStateError(Error, RuntimeError):
    """The object is in no state for the call.

    Attributes
    ----------
    reason : str
        ``closed``, ``forked``, ``poisoned``, ``exiting``, or ``in_use`` (of a chunk).
    """

    def __init__(self, message: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class ReleaseWarning(RuntimeWarning):
    """A ``free`` callback raised; the chunk is in ``Pool.unreturned``."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from the attributes, as the errors do."""
        return _reduce(self)
