# SPDX-License-Identifier: Apache-2.0
"""The benchmark as a program: every host row with tiny counts, its verdicts, its refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import growpool
import pytest
from growpool import __main__ as command
from growpool._bench import _native, growth, once, peers, report, timing
from growpool._bench.hot import against
from growpool._bench.rows import GIB, MIB, Context, NotHere, Reading, Result, Row, Target, run_row

HOST_ROWS = ["pair-c", "pair-int", "pair-buffer", "threads", "callback", "copies", "sizes"]
HOST_ROWS += ["range-pages", "bookkeeping"]
HOST_ROWS += ["host-grow", "host-append"]


def bench(*arguments: str) -> int:
    return command.main(["bench", "--device", "host", "--quick", *arguments])


def test_every_host_row_runs_and_the_json_says_so(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    assert bench("--rows", ",".join(HOST_ROWS), "--json", str(file)) == 0
    told = json.loads(file.read_text(encoding="utf-8"))
    assert [row["row"] for row in told["rows"]] == HOST_ROWS
    for row in told["rows"]:
        assert row["error"] == "" and row["verdict"] == "", row
        assert row["readings"] and all(reading["value"] for reading in row["readings"]), row
    assert told["machine"]["cores"] >= 1 and told["machine"]["device"] == "host"


def test_a_row_for_a_gpu_says_that_there_is_none(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    assert bench("--rows", "first-16", "--json", str(file)) == 0
    (row,) = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert row["verdict"] == "no GPU" and row["readings"] == []


def test_an_unknown_row_is_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--rows", "pair-c,nonsense") == 2
    told = capsys.readouterr().err
    assert "no row nonsense" in told and all(name in told for name in HOST_ROWS)


def test_without_rich_help_works_and_a_run_says_what_to_install() -> None:
    code = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'rich' else find(name, *more)\n"
        "from growpool.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    start = [sys.executable, "-c", code, "bench"]
    helped = subprocess.run([*start, "--help"], capture_output=True, text=True)
    assert helped.returncode == 0 and "--rows" in helped.stdout
    refused = subprocess.run([*start, "--device", "host"], capture_output=True, text=True)
    assert refused.returncode == 2 and "pip install growpool[bench]" in refused.stderr


@pytest.mark.parametrize(
    ("reading", "verdict"),
    [
        (Reading("x", 1.0, "s", target=Target("<=", 1.0, "s")), "met"),
        (Reading("x", 1.1, "s", target=Target("<=", 1.0, "s")), "missed"),
        (Reading("x", 9.0, "s", 3.0, "y", Target(">=", 3, "times")), "met"),
        (Reading("x", 9.0, "s", 2.9, "y", Target(">=", 3, "times")), "missed"),
        (Reading("x", 9.0, "s", None, "y", Target(">=", 3, "times")), "peer missing"),
        (Reading("x", None, "s", target=Target("<=", 1.0, "s")), "peer missing"),
        (Reading("x", None, "s"), "peer missing"),
        (Reading("x", None, "s", absent="no room"), "no room"),
        (Reading("x", 1.0, "s"), ""),
    ],
)
def test_verdicts_are_computed(reading: Reading, verdict: str) -> None:
    assert reading.verdict == verdict


def test_a_peer_that_is_not_installed_is_shown_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "is_here", lambda module: False)
    figures, why = peers.torch_pairs(0, "expandable", 1)
    assert figures == {} and "torch is not installed" in why
    assert against("PyTorch", figures.get("get"), why, 1.0, 20).verdict == "peer missing"
    found = peers.in_new_processes({"PyTorch": ("peer_torch", "default", "first", 0, MIB)}, 2)
    assert found["PyTorch"].figures == [] and "not installed" in found["PyTorch"].why
    for value, reason in peers.pairs(Context("cuda:0"), 1, 1).values():
        assert value is None and "not installed" in reason


def test_players_in_new_processes_take_turns_and_trouble_is_their_own() -> None:
    found = peers.in_new_processes(
        {
            "mine": ("once", "callback", "host", 4 * MIB),
            "inner": ("once", "built-in", "host", 4 * MIB),
            "ill": ("once", "built-in", "nonsense:0", 4 * MIB),
        },
        2,
    )
    for name in ("mine", "inner"):
        assert len(found[name].figures) == 2 and not found[name].why
        assert (found[name].median("get") or 0) >= (found[name].least("get") or 1) > 0
    assert found["ill"].figures == [] and "nonsense" in found["ill"].why
    assert found["ill"].median("get") is None


def test_turns_change_their_order() -> None:
    assert list(timing.turns(["a", "b"], 3)) == ["a", "b", "a", "b", "a", "b"]
    assert list(timing.turns(["a", "b", "c"], 3)) == [*"abc", *"acb", *"cab"]


def canned(module: str, *arguments: object) -> tuple[dict[str, float], str]:
    """What processes would say of a device that is not here."""
    if "async" in arguments:
        return {}, "no such backend"
    slow = 25.0 if module == "peer_torch" else 1.1 if "floor" not in arguments else 1.0
    names = ("get", "back", "get again", "back again", "took")
    return {**dict.fromkeys(names, slow), "peak": slow * 16 * GIB}, ""


def test_first_blocks_are_held_against_the_floor_and_the_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "child", canned)
    monkeypatch.setattr(peers, "is_here", lambda module: True)
    monkeypatch.setattr(growth, "need", lambda context, size: None)
    monkeypatch.setattr(once, "chunks_of", lambda device, size: [size])
    monkeypatch.setattr(once, "steps_of", lambda device, size: [size])
    told = {one.player: one for one in growth.first(16 * GIB, Context("cuda:0", quick=True))}
    assert told["get: growpool, Python callback"].verdict == "met"
    assert told["trim: growpool, Python callback"].ratio == pytest.approx(1.1)
    assert told["get: PyTorch expandable_segments"].ratio == pytest.approx(25 / 1.1)
    assert told["get: PyTorch expandable_segments"].verdict == "met"
    assert told["get: PyTorch cudaMallocAsync"].value is None
    assert told["get again: floor"].verdict == ""
    told = {one.player: one for one in growth.growable(Context("cuda:0", quick=True))}
    assert told["growpool growable, peak physical"].verdict == "missed"
    assert told["PyTorch, copying"].verdict == "met"
    assert told["PyTorch cudaMallocAsync, peak physical"].value is None


def test_a_row_that_raises_keeps_its_traceback_and_the_others_go_on() -> None:
    def broken(context: Context) -> list[Reading]:
        raise ZeroDivisionError("on purpose")

    def absent(context: Context) -> list[Reading]:
        raise NotHere("needs 100 GiB")

    context = Context("host")
    result = run_row(Row("a", "breaks", ("host",), broken), context)
    assert result.verdict == "error" and "on purpose" in result.error
    result = run_row(Row("b", "has no room", ("host",), absent), context)
    assert result.verdict == "not here: needs 100 GiB" and result.error == ""


def test_a_broken_row_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from growpool._bench import hot

    def broken(context: Context) -> list[Reading]:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(hot, "ROWS", [Row("broken", "breaks", ("host",), broken), *hot.ROWS])
    assert bench("--rows", "broken,pair-c") == 1


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (6e-8, "s", "60 ns"),
        (3e-6, "s", "3 us"),
        (0.0123, "s", "12.3 ms"),
        (2.0, "s", "2 s"),
        (16.0 * (1 << 30), "B", "16.00 GiB"),
        (None, "s", "-"),
    ],
)
def test_figures_have_units(value: float | None, unit: str, text: str) -> None:
    assert report.value_text(value, unit) == text


def test_json_of_nothing_is_well_formed() -> None:
    row = Row("a", "nothing", ("host",), lambda context: [])
    assert json.loads(report.as_json([Result(row)], Context("host")))["rows"][0]["readings"] == []


def test_native_functions_refuse_bad_arguments_and_leave_no_block() -> None:
    with growpool.Pool("host", limit="4 MiB") as pool, growpool.host.Stream() as stream:
        for call in (
            lambda: _native.pair(pool, 0, stream.id, 1),
            lambda: _native.pair(pool, MIB, stream.id, 0),
            lambda: _native.fill(pool, MIB, stream.id, -1),
            lambda: _native.threads(pool, MIB, [], 1),
            lambda: _native.host_floor([], False),
            lambda: _native.host_floor([0], False),
            lambda: _native.host_copy(0, 0, 1, 1),
            lambda: _native.touch(0, 1),
            lambda: _native.touch_new(0),
            lambda: _native.cuda_memory(-1),
        ):
            with pytest.raises(ValueError):
                call()
        with pytest.raises(TypeError):
            _native.pair(object(), MIB, 0, 1)  # type: ignore[arg-type]
        for call in (
            lambda: _native.pair(pool, 5 * MIB, stream.id, 1),
            lambda: _native.fill(pool, MIB, stream.id, 5),
            lambda: _native.threads(pool, 5 * MIB, [stream.id, 0], 1),
            lambda: _native.pair(pool, MIB, 1 << 40, 1),
        ):
            with pytest.raises(RuntimeError):
                call()
        with pytest.raises(OSError):
            _native.host_floor([4096], False)
        assert pool.stats.used_bytes == 0


def test_native_functions_measure_and_leave_no_block() -> None:
    with growpool.Pool("host") as pool, growpool.host.Stream() as stream:
        assert _native.pair(pool, MIB, stream.id, 10) > 0
        assert min(_native.fill(pool, MIB, stream.id, 10)) > 0
        assert _native.threads(pool, MIB, [stream.id, 0, 0], 10) > 0
        assert min(_native.host_floor([2 * MIB, 4 * MIB], True)) > 0
        assert pool.stats.used_bytes == 0
