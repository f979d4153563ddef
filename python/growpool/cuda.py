# SPDX-License-Identifier: Apache-2.0
"""A minimal CUDA stream, for tests and demos on machines without another CUDA library."""

from __future__ import annotations

from growpool._core import CudaStream as Stream

__all__ = ["Stream"]
