"""`gistkit info`: reports what is installed and what is missing."""

from __future__ import annotations

import argparse
from typing import Any

from gistkit.options.arguments import add_command


def add(commands: Any) -> None:
    add_command(commands, "info", _run, "report what is installed and what is missing", "example: gistkit info")


def _run(arguments: argparse.Namespace) -> int:
    from gistkit.info import lines

    print("\n".join(lines()))
    return 0
