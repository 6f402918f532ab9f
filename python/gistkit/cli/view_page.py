"""What the kinds of `gistkit view` share."""

from __future__ import annotations

import argparse
from pathlib import Path

from gistkit.cli.compress import size
from gistkit.common.files import write_text
from gistkit.options.arguments import path, whole

# gistkit.viz.page.MOST_TOKENS, which is too slow to load for --help.
LARGEST = 4096


# A kind of argument: a whole number that a page has room for.
fits_page = whole(high=LARGEST)


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--out", type=path, default=Path("view.html"), help="HTML file to write (default: %(default)s)"
    )


def write_page(page: str, out: Path) -> None:
    """Writes the file, and prints how to open it."""
    write_text(out, page)
    print(f"Written: {out}, {size(len(page.encode()))}; open it in a browser, it needs no network")
