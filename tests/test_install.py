# SPDX-License-Identifier: Apache-2.0
"""An installed copy of the C library serves C users: what it holds, and programs built against it.

The copy is moved before anything is built, so every path in it must be relative.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CONSUMER = ROOT / "tests" / "consumer"
EXAMPLES = ROOT / "examples" / "c"
BUILD = ROOT / "build" / "library"
HEADERS = ("backing.h", "capi.h", "growpool.h", "stream.h")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
SONAME = "libgrowpool.so." + ".".join(VERSION.split(".")[:2])
STRICT = ("-Wall", "-Wextra", "-pedantic", "-Werror")


def tool(name: str) -> str:
    """Return the path of a tool that the test requirements or the system bring."""
    beside = os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ.get("PATH", "")])
    found = shutil.which(name, path=beside)
    assert found, f"{name} is missing: tools/setup.sh test brings it"
    return found


def run(*command: object, code: int = 0, **environment: str) -> str:
    """Run a command and return what it printed; anything but the exit code expected fails."""
    done = subprocess.run(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def configure(source: Path, build: Path, *options: str, code: int = 0) -> str:
    ninja = f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"
    return run(tool("cmake"), "-S", source, "-B", build, "-G", "Ninja", ninja, *options, code=code)


def build(folder: Path, *arguments: str) -> None:
    run(tool("cmake"), "--build", folder, "--parallel", "2", *arguments)


@pytest.fixture(scope="module")
def library() -> Path:
    """The build folder of the library as users configure it; kept, so a second run is quick."""
    configure(ROOT, BUILD, "-DCMAKE_C_COMPILER=gcc")
    build(BUILD)
    return BUILD


@pytest.fixture(scope="module")
def prefix(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installed copy that no longer lies where it was installed."""
    folder = tmp_path_factory.mktemp("install")
    installed, moved = folder / "installed", folder / "moved away"
    run(tool("cmake"), "--install", library, "--prefix", installed)
    installed.rename(moved)
    return moved


def library_folder(prefix: Path) -> Path:
    (found,) = prefix.glob("lib*/**/libgrowpool.a")
    return found.parent


# ---- what is installed ---------------------------------------------------------------------------


def test_nothing_is_missing_and_nothing_too_much(prefix: Path) -> None:
    folder = library_folder(prefix).relative_to(prefix)
    package = folder / "cmake" / "growpool"
    wanted = {
        *(Path("include/growpool") / name for name in HEADERS),
        *(folder / name for name in ("libgrowpool.a", "libgrowpool.so", SONAME)),
        folder / f"libgrowpool.so.{VERSION}",
        folder / "pkgconfig" / "growpool.pc",
        package / "growpool-config.cmake",
        package / "growpool-config-version.cmake",
        package / "growpool-targets.cmake",
        package / "growpool-targets-relwithdebinfo.cmake",
        Path("share/doc/growpool/LICENSE"),
    }
    found = {path.relative_to(prefix) for path in prefix.rglob("*") if not path.is_dir()}
    assert found == wanted


def test_the_library_exports_what_the_headers_declare(prefix: Path) -> None:
    code = "".join(
        re.sub(r"/\*.*?\*/", "", (prefix / "include/growpool" / name).read_text(), flags=re.S)
        for name in HEADERS
        if name != "capi.h"
    )
    declared = re.findall(r"\b(gp_\w+)\(", code)
    marked = re.findall(r"^GP_API [^;(]*?\b(gp_\w+)\(", code, re.M)
    assert sorted(declared) == sorted(marked)
    assert len(declared) > 90
    shared = library_folder(prefix) / "libgrowpool.so"
    symbols = run("nm", "--dynamic", "--defined-only", "--format=posix", shared).splitlines()
    assert {line.split()[0] for line in symbols} == set(declared)
    assert SONAME in run("readelf", "--dynamic", shared)


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize(
    "compiler", [("gcc", "-xc", "-std=c11"), ("clang", "-xc++", "-std=c++17")], ids=" ".join
)
def test_each_header_compiles_alone(
    prefix: Path, tmp_path: Path, name: str, compiler: tuple[str, ...]
) -> None:
    source = tmp_path / "alone.c"
    source.write_text(f"#include <growpool/{name}>\nint alone;\n")
    run(*compiler, *STRICT, f"-I{prefix / 'include'}", "-fsyntax-only", source)


def test_cpp_calls_functions_of_c(prefix: Path, tmp_path: Path) -> None:
    source, binary = tmp_path / "call.cpp", tmp_path / "call.o"
    source.write_text(
        "#include <growpool/growpool.h>\nint main() { return gp_status_text(GP_OK) == nullptr; }\n"
    )
    run("clang", "-std=c++17", *STRICT, f"-I{prefix / 'include'}", "-c", source, "-o", binary)
    assert "U gp_status_text" in run("nm", binary)


