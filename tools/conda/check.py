"""Checks the recipe for conda-forge: rattler-build parses and renders it, and it names this version and these packages.

example: python tools/conda/check.py
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from rattler_build import Stage0Recipe, VariantConfig

ROOT = Path(__file__).resolve().parents[2]
# Of conda-forge's pinnings, as little as the recipe asks for.
VARIANTS = "python: [3.11.* *_cpython]\ncxx_compiler: [gxx]\nc_stdlib: [sysroot]\nc_stdlib_version: ['2.28']\n"
# What conda calls otherwise.
NAMES = {"torch": "pytorch"}


def main() -> None:
    """Ends with an error at what is wrong."""
    text = (ROOT / "tools/conda/recipe.yaml").read_text()
    recipe = Stage0Recipe.from_yaml(text)
    assert len(recipe.render(VariantConfig.from_yaml(VARIANTS))) == 1
    version = re.search(r'__version__ = "(.+)"', (ROOT / "python/gistkit/__init__.py").read_text())
    assert version is not None and f'version: "{version[1]}"' in text, "expected the version of gistkit"
    run = text[text.index("  run:\n") : text.index("\ntests:")]
    for needed in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        name, limit = re.fullmatch(r"([\w-]+)(.*)", needed).groups()  # type: ignore[union-attr]
        assert f"    - {NAMES.get(name, name)} {limit}\n" in run, f"expected {needed}"


if __name__ == "__main__":
    main()
