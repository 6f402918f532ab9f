"""`gistkit view`: layouts, attention maps, runs and results as pages, pictures and tables."""

from __future__ import annotations

from typing import Any

from gistkit.cli import view_attention, view_layout, view_run
from gistkit.cli.plugins import add_plugins
from gistkit.options.arguments import LateParser


def add(commands: Any) -> None:
    """Adds the command and its kinds of pages."""
    view = commands.add_parser(
        "view", help="show a layout, attention maps, a training run or a study's results", epilog=view_layout.EXAMPLE
    )
    kinds = view.add_subparsers(required=True, metavar="KIND", parser_class=LateParser)
    view_layout.add(kinds)
    view_attention.add(kinds)
    add_plugins(kinds, "gistkit.view")
    view_run.add(kinds)