def test_test_hooks_are_never_installed(tmp_path: Path) -> None:
    told = configure(ROOT, tmp_path, "-DGROWPOOL_INSTALL=ON", "-DGROWPOOL_TESTING=ON", code=1)
    assert "must never reach an installed library" in " ".join(told.split())


# ---- programs built against it -------------------------------------------------------------------


def test_a_cmake_project_finds_it(prefix: Path, tmp_path: Path) -> None:
    wanted = f"-DWANTED_VERSION={VERSION}"
    configure(CONSUMER, tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}", wanted)
    build(tmp_path)
    for name, shared in (("consumer_shared", True), ("consumer_static", False)):
        assert run(tmp_path / name) == "consumer: every figure is right\n"
        assert (SONAME in run("readelf", "--dynamic", tmp_path / name)) == shared


@pytest.mark.parametrize("static", [False, True], ids=["shared", "static"])
def test_pkg_config_finds_it(prefix: Path, tmp_path: Path, static: bool) -> None:
    folder = library_folder(prefix)
    found = {"PKG_CONFIG_PATH": str(folder / "pkgconfig")}
    pkg_config = tool("pkg-config")
    assert run(pkg_config, "--modversion", "growpool", **found).strip() == VERSION
    options = ["--static"] if static else []
    words = run(pkg_config, *options, "--cflags", "--libs", "growpool", **found)
    assert ("-pthread" in words) == static
    # The shell takes the words apart, as it does for users.
    extra = "-static" if static else f"-Wl,-rpath,'{folder}'"
    line = f"gcc -std=c11 {extra} '{CONSUMER}/consumer.c' {words.strip()} -o '{tmp_path}/plain'"
    run("sh", "-c", line)
    assert run(tmp_path / "plain") == "consumer: every figure is right\n"


def test_the_examples_in_c_run(prefix: Path, tmp_path: Path) -> None:
    configure(EXAMPLES, tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}")
    build(tmp_path)
    grown = run(tmp_path / "grow")
    assert "the limit holds: " in grown
    given, taken = re.findall(r"the backing gave (\d+) chunks and took back (\d+)", grown)[0]
    assert given == taken != "0"
    told = run(tmp_path / "kv_cache")
    assert "48 sequences finished" in told
    assert "0 MiB are left" in told


def test_the_benchmark_prints_its_table(library: Path) -> None:
    build(library, "--target", "bench_range_pages")
    told = run(library / "bench_range_pages", "16", "1")
    assert re.search(r"^bulk .*\d$", told, re.M), told


# ---- what the README tells C users ---------------------------------------------------------------


def readme_blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("\n## For C and C++ programs\n")[2].partition("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.S)


def test_the_readmes_commands_are_those_that_are_tested(prefix: Path, tmp_path: Path) -> None:
    install, plain = readme_blocks("sh")
    assert re.findall(r"^cmake (\S+)", install, re.M) == ["-S", "--build", "--install"]
    folder = library_folder(prefix)
    (tmp_path / "app.c").write_text(
        "#include <growpool/growpool.h>\nint main(void) { return !gp_status_text(GP_OK); }\n"
    )
    moved = str(folder.relative_to(prefix) / "pkgconfig")
    home = tmp_path / "home"
    home.mkdir()
    (home / "growpool").symlink_to(prefix, target_is_directory=True)
    line = f"cd '{tmp_path}' && {plain.replace('lib/pkgconfig', moved)}"
    shell = ["sh", "-euc", line]
    run(*shell, HOME=str(home))
    run(tmp_path / "app", LD_LIBRARY_PATH=str(folder))
    (cmake,) = readme_blocks("cmake")
    targets = "".join(path.read_text() for path in folder.rglob("growpool-targets.cmake"))
    named = re.findall(r"growpool::\w+", cmake)
    assert len(named) == 2
    assert all(f"add_library({name} " in targets for name in named)


def test_the_readmes_c_names_what_is_there() -> None:
    (block,) = readme_blocks("c")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = (ROOT / "python/ext/capi.h").read_text(encoding="utf-8")
    rule = text.partition("The rule about the GIL")[2].partition("says the rest")[0]
    names = set(re.findall(r"gp->(\w+)", block)) | set(re.findall(r"`((?:pool|range)_\w+)`", rule))
    assert len(names) >= 8
    missing = [name for name in names if not re.search(rf"\b(, )?{name}\)", table)]
    assert not missing
