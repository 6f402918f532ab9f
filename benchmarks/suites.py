"""The file in which a machine's figures are kept, benchmarks/results/MACHINE/suites.json: each suite under its name.

A suite has the machine and the commit that it was measured with, so each part of the file has its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gistkit.common.files import write_text

NAME = "suites.json"


def read(path: Path) -> dict[str, Any]:
    """The suites of a file by their names; none where there is no file."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def write(path: Path, suite: str, content: Mapping[str, Any], *, alone: bool = False) -> None:
    """Writes a suite's figures, in place of those that the file has of it; `alone`: the file keeps no other suite."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {} if alone else read(path)
    write_text(path, json.dumps(dict(sorted({**kept, suite: content}.items())), indent=1) + "\n")
