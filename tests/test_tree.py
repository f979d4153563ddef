# SPDX-License-Identifier: Apache-2.0
"""The rules of the tree: sizes, layers, licences. They read the files and run nothing of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("backing", "sync", "vmm", "python", "tests", "examples", "bench", "tools", ".ci")
SUFFIXES = {".c", ".h", ".py", ".pyi", ".sh", ".toml", ".txt", ".cu", ".ptx"}
CORE = ("backing", "sync", "vmm")

MOST_LINES_OF_FILE = 600
MOST_LINES_OF_FUNCTION = 80


def tree(*suffixes: str, under: tuple[str, ...] = FOLDERS) -> list[Path]:
    """Return the project's files with one of the suffixes, relative to the root."""
    found = [
        path.relative_to(ROOT)
        for folder in under
        for path in sorted((ROOT / folder).rglob("*"))
        if path.is_file() and path.suffix in suffixes and "__pycache__" not in path.parts
    ]
    return found


def text_of(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def blank(match: re.Match[str]) -> str:
    """Replace a match by nothing but its line ends, so that line numbers stay true."""
    return "\n" * match.group().count("\n")


def code_of(path: Path) -> str:
    """Return a C file without comments and without the contents of strings and characters."""
    token = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)
    return token.sub(lambda m: '""' if m.group()[0] == '"' else blank(m), text_of(path))


def functions_of(code: str) -> Iterator[tuple[int, int, str]]:
    """Yield (first line, lines, heading) of each function body at the top level of C code.

    The style puts a function's braces on lines of their own, in column 0; a struct or an array
    opens its brace at the end of a line.
    """
    lines = code.split("\n")
    opened = None
    for number, line in enumerate(lines):
        if line == "{":
            opened = number
        elif line.startswith("}") and opened is not None:
            yield opened, number - opened + 1, lines[opened - 1].strip()
            opened = None


def without_testing(code: str) -> str:
    """Return C code without what stands between ``#ifdef GP_TESTING`` and its end."""
    kept, depth, hidden = [], 0, None
    for line in code.split("\n"):
        directive = re.match(r"\s*#\s*(if|ifdef|ifndef|else|elif|endif)\b(.*)", line)
        word = directive.group(1) if directive else ""
        if word in ("if", "ifdef", "ifndef"):
            depth += 1
            if hidden is None and word == "ifdef" and directive and "GP_TESTING" in directive[2]:
                hidden = depth
        elif word in ("else", "elif") and hidden == depth:
            hidden = None
        elif word == "endif":
            hidden = None if hidden == depth else hidden
            depth -= 1
        kept.append("" if hidden is not None else line)
    return "\n".join(kept)


def includes_of(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text_of(path), re.M)


def test_the_scanner_sees_the_tree() -> None:
    for folder in (*CORE, "python/ext", "tests/c", "tests/support"):
        assert tree(".c", under=(folder,)), f"no C file under {folder}"
    assert tree(".py", under=("python/growpool",))


def test_the_function_scanner_counts() -> None:
    body = "    x();\n" * MOST_LINES_OF_FUNCTION
    code = f"struct s {{\n    int a;\n}};\n\nint f(void)\n{{\n{body}}}\n"
    assert list(functions_of(code)) == [(5, MOST_LINES_OF_FUNCTION + 2, "int f(void)")]


def test_the_testing_filter_hides_one_branch() -> None:
    code = "a\n#ifdef GP_TESTING\nb\n#if 1\nc\n#endif\n#else\nd\n#endif\ne"
    assert [line for line in without_testing(code).split("\n") if line.isalpha()] == list("ade")


@pytest.mark.parametrize("path", tree(".c", ".h", ".py", ".pyi"), ids=str)
def test_no_file_is_too_long(path: Path) -> None:
    count = text_of(path).count("\n")
    assert count <= MOST_LINES_OF_FILE, f"{path} has {count} lines"


@pytest.mark.parametrize("path", tree(".c"), ids=str)
def test_no_function_is_too_long(path: Path) -> None:
    long = [
        f"{path}:{first + 1}: {heading}: {count} lines"
        for first, count, heading in functions_of(code_of(path))
        if count > MOST_LINES_OF_FUNCTION
    ]
    assert not long, "\n".join(long)


