"""`gistkit view`: layouts and attention maps as pages to look into."""

from __future__ import annotations

from typing import Any

from gistkit.cli import view_attention, view_layout


def add(commands: Any) -> None:
    """Adds the command and its kinds of pages."""
    view = commands.add_parser(
        "view", help="write a page to look into a layout or into attention", epilog=view_layout.EXAMPLE
    )
    kinds = view.add_subparsers(required=True, metavar="KIND")
    view_layout.add(kinds)
    view_attention.add(kinds)
