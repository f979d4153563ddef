# SPDX-License-Identifier: Apache-2.0
"""What the tests of signals share: a signal that strikes from inside a call, and a busy stream."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import growpool
import pytest
from helpers import PAGE


class Striker:
    """Sends the main thread a signal from inside the next call that detaches from the interpreter.

    With a switch interval that never ends, the thread that sends it gets the GIL only when the main
    thread lets go of it: once the call is under way, and no sooner.
    """

    def __init__(self) -> None:
        self.raised: list[BaseException] = []
        self.before_raising: Callable[[], Any] = lambda: None
        self._threads: list[threading.Thread] = []

    def handler(self, number: int, frame: FrameType | None) -> None:
        self.before_raising()
        self.raised.append(KeyboardInterrupt("struck"))
        raise self.raised[-1]

    def __call__(self) -> None:
        ready, go = threading.Event(), threading.Event()
        main = threading.get_ident()

        def strike() -> None:
            ready.set()
            go.wait()
            signal.pthread_kill(main, signal.SIGALRM)

        thread = threading.Thread(target=strike)
        thread.start()
        self._threads.append(thread)
        ready.wait()
        sys.setswitchinterval(1000)
        go.set()

    def check(self, caught: pytest.ExceptionInfo[BaseException]) -> None:
        """It was the handler's exception, as it was raised, and every strike hit."""
        sys.setswitchinterval(0.005)
        for thread in self._threads:
            thread.join()
        assert len(self.raised) == len(self._threads)
        assert caught.value is self.raised[-1]
        assert (caught.value.__cause__, caught.value.__context__) == (None, None)
        assert caught.traceback[-1].name == "handler"
        assert ctypes.pythonapi.PyGILState_Check() == 1
        caught.value.__traceback__ = None


class Busy:
    """A stream with work in front of which everything waits, until release()."""

    def __init__(self, device: str, sim: Any) -> None:
        self.sim = None if device == "host" else sim
        self.device = device if self.sim is None else self.sim.device
        if self.sim is None:
            self.go = threading.Event()
            self.stream: Any = growpool.host.Stream()
        else:
            self.sim.set_wait_completes(False)
            self.stream = self.sim.stream()

    def work(self, address: int) -> None:
        """Work on a page of memory that ends with release()."""
        if self.sim is not None:
            self.sim.launch(self.stream, address, PAGE)
            return

        def task() -> None:
            assert self.go.wait(30)
            ctypes.memset(address, 1, PAGE)

        self.stream.submit(task)

    def release(self) -> None:
        if self.sim is None:
            self.go.set()
            self.stream.synchronize()
        else:
            self.sim.complete_all()
            self.sim.set_wait_completes(True)
