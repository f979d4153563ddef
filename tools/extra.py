# SPDX-License-Identifier: Apache-2.0
"""Prints the requirements of one extra of pyproject.toml, one a line.

So that tools can be installed without building growpool first.
"""

import pathlib
import sys
import tomllib

project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
for requirement in project["optional-dependencies"][sys.argv[1]]:
    print(requirement)
