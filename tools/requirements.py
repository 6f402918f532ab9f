"""Prints what pip has to install for extras of the project, without the project itself, which is built meanwhile.

example: python tools/requirements.py demo
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())["project"]


def requirements(extras: list[str]) -> set[str]:
    """The dependencies and those of `extras`; `gistkit[hf]` stands for those of `hf`."""
    packages = set(PROJECT["dependencies"])
    for extra in extras:
        for package in PROJECT["optional-dependencies"][extra]:
            own = re.fullmatch(r"gistkit\[(.*)\]", package)
            packages |= requirements(own[1].split(",")) if own else {package}
    return packages


if __name__ == "__main__":
    if len(sys.argv) < 2 or not PROJECT["optional-dependencies"].keys() >= set(sys.argv[1:]):
        sys.exit(f"usage: {sys.argv[0]} EXTRA..., of {', '.join(PROJECT['optional-dependencies'])}")
    print("\n".join(sorted(requirements(sys.argv[1:]))))
