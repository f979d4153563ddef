# SPDX-License-Identifier: Apache-2.0
"""What several test files use: callbacks that keep books, waiting, Python in another process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable

import emergency
import growpool

MIB = 1 << 20
PAGE = 2 * MIB


class Supplier:
    """alloc and free that count: a chunk is out from a successful alloc to a successful free."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.out: list[growpool.Chunk] = []
        self.given = 0
        self.taken = 0
        self.calls: list[tuple[str, int, int, int]] = []
        self.threads: set[int] = set()
        self.must_be_empty = True

    def alloc(self, size: int, device: int, stream: int) -> growpool.Chunk | None:
        chunk = growpool.Chunk.create(size, device)
        with self._lock:
            self.calls.append(("alloc", size, device, stream))
            self.threads.add(threading.get_ident())
            self.out.append(chunk)
            self.given += 1
        return chunk

    def free(self, chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
        with self._lock:
            self.calls.append(("free", size, device, stream))
            self.threads.add(threading.get_ident())
            assert chunk.size == size
            assert chunk.device_id == device
            self.out.remove(chunk)  # ValueError when it came twice
            self.taken += 1

    @property
    def out_bytes(self) -> int:
        with self._lock:
            return sum(chunk.size for chunk in self.out)


def eventually(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until the condition holds; fail when it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this did not come true in time"
        time.sleep(0.002)


def run_python(
    code: str, *, timeout: float = 30.0, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter, under a watchdog that prints every thread's stack and ends it.

    The watchdog is a signal: it needs no lock of the interpreter, and forked children do not
    inherit it.
    """
    watchdog = (
        "import faulthandler, signal\n"
        "faulthandler.register(signal.SIGALRM, chain=True)\n"
        f"signal.setitimer(signal.ITIMER_REAL, {timeout - 5})\n"
    )
    if emergency.IS_ON:
        watchdog += "import growpool\ngrowpool._core._testing.emergency(True)\n"
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        [os.path.dirname(os.path.dirname(growpool.__file__)), os.path.dirname(__file__)]
    )
    return subprocess.run(
        [sys.executable, "-W", "error", *options, "-c", watchdog + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        check=False,
    )


def run_quietly(code: str, *, timeout: float = 30.0, options: tuple[str, ...] = ()) -> str:
    """Run code in a new interpreter; it must end with 0 and write nothing to stderr."""
    result = run_python(code, timeout=timeout, options=options)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr
    return result.stdout
