# SPDX-License-Identifier: Apache-2.0
"""What the contract suite needs of a device beside growpool itself: streams and captures.

Work is enqueued by growpool's own fills and copies, so every device does it in its own way: real
memory changes, and the simulated driver notes which addresses are in use.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Any

import growpool

MIB = 1 << 20
PAGE = 2 * MIB  # the granularity of every device so far; a test holds it against the device

_ordinals = itertools.count(900)


class Lab:
    """One device under test."""

    device = "host"
    has_contents = True
    has_captures = False

    def stream(self) -> Any:
        raise NotImplementedError

    def capture(self, stream: Any) -> Any:
        """Begins a capture; end(), launch(stream), close() as in tests/gpu/cuda_driver.py."""
        raise NotImplementedError

    def close(self) -> None:
        """Checks and ends whatever the lab made; all pools are closed by then."""


class HostLab(Lab):
    def __init__(self) -> None:
        self._streams: list[growpool.host.Stream] = []

    def stream(self) -> growpool.host.Stream:
        self._streams.append(growpool.host.Stream())
        return self._streams[-1]

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


class SimCapture:
    def __init__(self, lab: SimLab, stream: int) -> None:
        self._lab = lab
        self._stream = stream
        self._graph = 0
        lab.call("capture_begin", stream, 0)

    def end(self) -> None:
        self._graph = self._lab.call("capture_end_graph", self._stream)
        assert self._graph, "the capture was invalidated"

    def launch(self, stream: int) -> None:
        self._lab.call("graph_launch", self._graph, stream)

    def close(self) -> None:
        self._lab.call("graph_destroy", self._graph)
        self._lab.call("complete_all")


class SimLab(Lab):
    """The strict simulated driver: it has no contents, and aborts at every illegal call."""

    has_contents = False
    has_captures = True

    def __init__(self) -> None:
        self._ordinal = next(_ordinals)
        self.device = f"sim:{self._ordinal}"
        self._module: Any = growpool._core._sim  # type: ignore[attr-defined]

    def call(self, name: str, *arguments: int) -> Any:
        return getattr(self._module, name)(self._ordinal, *arguments)

    def stream(self) -> int:
        return int(self.call("stream_create", False))

    def capture(self, stream: int) -> SimCapture:
        return SimCapture(self, stream)

    def close(self) -> None:
        ledger = self.call("ledger")
        for name in ("reservation_count", "chunk_count", "mapping_count", "entered"):
            assert ledger[name] == 0, ledger
        assert self.call("violations") == (0, "")


class CudaCapture:
    """The kit's capture, over stream objects."""

    def __init__(self, gpu: Any, stream: growpool.cuda.Stream) -> None:
        from cuda_driver import GLOBAL, Capture

        self._capture = Capture(gpu, stream.handle, GLOBAL)
        self.end = self._capture.end
        self.close = self._capture.close

    def launch(self, stream: growpool.cuda.Stream) -> None:
        self._capture.launch(stream.handle)


class CudaLab(Lab):
    has_captures = True

    def __init__(self, device: str) -> None:
        sys.path.insert(0, str(Path(__file__).parent.parent / "gpu"))
        from cuda_driver import Gpu

        self.device = device
        self._gpu = Gpu(int(device.partition(":")[2]))
        self._streams: list[growpool.cuda.Stream] = []

    def stream(self) -> growpool.cuda.Stream:
        self._streams.append(growpool.cuda.Stream(self.device))
        return self._streams[-1]

    def capture(self, stream: growpool.cuda.Stream) -> CudaCapture:
        return CudaCapture(self._gpu, stream)

    def close(self) -> None:
        self._gpu.synchronize()
        for stream in self._streams:
            stream.close()


def make(device: str) -> Lab:
    if device == "host":
        return HostLab()
    return SimLab() if device == "sim" else CudaLab(device)


def expect(lab: Lab, memory: Any, *parts: tuple[int, int]) -> None:
    """The memory is these (byte, size) runs, one after the other."""
    got = bytearray(memory.nbytes)
    memory.copy_to(got)
    if lab.has_contents:
        assert got == b"".join(bytes([value]) * size for value, size in parts)


def gives_back(pool: growpool.Pool, *, down_to: int = 0) -> None:
    """Trims until no more than that is left; drivers tell of a graph's end a moment later."""
    end = time.monotonic() + 10
    while pool.stats.physical_bytes > down_to:
        pool.trim()
        assert time.monotonic() < end, pool.stats
    assert pool.stats.physical_bytes == down_to


def gives_addresses_back(pool: growpool.Pool, *, down_to: int) -> None:
    """Drains until no more addresses are left: the reaper may be about to free some of them."""
    end = time.monotonic() + 10
    while pool.stats.address_bytes > down_to:
        pool.drain()
        assert time.monotonic() < end, pool.stats
    assert pool.stats.address_bytes == down_to
