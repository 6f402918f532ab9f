"""The directive `methods`: a table of all methods, of what their pages say of themselves before their titles."""

from __future__ import annotations

import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from gistkit.compress import METHODS

FOLDER = Path(__file__).resolve().parents[1] / "methods"
HEAD = ("method", "what the text reads of the context", "learns by training only", "any ratio")


class Methods(SphinxDirective):
    """A row for each page whose first lines say what the text `reads`, and whether the method `learns`."""

    def run(self) -> list[nodes.Node]:
        for name in METHODS:
            self.env.note_dependency(FOLDER / f"{name}.md")
        lines = ["| " + " | ".join(row) + " |" for row in (HEAD, *rows())]
        lines.insert(1, "|" + "---|" * len(HEAD))
        return self.parse_text_to_nodes("\n".join(lines))


def rows() -> list[tuple[str, ...]]:
    """The cells of each method that has a page, by their titles."""
    found = []
    for name, method in METHODS.items():
        page = FOLDER / f"{name}.md"
        if page.exists():
            said = re.match(r"---\nreads: (.*)\nlearns: (.*)\n---\n\n# (.*)\n", page.read_text())
            if said is None:
                raise ValueError(f"{page.name}: expected lines `reads` and `learns` before its title, got none")
            reads, learns, title = said.groups()
            any_ratio = "yes" if method.config_class.any_ratio else "no"
            found.append((f"[{title.partition(':')[0]}]({name}.md)", reads, learns, any_ratio))
    return sorted(found, key=lambda cells: cells[0].lower())


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("methods", Methods)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
