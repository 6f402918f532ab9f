"""The front page is README.md with the contents behind it, which only the site needs: docs/contents.md."""

from __future__ import annotations

from pathlib import Path

from sphinx.application import Sphinx

CONTENTS = Path(__file__).resolve().parents[1] / "contents.md"


def add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Lengthens the root page, as Sphinx reads it."""
    if name == app.config.root_doc:
        app.env.note_dependency(CONTENTS)
        source[0] += f"\n{CONTENTS.read_text()}"


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", add_contents)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
