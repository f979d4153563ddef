# SPDX-License-Identifier: Apache-2.0
"""Arguments and objects that are wrong in ways that once passed, crashed, or were not told of."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import growpool
import pytest
from helpers import run_python, run_quietly

Pool = growpool.Pool
Stream = growpool.host.Stream

HUGE = 10**5000  # more digits than an int may be shown with


# ---- names and numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", [1 << 70, 1, (1, 2), None, b"limit"])
@pytest.mark.parametrize("kind", ["Pool", "DeviceBacking", "CachingBacking", "host.Stream"])
def test_keywords_that_are_no_text(kind: str, name: object) -> None:
    output = run_quietly(
        f"""
        import growpool
        try:
            growpool.{kind}(**{{{name!r}: 2}})
        except TypeError as error:
            print(error)
        """
    )
    assert "keywords must be strings" in output


@pytest.mark.parametrize("size", [HUGE, -HUGE], ids=["huge", "minus huge"])
def test_sizes_of_thousands_of_digits(pool: Pool, size: int) -> None:
    calls: list[Callable[[], object]] = [
        lambda: pool.malloc(size),
        lambda: pool.malloc(0, stream=size),
        lambda: pool.set_limit(size),
        lambda: Pool(size),
        lambda: pool.free(size),
        lambda: growpool.Chunk.create(size, "host"),
        lambda: growpool.Chunk.create("2 MiB", size),
    ]
    for call in calls:
        with pytest.raises((OverflowError, ValueError)) as caught:
            call()
        assert "digits" not in str(caught.value)


def test_the_stream_protocol_with_thousands_of_digits(sim: Any) -> None:
    with Pool(sim.device) as pool:
        for answer in ((HUGE, 0), (0, HUGE), (0, -HUGE), (HUGE,)):
            stream = SimpleNamespace(__cuda_stream__=answer)
            with pytest.raises((TypeError, ValueError, OverflowError)) as caught:
                pool.malloc(10, stream)
            assert "digits" not in str(caught.value)


def test_the_stream_protocol_with_a_bool(sim: Any) -> None:
    with Pool(sim.device) as pool, pytest.raises(TypeError, match="not bool"):
        pool.malloc(10, SimpleNamespace(__cuda_stream__=(0, True)))


@pytest.mark.parametrize("size", ["0.5 B", "1.5", ".1", "2.0000000000000000000001", "7.25b"])
def test_fractions_of_a_byte(size: str) -> None:
    with pytest.raises(ValueError, match="whole bytes or have a unit"):
        Pool("host", limit=size)


@pytest.mark.parametrize(
    ("size", "limit"),
    [
        ("1.0", 1),
        ("3. B", 3),
        ("0" * 100 + "4 MiB", 4 << 20),
        ("1.5" + "0" * 200 + " KiB", 1536),
        (" " * 100 + "8 KB" + " " * 100, 8000),
        ("1.1 KiB", 1126),
    ],
)
def test_unusual_but_right_sizes(size: str, limit: int) -> None:
    assert Pool("host", limit=size).limit == limit


def test_long_sizes_that_are_wrong() -> None:
    with pytest.raises(OverflowError, match="does not fit into an address"):
        Pool("host", limit="9" * 100)
    with pytest.raises(ValueError, match="such as '8 GiB'"):
        Pool("host", limit="1" * 100 + " XiB")
    with pytest.raises(ValueError, match="such as '8 GiB'"):
        Pool("host", limit="8\0 GiB")


@pytest.mark.parametrize("kind", [growpool.DeviceBacking, growpool.HostNumaBacking])
def test_backings_without_parameters(kind: type) -> None:
    with pytest.raises(TypeError, match=f"^{kind.__name__}\\(\\) takes at most 0 positional"):
        kind(1)


# ---- objects as devices and streams --------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mps", "xpu", "", "CUDA"])
def test_a_device_of_another_kind(kind: str) -> None:
    with pytest.raises(ValueError, match="only 'cuda' and 'cpu'"):
        Pool(SimpleNamespace(type=kind, index=0))


class Broken:
    """A stream and a device whose own code fails."""

    @property
    def cuda_stream(self) -> int:
        return int(self.no_such_thing)  # type: ignore[attr-defined]

    index = cuda_stream


def test_an_attribute_error_inside_a_property_is_told(sim: Any) -> None:
    with Pool(sim.device) as pool, pytest.raises(TypeError) as caught:
        pool.malloc(10, Broken())
    assert isinstance(caught.value.__cause__, AttributeError)
    assert "no_such_thing" in str(caught.value.__cause__)
    with pytest.raises(TypeError) as caught:
        Pool(Broken())
    assert "no_such_thing" in str(caught.value.__cause__)


def test_an_object_without_the_attributes_has_no_cause(sim: Any) -> None:
    with Pool(sim.device) as pool, pytest.raises(TypeError) as caught:
        pool.malloc(10, object())
    assert caught.value.__cause__ is None


# ---- host streams --------------------------------------------------------------------------------


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("close", [False, True])
def test_an_exception_nobody_asked_for_is_reported(unraisable: list[Any], close: bool) -> None:
    stream = Stream()
    done = threading.Event()
    stream.submit(lambda: 1 / 0)
    stream.submit(done.set)
    assert done.wait(20)
    if close:
        stream.close()
    assert unraisable == []
    del stream
    end = time.monotonic() + 10
    while not unraisable and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert [type(error) for error in unraisable] == [ZeroDivisionError]


def test_an_exception_in_a_cycle_with_its_stream_is_reported(unraisable: list[Any]) -> None:
    def run() -> None:
        stream = Stream()
        done = threading.Event()

        def work() -> None:
            assert stream is not None
            raise KeyError("cyclic")

        stream.submit(work)
        stream.submit(done.set)
        assert done.wait(20)
        stream.close()

    run()
    end = time.monotonic() + 10
    while not unraisable and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert [type(error) for error in unraisable] == [KeyError]


def test_an_exception_that_was_raised_is_not_reported_again(unraisable: list[Any]) -> None:
    stream = Stream()
    stream.submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        stream.synchronize()
    del stream
    gc.collect()
    assert unraisable == []


def test_the_with_block_puts_the_body_first(unraisable: list[Any]) -> None:
    work = ZeroDivisionError("work")
    with pytest.raises(KeyError), Stream() as stream:
        stream.submit(lambda: _raise(work))
        raise KeyError("body")
    assert unraisable == [work]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_the_with_block_lets_the_end_of_the_program_through(
    unraisable: list[Any], kind: type[BaseException]
) -> None:
    work, body = kind(), KeyError("body")
    with pytest.raises(kind) as caught, Stream() as stream:
        stream.submit(lambda: _raise(work))
        raise body
    assert caught.value is work
    assert caught.value.__context__ is body
    assert unraisable == []


# ---- the end of the process ----------------------------------------------------------------------


def test_a_task_that_never_ends_delays_the_exit_little() -> None:
    start = time.monotonic()
    run_quietly(
        """
        import growpool, threading
        stream = growpool.host.Stream()
        started = threading.Event()
        stream.submit(lambda: (started.set(), threading.Event().wait()))
        assert started.wait(10)
        """
    )
    assert time.monotonic() - start < 4  # with the start of Python; it waited for 5 s once


def test_a_stream_alive_at_exit_reports_its_exception() -> None:
    result = run_python(
        """
        import growpool, threading
        stream = growpool.host.Stream()
        done = threading.Event()
        stream.submit(lambda: 1 / 0)
        stream.submit(done.set)
        assert done.wait(10)
        """
    )
    assert result.returncode == 0
    assert "ZeroDivisionError" in result.stderr


# ---- pickling ------------------------------------------------------------------------------------


class MyError(growpool.OutOfMemoryError):
    """Another signature."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__("mine", size=first)
        self.second = second


class MyWarning(growpool.ReleaseWarning):
    """Another signature."""

    def __init__(self, message: str, second: int) -> None:
        super().__init__(message)
        self.second = second


class SlotError(growpool.DriverError):
    """An attribute in a slot."""

    __slots__ = ("third",)


def test_subclasses_pickle_and_copy() -> None:
    slotted = SlotError("slots", 2)
    slotted.third = 3
    for error in (MyError(1, 2), MyWarning("warned", 2), slotted):
        pickled = [pickle.loads(pickle.dumps(error, protocol)) for protocol in range(6)]
        for other in (*pickled, copy.copy(error), copy.deepcopy(error)):
            assert type(other) is type(error)
            assert other.args == error.args
            assert vars(other) == vars(error)
            assert getattr(other, "third", None) == getattr(error, "third", None)


def test_a_name_may_be_left_out_as_none() -> None:
    with growpool.Pool("host", name=None) as pool:
        assert pool.name == ""
