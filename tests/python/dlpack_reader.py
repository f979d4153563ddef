# SPDX-License-Identifier: Apache-2.0
"""A DLPack consumer in ctypes: it reads the struct as the specification lays it out."""

from __future__ import annotations

import ctypes
from typing import Any


class Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("id", ctypes.c_int32)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Legacy(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


_api = ctypes.pythonapi
_api.PyCapsule_GetName.restype = ctypes.c_char_p
_api.PyCapsule_GetName.argtypes = [ctypes.py_object]
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_SetName.restype = ctypes.c_int
_api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]

_USED = {b"dltensor": b"used_dltensor", b"dltensor_versioned": b"used_dltensor_versioned"}
#: Both call without the interpreter's lock, as a library in C++ may do.
DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Taken:
    """A tensor that was taken over; delete() ends it, once."""

    def __init__(self, capsule: Any) -> None:
        name = _api.PyCapsule_GetName(capsule)
        self.pointer = _api.PyCapsule_GetPointer(capsule, name)
        self.versioned = name == b"dltensor_versioned"
        assert _api.PyCapsule_SetName(capsule, _USED[name]) == 0
        layout = Versioned if self.versioned else Legacy
        self.managed: Any = layout.from_address(self.pointer)
        self.tensor: Tensor = self.managed.tensor
        self._deleter = DELETER(self.managed.deleter)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape[i] for i in range(self.tensor.ndim))

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(self.tensor.strides[i] for i in range(self.tensor.ndim))

    @property
    def type(self) -> tuple[int, int, int]:
        return (self.tensor.code, self.tensor.bits, self.tensor.lanes)

    @property
    def device(self) -> tuple[int, int]:
        return (self.tensor.device.kind, self.tensor.device.id)

    def delete(self) -> None:
        """Call the deleter; ctypes lets go of the interpreter meanwhile."""
        self._deleter(self.pointer)
