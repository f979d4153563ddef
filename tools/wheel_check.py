# SPDX-License-Identifier: Apache-2.0
"""Checks the installed package as users get it: complete, working, and without test hooks."""

import importlib.metadata
import pathlib
import subprocess

import growpool

folder = pathlib.Path(growpool.__file__).parent
assert "site-packages" in folder.parts, f"not the installed package: {folder}"
for name in ("py.typed", "_core.pyi", "__main__.py"):
    assert (folder / name).is_file(), f"the wheel lacks {name}"
headers = {path.name for path in pathlib.Path(growpool.get_include(), "growpool").iterdir()}
assert headers == {"backing.h", "capi.h", "growpool.h", "stream.h"}, f"headers: {headers}"
installed = importlib.metadata.files("growpool") or []
stray = [str(path) for path in installed if not path.parts[0].startswith("growpool")]
assert installed and not stray, f"the wheel installs more than the package: {stray}"
modules = {"_core": folder, "_native": folder / "_bench"}
for module, place in modules.items():
    (extension,) = place.glob(f"{module}*.so")
    symbols = subprocess.run(
        ["nm", "--dynamic", "--defined-only", extension], check=True, capture_output=True, text=True
    ).stdout.split("\n")
    exported = {line.split()[-1] for line in symbols if line.strip()}
    assert exported == {f"PyInit_{module}"}, f"{module} exports more than its init: {exported}"

    needed = subprocess.run(
        ["readelf", "--dynamic", extension], check=True, capture_output=True, text=True
    ).stdout
    assert "libcuda" not in needed, f"{module} links to a CUDA library"
    assert b"gp__sim_" not in extension.read_bytes(), f"{module} holds the simulated driver"

try:
    growpool.Pool("sim:0")
except Exception as error:
    assert "sim" in str(error), f"unhelpful refusal of the simulated device: {error!r}"
else:
    raise SystemExit("the wheel offers the simulated device")

with growpool.Pool("host", limit="64 MiB") as pool:
    buffer = pool.allocate("1 MiB")
    memoryview(buffer).cast("B")[0] = 7
    buffer.close()
    assert pool.trim() > 0
print("1 passed, 0 failed")
