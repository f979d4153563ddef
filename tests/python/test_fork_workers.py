# SPDX-License-Identifier: Apache-2.0
"""Worker processes: which of them may use growpool, and what the others are told."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from helpers import run_quietly

WORKERS = """
import multiprocessing, os, sys
import growpool

def use(connection):
    with growpool.Pool("host", limit="64 MiB") as pool:
        memoryview(pool.allocate(2 << 20))[:] = b"y" * (2 << 20)
    connection.send("worked")

def try_to_use(connection, name=None):
    try:
        made = growpool.Pool("host") if name is None else globals()[name].malloc(1)
        connection.send("no error")
    except growpool.PoolStateError as error:
        connection.send((error.reason, str(error)))

def run(method, function, *args):
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=function, args=(theirs, *args))
    process.start()
    assert ours.poll(30)
    answer = ours.recv()
    process.join(30)
    assert process.exitcode == 0, process.exitcode
    return answer
"""


def run_program(tmp_path: Path, code: str) -> str:
    """Run code as a file, as starting workers by spawn wants it, quietly."""
    program = tmp_path / "program.py"
    program.write_text(WORKERS + textwrap.dedent(code))
    return run_quietly(f"import runpy; runpy.run_path({str(program)!r}, run_name='__main__')")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_started_by(method: str, tmp_path: Path) -> None:
    """It works as a process of its own, whatever the parent has done before."""
    output = run_program(
        tmp_path,
        f"""
        if __name__ == "__main__":
            pool = growpool.Pool("host")
            pool.malloc(1000)
            print(run({method!r}, use), run({method!r}, use))
        """,
    )
    assert output == "worked worked\n"


def test_a_worker_forked_by_a_parent_that_used_growpool(tmp_path: Path) -> None:
    output = run_program(
        tmp_path,
        """
        if __name__ == "__main__":
            pool = growpool.Pool("host")
            pool.malloc(1000)
            print(run("fork", try_to_use, "pool")[0])
            print(*run("fork", try_to_use))
            pool.free(pool.malloc(1000))
            pool.close()
        """,
    )
    old, new = output.splitlines()
    assert old == "forked"
    assert new.startswith("forked ")
    assert '"spawn"' in new
    assert '"forkserver"' in new


def test_a_worker_forked_before_growpool_was_used_works(tmp_path: Path) -> None:
    """Importing is no use: so the parent may do it for all its workers, and use growpool later."""
    output = run_program(
        tmp_path,
        """
        if __name__ == "__main__":
            print(run("fork", use), run("fork", use))
            multiprocessing.set_forkserver_preload(["growpool"])
            print(run("forkserver", use))
            pool = growpool.Pool("host")
            pool.malloc(1000)
            print(run("forkserver", use), run("fork", try_to_use)[0])
        """,
    )
    assert output.split() == ["worked", "worked", "worked", "worked", "forked"]


def test_a_pool_of_workers_that_were_forked_early(tmp_path: Path) -> None:
    output = run_program(
        tmp_path,
        """
        from concurrent.futures import ProcessPoolExecutor

        def job(number):
            pool = growpool.Pool("host")
            buffer = pool.allocate(1000)
            memoryview(buffer)[:1] = bytes([number])
            return memoryview(buffer)[0]

        if __name__ == "__main__":
            with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as executor:
                print(sum(executor.map(job, range(10))))
        """,
    )
    assert output == "45\n"
