# SPDX-License-Identifier: Apache-2.0
"""Streams of the host device: Python callables that a worker thread runs in order."""

from __future__ import annotations

from growpool._core import HostStream as Stream

__all__ = ["Stream"]
