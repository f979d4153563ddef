# SPDX-License-Identifier: Apache-2.0
"""How results are shown: a table, JSON with the machine's facts, plots. It measures nothing."""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
from typing import Any

import growpool
from growpool._bench.rows import Context, Reading, Result


def value_text(value: float | None, unit: str) -> str:
    """A figure for people: ns, us, ms or s; KiB to GiB; millions a second."""
    if value is None:
        return "-"
    if unit == "s":
        for scale, name in ((1e-9, "ns"), (1e-6, "us"), (1e-3, "ms")):
            if abs(value) < 1000 * scale:
                return f"{value / scale:.3g} {name}"
        return f"{value:.3g} s"
    if unit == "B":
        return (
            f"{value / (1 << 30):.2f} GiB" if value >= 1 << 30 else f"{value / (1 << 20):.1f} MiB"
        )
    if unit == "B/s":
        return f"{value / 1e9:,.0f} GB/s" if value >= 1e11 else f"{value / 1e9:.1f} GB/s"
    if unit == "/s":
        return f"{value / 1e6:.2f} M/s"
    return f"{value:.3g} {unit}".rstrip()


def target_text(reading: Reading) -> str:
    """The target in words, times in readable units."""
    target = reading.target
    if target is None:
        return ""
    if not reading.ratio_to and reading.unit == "s":
        word = "at most" if target.comparison == "<=" else "at least"
        return f"{word} {value_text(target.bound, 's')} {target.what.removeprefix('s ')}"
    return target.text()


def table(results: list[Result], context: Context) -> None:
    console_module: Any = importlib.import_module("rich.console")
    table_module: Any = importlib.import_module("rich.table")
    text_module: Any = importlib.import_module("rich.text")
    console = console_module.Console()
    if not console.is_terminal:
        console = console_module.Console(width=170)  # a file or a pipe has room
    shown = table_module.Table(title=f"growpool {growpool.__version__} on {context.device}")
    for heading in ("row", "player", "median", "least", "ratio", "target", "verdict"):
        shown.add_column(heading)
    colours = {"met": "green", "missed": "red", "peer missing": "yellow", "error": "bold red"}
    for result in results:
        name = f"{result.row.name}: {result.row.work}"
        if result.verdict:
            style = colours.get(result.verdict, "yellow")
            why = result.error.strip().splitlines()[-1] if result.error else ""
            verdict = text_module.Text(result.verdict, style=style)
            shown.add_row(name, text_module.Text(why), "", "", "", "", verdict)
        for reading in result.readings:
            ratio = f"{reading.ratio:.3g} of {reading.ratio_to}" if reading.ratio else ""
            verdict = reading.verdict
            note = f" ({reading.note})" if reading.note else ""
            shown.add_row(
                name,
                text_module.Text(reading.player + note),
                value_text(reading.value, reading.unit),
                value_text(reading.least, reading.unit) if reading.least is not None else "",
                ratio,
                target_text(reading),
                text_module.Text(verdict, style=colours.get(verdict, "")),
            )
            name = ""
        shown.add_section()
    console.print(shown)


def _line_of(path: str, pattern: str) -> str:
    try:
        found = re.search(pattern, pathlib.Path(path).read_text(encoding="utf-8"), re.M)
    except OSError:
        return ""
    return found.group(1).strip() if found else ""


def machine(context: Context) -> dict[str, object]:
    """What the figures depend on: machine, driver, versions, day."""
    facts: dict[str, object] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _line_of("/proc/cpuinfo", r"^model name\s*:\s*(.*)$") or platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "growpool": growpool.__version__,
        "device": context.device,
    }
    for package in ("torch", "cupy-cuda13x", "cupy-cuda12x", "cuda-core", "rmm", "numpy"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if context.is_cuda:
        facts["gpu"] = _gpu()
    return facts


def _gpu() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError) as problem:
        return f"unknown: {problem}"


def as_json(results: list[Result], context: Context) -> str:
    rows = [
        {
            "row": result.row.name,
            "work": result.row.work,
            "verdict": result.verdict,
            "error": result.error,
            "seconds": result.seconds,
            "readings": [
                {
                    **dataclasses.asdict(reading),
                    "target": target_text(reading),
                    "verdict": reading.verdict,
                }
                for reading in result.readings
            ],
        }
        for result in results
    ]
    whole = {"machine": machine(context), "rows": rows, "plots": context.plots}
    return json.dumps(whole, indent=1)


def plots(context: Context, folder: str) -> list[str]:
    """Draw the curves that rows left; returns the files."""
    if not context.plots:
        return []
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    files = []
    for title, curves in context.plots.items():
        figure, axes = pyplot.subplots()
        for label, points in curves.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
        axes.set(title=title, xscale="log", yscale="log")
        axes.legend()
        path = pathlib.Path(folder, re.sub(r"\W+", "-", title).strip("-") + ".png")
        figure.savefig(path)
        pyplot.close(figure)
        files.append(str(path))
    return files
