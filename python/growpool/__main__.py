# SPDX-License-Identifier: Apache-2.0
"""``python -m growpool``: the command line. It only reads arguments and starts what they name."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m growpool",
        description="Memory pools that grow in place, stay under a limit, and shrink when idle.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="watch a pool grow, meet its limit, work on two streams and shrink to nothing",
        description="Watch a pool grow through Python callbacks, meet its limit, work on two "
        "streams while a part of it is trimmed, and shrink to nothing. Every step checks its "
        "result; a failed check ends the demo with exit code 1.",
    )
    demo.add_argument(
        "--device",
        metavar="DEVICE",
        help='"host" or "cuda:N" (default: the first GPU, or the host where there is none)',
    )
    bench = commands.add_parser(
        "bench",
        help="measure growpool beside the driver alone and beside what you would pick instead",
        description="Measure growpool beside the raw calls and beside other allocators that are "
        "installed. Exit code 1 when a row raised; a missed target changes nothing.",
    )
    bench.add_argument("--device", metavar="DEVICE", help='"host" or "cuda:N"')
    bench.add_argument("--rows", metavar="NAME,...", help="only these rows (default: all)")
    bench.add_argument("--json", metavar="FILE", help="write all figures there as well")
    bench.add_argument("--plots", metavar="FOLDER", help="draw curves into files there")
    bench.add_argument(
        "--no-touch",
        action="store_true",
        help="on a GPU: do not write to host memory once before timing",
    )
    bench.add_argument("--quick", action="store_true", help=argparse.SUPPRESS)
    replay = commands.add_parser(
        "replay",
        help="play a recorded allocation trace and show what it took",
        description="Play a trace (columns t_us,op,id,size,stream; .csv or .csv.gz, or the name "
        "of a kept one) on a pool. Exit code 1 when memory ran out, 2 for a trace that makes no "
        "sense.",
    )
    replay.add_argument("trace", metavar="TRACE")
    replay.add_argument("--device", metavar="DEVICE", help='"host" or "cuda:N"')
    replay.add_argument(
        "--limit", metavar="LIMIT", help='"1.02" (of the peak of what is live), or "8 GiB"'
    )
    replay.add_argument("--chunk-size", metavar="SIZE", help='"2 MiB" (default: planned)')
    replay.add_argument("--json", metavar="FILE", help="write the figures there as well")
    chosen = parser.parse_args(arguments)
    if chosen.command is None:
        parser.print_help()
        return 0
    if chosen.command == "replay":
        from growpool._bench import replay as player

        return player.run(chosen.trace, chosen.device, chosen.limit, chosen.chunk_size, chosen.json)
    if chosen.command == "bench":
        from growpool import _bench

        return _bench.run(
            chosen.device,
            chosen.rows,
            chosen.json,
            chosen.plots,
            touch=not chosen.no_touch,
            quick=chosen.quick,
        )
    # Imported late: the demo needs NumPy, and asking for help must not.
    from growpool import _demo

    return _demo.run(chosen.device)


if __name__ == "__main__":
    sys.exit(main())
