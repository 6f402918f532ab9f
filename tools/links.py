"""Looks whether every link and picture of a built site leads somewhere in it; links to other hosts are not followed.

example: python tools/links.py build/docs/html
"""

from __future__ import annotations

import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The targets of a page's links and pictures, and the names that links may have behind a "#"."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src", "data") and value and tag != "base":
                self.targets.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


@cache
def page(path: Path) -> Page:
    """A page of the site, read once."""
    return Page(path.read_text())


def broken(root: Path) -> list[str]:
    """'PAGE: TARGET' for each link that leads to no file of the site, or to no anchor of a page."""
    found = []
    for path in sorted(root.rglob("*.html")):
        for target in dict.fromkeys(page(path).targets):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = path.parent / unquote(parts.path) if parts.path else path
            there = file.is_file()
            if there and parts.fragment and file.suffix == ".html":
                there = unquote(parts.fragment) in page(file.resolve()).anchors
            if not there:
                found.append(f"{path.relative_to(root)}: {target}")
    return found


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1], "index.html").is_file():
        sys.exit(f"usage: {sys.argv[0]} FOLDER, with index.html in it")
    lost = broken(Path(sys.argv[1]).resolve())
    sys.exit("\n".join(["links that lead nowhere:", *lost]) if lost else 0)
