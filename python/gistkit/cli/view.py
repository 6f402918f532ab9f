"""`gistkit view`: layouts and attention maps as pages to look into."""

from __future__ import annotations

from typing import Any

from gistkit.cli import view_attention, view_curves, view_layout, view_matrix, view_run
from gistkit.cli.plugins import add_plugins


def add(commands: Any) -> None:
    """Adds the command and its kinds of pages."""
    view = commands.add_parser(
        "view", help="look into a layout, into attention, or at what a study found", epilog=view_layout.EXAMPLE
    )
    kinds = view.add_subparsers(required=True, metavar="KIND")
    view_layout.add(kinds)
    view_attention.add(kinds)
    add_plugins(kinds, "gistkit.view")
    view_matrix.add(kinds)
    view_run.add(kinds)
    view_curves.add(kinds)
