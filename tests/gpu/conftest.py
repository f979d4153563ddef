# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the GPU suite. A missing GPU is an error here, never a skip."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import growpool
import pytest
from cuda_driver import NON_BLOCKING, Counter, Gpu, Latch
from gpu_kit import DRIVER_NOISE, MIB, Supplier, wait_until


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} skipped: no skip is allowed here", red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    """Device 0, with everything that is made on first use made: kernels, streams, a pool."""
    gpu = Gpu()
    stream = gpu.create_stream()
    counter, latch = Counter(gpu), Latch(gpu)
    latch.open()
    with growpool.Pool("cuda:0") as pool:
        address = pool.malloc(MIB, stream)
        gpu.fill(stream, address, MIB, 1)
        gpu.verify(stream, address, MIB, 1, counter)
        gpu.delay(stream, 1000)
        latch.hold(stream)
        pool.free(address, stream)
    counter.check()
    counter.close()
    latch.close()
    gpu.destroy_stream(stream)
    return gpu


@pytest.fixture(autouse=True)
def device_memory_is_back(gpu: Gpu) -> Iterator[None]:
    """Every test gives back what it took, by the driver's count."""
    gpu.synchronize()
    before = gpu.free_memory()
    yield
    gc.collect()
    gpu.synchronize()
    assert wait_until(lambda: gpu.free_memory() >= before - DRIVER_NOISE, 5), (
        f"{(before - gpu.free_memory()) / MIB:.1f} MiB of device memory did not come back"
    )


@pytest.fixture
def new_stream(gpu: Gpu, device_memory_is_back: None) -> Iterator[Callable[..., int]]:
    """Makes streams that are destroyed after the test; pools must be closed by then."""
    made: list[int] = []

    def new(flags: int = NON_BLOCKING) -> int:
        made.append(gpu.create_stream(flags))
        return made[-1]

    yield new
    gpu.synchronize()
    for stream in made:
        gpu.destroy_stream(stream)


@pytest.fixture
def counter(gpu: Gpu, device_memory_is_back: None) -> Iterator[Counter]:
    counter = Counter(gpu)
    yield counter
    counter.close()


@pytest.fixture
def latch(gpu: Gpu, device_memory_is_back: None) -> Iterator[Latch]:
    latch = Latch(gpu)
    yield latch
    latch.close()


@pytest.fixture
def supplier() -> Iterator[Supplier]:
    supplier = Supplier()
    yield supplier
    assert not supplier.held, f"{len(supplier.held)} chunks were never returned"
