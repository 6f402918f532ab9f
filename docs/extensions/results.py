"""The directive `results`: some rows of a table of benchmarks/results/README.md, so that no figure is written twice."""

from __future__ import annotations

import re
from itertools import zip_longest
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

PAGE = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "README.md"


class Results(SphinxDirective):
    """`results` NAME: of the section between NAME's markers the first table whose first cell begins with `:table:`.

    `:note:` is part of the line below it. `:rows:` and `:columns:` choose by what cells of the first column, and
    headings, begin with, between "|"; without them all are there.
    """

    required_arguments = 1
    option_spec = {  # noqa: RUF012
        "table": directives.unchanged_required,
        "note": directives.unchanged_required,
        "rows": directives.unchanged,
        "columns": directives.unchanged,
    }

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(PAGE)
        chosen = [_listed(self.options.get(option, "")) for option in ("rows", "columns")]
        try:
            first, said = self.options.get("table", ""), self.options.get("note", "")
            table, note = choose(PAGE.read_text(), self.arguments[0], first, said, *chosen)
        except ValueError as error:
            raise self.error(str(error)) from None
        lines = ["| " + " | ".join(row) + " |" for row in table]
        lines.insert(1, "|" + "---|" * len(table[0]))
        # Machines and commits are on the page itself.
        said = [sentence.rstrip(".") for sentence in note.split(". ") if ", torch " not in sentence]
        return self.parse_text_to_nodes("\n".join([*lines, "", ". ".join(said) + "." * bool(note)]))


def choose(
    page: str, name: str, first: str, said: str, rows: list[str], columns: list[str]
) -> tuple[list[list[str]], str]:
    """The cells of a table, its headings first, and the line below it.

    Raises:
        ValueError: if there is no such section, table, row or column.
    """
    found = re.search(rf"<!-- {re.escape(name)} table -->\n(.*?)<!-- end of ", page, re.DOTALL)
    blocks = found[1].strip().split("\n\n") if found else []
    for block, note in zip_longest(blocks, blocks[1:], fillvalue=""):
        table = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.split("\n")]
        if block.startswith("|") and table[0][0].startswith(first) and said in note:
            break
    else:
        raise ValueError(f"results: expected a table of {name!r} that begins with {first!r}, of {said!r}, got none")
    del table[1]
    kept = _beginning("row", [], rows, [row[0] for row in table[1:]])
    places = _beginning("column", [0], columns, table[0])
    return [[row[place] for place in places] for row in (table[0], *(table[1 + index] for index in kept))], note


def _beginning(kind: str, always: list[int], beginnings: list[str], cells: list[str]) -> list[int]:
    """The places of cells that begin with such words, in the order of the table; all where nothing is asked for."""
    if not beginnings:
        return list(range(len(cells)))
    places = set(always)
    for beginning in beginnings:
        found = {i for i, cell in enumerate(cells) if re.match(rf"{re.escape(beginning)}(?!\w)", cell)}
        if not found:
            raise ValueError(f"results: expected a {kind} that begins with {beginning!r}, got {cells}")
        places |= found
    return sorted(places)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split("|") if part.strip()]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("results", Results)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