def test_nine_functions_in_ten_are_short() -> None:
    counts = sorted(
        count
        for path in tree(".c", under=(*CORE, "python"))
        for _, count, _ in functions_of(code_of(path))
    )
    assert counts[len(counts) * 9 // 10] <= 40


def test_every_file_opens_with_its_licence() -> None:
    files = [path for path in tree(*SUFFIXES) if text_of(path).strip()]
    files += [Path(name) for name in ("CMakeLists.txt", "Makefile", "pyproject.toml", ".ci/run")]
    bare = [
        str(path)
        for path in files
        if "SPDX-License-Identifier: Apache-2.0" not in "".join(text_of(path).split("\n")[:2])
    ]
    assert not bare, f"no SPDX line in the first two lines: {bare}"


@pytest.mark.parametrize(("folder", "upper"), [("backing", ("sync", "vmm")), ("sync", ("vmm",))])
def test_arrows_point_down(folder: str, upper: tuple[str, ...]) -> None:
    wrong = [
        f"{path} includes {name}"
        for path in tree(".c", ".h", under=(folder,))
        for name in includes_of(path)
        if set(Path(name).parts) & {*upper, "python", "tests"}
    ]
    assert not wrong, "\n".join(wrong)


def test_the_core_knows_no_tests_and_no_python() -> None:
    wrong = [
        f"{path} includes {name}"
        for path in tree(".c", ".h", under=CORE)
        for name in includes_of(path)
        if set(Path(name).parts) & {"tests", "python", "Python.h"}
    ]
    assert not wrong, "\n".join(wrong)


def test_foreign_headers_come_in_by_one_door() -> None:
    doors = {
        "cuda.h": {Path("tests/c/test_cuda_abi.c")},
        # The others are users' programs, which cannot include py.h.
        "Python.h": {
            Path("python/ext/py.h"),
            Path("tests/consumer/extension.c"),
            Path("tests/consumer/foreign.c"),
        },
    }
    wrong = [
        f"{path} includes {name}"
        for path in tree(".c", ".h")
        for name in includes_of(path)
        if name in doors and path not in doors[name]
        if not (name == "cuda.h" and path.parts[0] == "backing")
    ]
    assert not wrong, "\n".join(wrong)


def test_the_core_never_ends_the_process_nor_prints() -> None:
    call = re.compile(
        r"(?<![\w.>])(_?exit|_Exit|quick_exit|abort|v?f?printf|puts|fputs|perror)\s*\("
    )
    wrong = []
    for path in tree(".c", ".h", under=CORE):
        code = code_of(path)
        if path == Path("backing/lock.c"):
            code = without_testing(code)
        code = re.sub(r"__attribute__\(\(.*?\)\)", blank, code, flags=re.S)
        wrong += [
            f"{path}:{number}: {line.strip()}"
            for number, line in enumerate(code.split("\n"), 1)
            if call.search(line)
        ]
    assert not wrong, "P2: " + "\n".join(wrong)


def test_the_core_allocates_and_locks_through_its_own_doors() -> None:
    rules = {
        r"(?<![\w.>])(malloc|calloc|realloc|free|strdup|aligned_alloc|posix_memalign)\s*\(": {
            "backing/memory.c"
        },
        r"\bpthread_mutex_(lock|unlock|trylock|init)\s*\(": {"backing/lock.c"},
    }
    wrong = []
    for path in tree(".c", ".h", under=CORE):
        for pattern, doors in rules.items():
            if str(path) not in doors:
                wrong += [f"{path}: {m.group()}" for m in re.finditer(pattern, code_of(path))]
    assert not wrong, "\n".join(wrong)


def test_what_no_interpreter_has_run_is_said_to_be_declared_only() -> None:
    """Slots of newer interpreters stand behind version checks, and the comment says what ran."""
    text = text_of(Path("python/ext/module.c"))
    comment, _, slots = text.partition("static PyModuleDef_Slot module_slots[] = {")
    comment = comment.rpartition("/*")[2]
    assert "Declared, not run: no free-threaded build" in " ".join(comment.replace("*", "").split())
    for slot, version in (
        (
            "{Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED}",
            "0x030C0000",
        ),
        ("{Py_mod_gil, Py_MOD_GIL_USED}", "0x030D0000"),
    ):
        assert f"#if PY_VERSION_HEX >= {version}\n    {slot},\n#endif\n" in slots
