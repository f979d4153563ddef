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
    chosen = parser.parse_args(arguments)
    if chosen.command is None:
        parser.print_help()
        return 0
    # Imported late: the demo needs NumPy, and asking for help must not.
    from growpool import _demo

    return _demo.run(chosen.device)


if __name__ == "__main__":
    sys.exit(main())
