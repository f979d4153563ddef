# SPDX-License-Identifier: Apache-2.0
"""The C API capsule, through an extension module that is built here as a user would build it."""

from __future__ import annotations

import gc
import re
import subprocess
import sysconfig
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import growpool
import pytest
from consumer_kit import INCLUDE, build, load
from exit_kit import Copies, Program
from helpers import MIB, PAGE, Supplier

HEADERS = ("backing.h", "stream.h", "growpool.h")


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return load(build("extension", tmp_path_factory.mktemp("extension")))


# ---- the list ------------------------------------------------------------------------------------


def without_comments(name: str) -> str:
    text = (INCLUDE / "growpool" / name).read_text(encoding="utf-8")
    return re.sub(r"/\*.*?\*/", "", text, flags=re.S)


def test_every_public_function_is_in_the_table_once() -> None:
    declared = [
        function
        for name in HEADERS
        for function in re.findall(r"\b(gp_[a-z0-9_]+)\(", without_comments(name))
    ]
    listed = re.findall(r"\bFUNCTION\((\w+)\)", without_comments("capi.h"))
    assert len(listed) > 90
    assert sorted(f"gp_{name}" for name in listed) == sorted(declared)


def test_the_table_has_a_place_for_every_entry(extension: ModuleType) -> None:
    table = without_comments("capi.h").partition("struct gp_c_api")[0]
    entries = re.findall(r"^ +(?:FUNCTION|PYTHON)\(", table, re.M)
    assert extension.TABLE_BYTES == 8 + 8 * len(entries)
    assert extension.import_table(1) == (1, extension.TABLE_BYTES)


def test_the_header_includes_no_python() -> None:
    assert re.findall(r"#\s*include.*", without_comments("capi.h")) == ['#include "growpool.h"']


