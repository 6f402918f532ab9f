"""Prints what pip has to install for extras of gistkit, or for its other distributions, without what is built here.

With --oldest: what the extras name themselves, in the oldest version that they allow.

example: python tools/requirements.py demo
example: python tools/requirements.py test gistkit-lab 'gistkit-serve[embed]'
example: python tools/requirements.py --oldest hf
"""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"gistkit": ".", "gistkit-lab": "lab", "gistkit-serve": "apps/serve", "gistkit-vllm": "apps/vllm"}
PROJECTS = {
    name: tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"] for name, folder in FOLDERS.items()
}
EXTRAS = PROJECTS["gistkit"]["optional-dependencies"]


def requirements(package: str) -> set[str]:
    """What a package needs, itself if it is none of ours: `gistkit[hf]` stands for gistkit's dependencies and `hf`."""
    own = re.fullmatch(r"(gistkit[\w-]*)(?:\[(.*)\])?", package)
    if own is None:
        return {package}
    project, extras = PROJECTS[own[1]], own[2].split(",") if own[2] else []
    named = [*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra])]
    return {each for name in named for each in requirements(name)}


def oldest(extra: str) -> set[str]:
    """What an extra of gistkit names, each package in its oldest version."""
    return {package.replace(">=", "==") for package in EXTRAS[extra] if not package.startswith("gistkit[")}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"extra of gistkit ({', '.join(EXTRAS)}) or package")
    parser.add_argument("--oldest", action="store_true")
    options = parser.parse_args()
    found = oldest if options.oldest else lambda name: requirements(f"gistkit[{name}]" if name in EXTRAS else name)
    print("\n".join(sorted(set().union(*map(found, options.names)))))
