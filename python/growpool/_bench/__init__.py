# SPDX-License-Identifier: Apache-2.0
"""The benchmark behind ``python -m growpool bench``: chooses rows, runs them, shows the results."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import sys
import time
from typing import Any


def run(
    device: str | None = None,
    rows: str | None = None,
    json_file: str | None = None,
    plots_folder: str | None = None,
    *,
    touch: bool = True,
    quick: bool = False,
) -> int:
    """Run the rows and return the exit code: 1 when a row raised, 2 for wrong arguments."""
    wanted = ["rich", "matplotlib"] if plots_folder else ["rich"]
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        needed = " and ".join(missing)
        print(f"the benchmark needs {needed}: pip install growpool[bench]", file=sys.stderr)
        return 2

    import growpool
    from growpool._bench import copies, growth, host, hot, replay, report, sizes, timing
    from growpool._bench.rows import Context, Row, run_row

    modules = (hot, growth, copies, replay, sizes, host)
    known: dict[str, Row] = {row.name: row for module in modules for row in module.ROWS}
    names = [name.strip() for name in rows.split(",")] if rows else list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"no row {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    if device is None:
        device = "cuda:0" if growpool.is_cuda_available() else "host"
    context = Context(device, quick)
    if context.is_cuda and not growpool.is_cuda_available():
        print(f"no GPU: {growpool.cuda_unavailable_reason()}", file=sys.stderr)
        return 2
    if touch and context.is_cuda and not quick:
        timing.touch_host_memory()
    progress_module: Any = importlib.import_module("rich.progress")
    results = []
    with progress_module.Progress(transient=True) as progress:
        task = progress.add_task("rows", total=len(names))
        for name in names:
            progress.update(task, description=name)
            begin = time.perf_counter()
            result = run_row(known[name], context)
            result.seconds = time.perf_counter() - begin
            results.append(result)
            progress.advance(task)
            if json_file:  # after each row, so that a crash keeps what was measured
                pathlib.Path(json_file).write_text(
                    report.as_json(results, context), encoding="utf-8"
                )
    report.table(results, context)
    if plots_folder:
        for path in report.plots(context, plots_folder):
            print(path)
    return 1 if any(result.error for result in results) else 0