def test_cpp_may_include_it_beside_python(tmp_path: Path) -> None:
    source = tmp_path / "user.cpp"
    source.write_text(
        "#include <Python.h>\n#include <growpool/capi.h>\n"
        "gp_pool *pool_of(PyObject *object)\n{\n"
        "    const gp_c_api *gp = gp_c_api_import(GP_C_API_VERSION);\n"
        "    return gp ? gp->pool_of(object) : nullptr;\n}\n"
    )
    folders = [f"-I{sysconfig.get_path('include')}", f"-I{INCLUDE}"]
    command = ["clang", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", *folders]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- pools made in Python ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["attached", "detached", "thread"])
def test_c_allocates_from_a_pool_with_python_callbacks(
    extension: ModuleType, pool: growpool.Pool, supplier: Supplier, how: str
) -> None:
    address = extension.allocate(pool, MIB, how)
    assert address % 512 == 0
    assert pool.stats.used_bytes == MIB
    assert [call[0] for call in supplier.calls] == ["alloc"]
    assert (threading.get_ident() in supplier.threads) == (how != "thread")
    extension.free(pool, address)
    assert pool.stats.used_bytes == 0
    assert extension.trim(pool) == supplier.calls[0][1]
    assert supplier.taken == 1


def test_the_call_that_never_waits_says_when_the_pool_would_grow(
    extension: ModuleType, pool: growpool.Pool, supplier: Supplier
) -> None:
    assert extension.try_allocate(pool, MIB) is None
    assert supplier.calls == []
    extension.free(pool, extension.allocate(pool, MIB, "detached"))
    address = extension.try_allocate(pool, MIB)
    assert isinstance(address, int)
    pool.free(address)  # what C made Python may free, and the other way round
    extension.free(pool, pool.malloc(MIB))
    assert pool.stats.used_bytes == 0


def test_a_thread_in_c_waits_while_another_gives_back_in_python(
    extension: ModuleType, supplier: Supplier
) -> None:
    """A trim without the GIL waits for a delivery in another thread's callback, which needs it."""
    inside, go_on = threading.Event(), threading.Event()

    def free(chunk: growpool.Chunk, size: int, device: int, stream: int) -> None:
        inside.set()
        assert go_on.wait(20)
        supplier.free(chunk, size, device, stream)

    with growpool.Pool("host", alloc=supplier.alloc, free=free) as pool:
        extension.free(pool, extension.allocate(pool, PAGE, "detached"))
        first = threading.Thread(target=pool.trim)
        first.start()
        assert inside.wait(20)
        second = threading.Thread(target=extension.trim, args=(pool,))
        second.start()
        go_on.set()
        for thread in (first, second):
            thread.join(20)
            assert not thread.is_alive()
    assert supplier.taken == 1


def test_a_callbacks_exception_is_a_status_in_c(
    extension: ModuleType, unraisable: list[Any]
) -> None:
    answers: list[BaseException] = [MemoryError("none left")] * 12 + [KeyError("mine")]

    def alloc(size: int, device: int, stream: int) -> growpool.Chunk:
        raise answers.pop(0)

    with growpool.Pool("host", alloc=alloc, free=lambda *args: None) as pool:
        with pytest.raises(RuntimeError, match="out of memory"):
            extension.allocate(pool, MIB, "detached")
        assert unraisable and all(isinstance(error, MemoryError) for error in unraisable)
        del answers[:-1]
        with pytest.raises(RuntimeError, match="raised an exception when asked for"):
            extension.allocate(pool, MIB, "detached")
        assert isinstance(unraisable[-1], KeyError)
        assert pool.stats.physical_bytes == 0


# ---- ranges made in Python -----------------------------------------------------------------------


def test_c_commits_in_a_range_made_in_python(
    extension: ModuleType, pool: growpool.Pool, supplier: Supplier
) -> None:
    pages = pool.range("64 MiB")
    assert extension.commit(pages, 4 * PAGE, 2 * PAGE) == 2 * PAGE
    assert list(pages.committed) == [(4 * PAGE, 2 * PAGE)]
    assert supplier.out_bytes == 2 * PAGE
    for empty in (pool.growable("64 MiB"), pool.range(0)):
        assert extension.commit(empty, 0, 0) == 0


@pytest.mark.parametrize("thing", [None, growpool.Range])
def test_what_is_no_range_is_refused(extension: ModuleType, thing: object) -> None:
    with pytest.raises(TypeError, match=r"range_of takes a growpool.Range or Growable, not "):
        extension.commit(thing, 0, PAGE)


def test_other_objects_of_growpool_are_no_ranges(
    extension: ModuleType, pool: growpool.Pool
) -> None:
    for thing in (pool, pool.allocate(MIB), pool.allocate(MIB).view((4,), "uint8")):
        with pytest.raises(TypeError, match=r"range_of takes .*, not growpool\."):
            extension.commit(thing, 0, PAGE)


def test_a_closed_range_is_refused(extension: ModuleType, pool: growpool.Pool) -> None:
    pages = pool.range("64 MiB")
    pages.close()
    with pytest.raises(growpool.PoolStateError, match="closed"):
        extension.commit(pages, 0, PAGE)


# ---- objects that are no open pool ---------------------------------------------------------------


@pytest.mark.parametrize("thing", [None, 7, object(), growpool, growpool.Pool])
def test_what_is_no_pool_is_refused(extension: ModuleType, thing: object) -> None:
    with pytest.raises(TypeError, match="pool_of takes a growpool.Pool, not "):
        extension.hold(thing)


def test_another_type_of_growpool_is_no_pool_either(
    extension: ModuleType, pool: growpool.Pool
) -> None:
    with (
        pool.allocate(MIB) as buffer,
        pytest.raises(TypeError, match=r"not growpool\.Buffer"),
    ):
        extension.hold(buffer)


def test_a_closed_pool_is_refused(extension: ModuleType, pool: growpool.Pool) -> None:
    pool.close()
    with pytest.raises(growpool.PoolStateError, match="closed"):
        extension.hold(pool)


def test_a_pool_closed_meanwhile_says_so(extension: ModuleType, pool: growpool.Pool) -> None:
    extension.hold(pool)
    address = extension.allocate(pool, MIB, "detached")
    assert address and extension.held_physical_bytes() > 0
    pool.close()
    assert extension.held_physical_bytes() == 0
    extension.close_held()


def test_a_reference_in_c_keeps_pool_and_callables(
    extension: ModuleType, supplier: Supplier
) -> None:
    def use_and_drop() -> None:
        def alloc(size: int, device: int, stream: int) -> growpool.Chunk | None:
            assert not pool.is_closed  # the closure refers to the pool: a cycle
            return supplier.alloc(size, device, stream)

        pool = growpool.Pool("host", alloc=alloc, free=supplier.free)
        extension.allocate(pool, MIB, "detached")
        extension.hold(pool)

    use_and_drop()
    gc.collect()
    assert extension.held_physical_bytes() == supplier.out_bytes > 0
    extension.close_held()
    assert supplier.taken == 1


# ---- versions ------------------------------------------------------------------------------------


def test_a_newer_version_is_wanted(extension: ModuleType) -> None:
    with pytest.raises(ImportError, match="version 1 .* built for version 2: install a newer"):
        extension.import_table(2)


def test_an_older_version_is_wanted(extension: ModuleType) -> None:
    with pytest.raises(ImportError, match="version 1 .* built for version 0: build the module"):
        extension.import_table(0)


def test_a_longer_table_serves_and_a_shorter_does_not(
    extension: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer, shorter = extension.TABLE_BYTES + 8, extension.TABLE_BYTES - 8
    monkeypatch.setattr(growpool._core, "_C_API", extension.fake_capsule(1, longer))
    assert extension.import_table(1) == (1, longer)
    monkeypatch.setattr(growpool._core, "_C_API", extension.fake_capsule(1, shorter))
    with pytest.raises(ImportError, match=f"{shorter} bytes, .* {longer - 8}: install a newer"):
        extension.import_table(1)


def test_a_growpool_without_the_capsule_says_so(
    extension: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(growpool._core, "_C_API")
    with pytest.raises(ImportError, match="offers no C API: install a newer one"):
        extension.import_table(1)


def test_a_pool_that_c_code_holds_at_the_end(extension: ModuleType) -> None:
    """The process ends as quietly as ever, and returns the pool's chunks."""
    program = Program(
        f"""
import importlib.util
import growpool
from helpers import Supplier
spec = importlib.util.spec_from_file_location("extension", {extension.__file__!r})
extension = importlib.util.module_from_spec(spec)
spec.loader.exec_module(extension)
books = Supplier()
pool = growpool.Pool("host", backing=books)
extension.allocate(pool, 1000, "thread")
extension.hold(pool)
other = growpool.Pool("host", backing=books)
other.malloc(9)
extension.allocate(other, 1000, "attached")
del pool
"""
    )
    copies = Copies([program])
    copies.check(program)
    copies.close()
