"""Prints what pip has to install for extras of the project, without the project itself, which is built meanwhile.

With --oldest: what the extras name themselves, in the oldest version that they allow.

example: python tools/requirements.py demo
example: python tools/requirements.py --oldest hf
"""

from __future__ import annotations

import argparse
import re
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


def oldest(extras: list[str]) -> set[str]:
    """What the extras name, each package in its oldest version."""
    named = {package for extra in extras for package in PROJECT["optional-dependencies"][extra]}
    return {package.replace(">=", "==") for package in named if not package.startswith("gistkit[")}


if __name__ == "__main__":
    known = PROJECT["optional-dependencies"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="+", choices=known, metavar="EXTRA", help=f"of {', '.join(known)}")
    parser.add_argument("--oldest", action="store_true")
    options = parser.parse_args()
    print("\n".join(sorted((oldest if options.oldest else requirements)(options.extras))))
