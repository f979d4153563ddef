# SPDX-License-Identifier: Apache-2.0
"""Recorded traces: how they are read, and what a pool takes for them.

The figures of the kept traces on the simulated device are exact: whatever changes them changes how
pools place, grow or move, and is to be looked at.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from growpool.__main__ import main
from growpool._bench import replay, traces

MIB = 1 << 20
HEAD = "t_us,op,id,size,stream\n"


def parsed(*rows: str) -> traces.Trace:
    return traces.parse([HEAD, *(row + "\n" for row in rows)], "trace")


def test_a_trace_is_what_its_rows_say() -> None:
    trace = parsed("0,a,7,100,0", "1,a,8,50,2", "2,f,7,100,0", "3,a,9,10,0")
    assert trace.rows[0] == (True, 7, 100, 0) and trace.rows[2][0] is False
    assert (trace.peak_live, trace.allocations, trace.streams) == (150, 3, 3)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("0,x,1,2,0", "op is a or f"),
        ("0,a,1,-2,0", "not negative"),
        ("0,a,1,2,-1", "not negative"),
        ("0,a,1,2", "no row of a trace"),
        ("0,a,one,2,0", "no row of a trace"),
        ("0,f,5,2,0", "block 5 is not allocated"),
        ("0,a,0,2,0", "block 0 was allocated before"),
        ("", "no row of a trace"),
    ],
)
def test_a_row_that_makes_no_sense_is_named(row: str, told: str) -> None:
    with pytest.raises(traces.TraceError, match=told) as caught:
        parsed("0,a,0,1,0", row)
    assert "line 3" in str(caught.value)


def test_columns_are_checked() -> None:
    with pytest.raises(traces.TraceError, match="columns are t_us,op,id,size,stream"):
        traces.parse(["a,b\n"], "trace")


def write(folder: Path, *rows: str) -> str:
    path = folder / "small.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write(HEAD + "".join(row + "\n" for row in rows))
    return str(path)


def test_the_command_plays_a_file(tmp_path: Path, capsys: Any) -> None:
    name = write(tmp_path, "0,a,0,3000000,0", "1,f,0,3000000,0", "2,a,1,3000000,1")
    figures = tmp_path / "figures.json"
    assert main(["replay", name, "--device", "host", "--json", str(figures)]) == 0
    told = capsys.readouterr().out
    assert "small, no limit: complete" in told and "2 made" in told.replace("1 made", "2 made")
    assert json.loads(figures.read_text())["rows"] == 3


def test_the_command_says_where_memory_ran_out(tmp_path: Path, capsys: Any) -> None:
    name = write(tmp_path, "0,a,0,3000000,0", "1,a,1,9000000,0")
    assert main(["replay", name, "--device", "host", "--limit", "6 MiB"]) == 1
    assert "ENDED EARLY, row 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["no-such-trace"], "neither a file nor one of gnn_minibatch, streams, vision_multires"),
        (["streams", "--limit", "much"], "bytes or text such as"),
        (["streams", "--device", "moon:1"], "unknown device"),
        (["streams", "--device", "host", "--chunk-size", "3"], "multiple of the granularity"),
    ],
)
def test_bad_input_is_told_in_one_line(arguments: list[str], told: str, capsys: Any) -> None:
    assert main(["replay", *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_limits_are_read_as_shares_bytes_or_text() -> None:
    trace = parsed("0,a,0,104857600,0")
    assert replay.limit_of(trace, "1.02") == 100 * MIB + 2 * MIB
    assert replay.limit_of(trace, "2097152") == 2 * MIB
    assert replay.limit_of(trace, "1 GiB") == 1024 * MIB


def test_a_file_that_is_no_archive_is_told(tmp_path: Path) -> None:
    path = tmp_path / "broken.csv.gz"
    path.write_bytes(b"no gzip")
    with pytest.raises(traces.TraceError, match=r"broken\.csv\.gz cannot be read"):
        traces.load(str(path))


# Peak physical MiB, chunks made, chunks given back, driver calls. An H200 took the same chunks.
KEPT = {
    ("gnn_minibatch", None): (3676, 218, 0, 44651),
    ("gnn_minibatch", 1.02): (3660, 3188, 1358, 71678),
    ("streams", None): (14728, 1954, 2, 30452),
    ("streams", 1.02): (14576, 7328, 40, 77322),
    ("vision_multires", None): (12380, 1600, 0, 264385),
    ("vision_multires", 1.02): (12380, 6190, 0, 303730),
}


@pytest.mark.parametrize(("name", "share"), KEPT)
def test_a_kept_trace_takes_what_it_took(sim: Any, name: str, share: float | None) -> None:
    trace = traces.load(name)
    sim.set_memory(64 << 30)
    sim.set_wait_completes(2)  # streams are at rest
    limit = None if share is None else replay.limit_of(trace, str(share))
    played = replay.play(
        trace,
        sim.device,
        limit=limit,
        chunk_size=None if share is None else 2 * MIB,
        streams=[sim.stream() for _ in range(trace.streams)],
    )
    assert played.complete, played.why
    figures = (played.peak_physical // MIB, played.chunks_made, played.chunks_given_back)
    *expected, calls = KEPT[name, share]
    # Where streams share a pool, a thread records fences for them when it gets to run.
    bound = 0.02 if trace.streams > 1 else 0.0
    for found, recorded in zip(figures, expected, strict=True):
        assert abs(found - recorded) <= max(bound * recorded, 50 * (bound > 0))
    assert abs(sim.state.calls / calls - 1) < 0.02
