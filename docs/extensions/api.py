"""Directives of the reference: a package's public names with a table before them, and the command line's help."""

from __future__ import annotations

import inspect
import os
from argparse import ArgumentParser, _SubParsersAction
from typing import Any
from unittest.mock import patch

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import gistkit.cli
import names
from docstrings import convert


class Api(SphinxDirective):
    """`.. api:: gistkit.layouts` and a name a line: a table with a line on each, then all that its docstring says.

    A constant has no docstring, so its line goes on with what it is: `ALL: every key`. `:each: METHODS` puts before
    the names those of all that this mapping of the package holds.
    """

    required_arguments = 1
    has_content = True
    option_spec = {"each": directives.unchanged_required}  # noqa: RUF012

    def run(self) -> list[nodes.Node]:
        package = self.arguments[0]
        table, entries = [".. list-table::", "   :widths: auto", ""], [f".. py:currentmodule:: {package}", ""]
        mapping = self.options.get("each")
        each = [value.__name__ for value in names.find(f"{package}.{mapping}").values()] if mapping else []
        for line in [*each, *filter(None, map(str.strip, self.content))]:
            name, _, text = line.partition(": ")
            said = _inline(text, package)
            value = names.find(f"{package}.{name}")
            if value is None:
                raise self.error(f"api: expected a name of {package}, got {name!r}")
            table += [f"   * - :py:obj:`{name} <{package}.{name}>`", f"     - {said or _purpose(value, package)}"]
            entries += [*_entry(package, name, value, said), ""]
        return self.parse_text_to_nodes("\n".join([*table, "", *entries]))


def _purpose(value: Any, package: str) -> str:
    """The first paragraph of a docstring."""
    return _inline((inspect.getdoc(value) or "").split("\n\n")[0], package)


def _inline(text: str, package: str) -> str:
    return " ".join(convert(text.split("\n"), package))


def _entry(package: str, name: str, value: Any, said: str) -> list[str]:
    if inspect.isclass(value):
        bases = [] if value.__bases__ == (object,) else ["   :show-inheritance:"]
        return [f".. autoclass:: {package}.{name}", "   :members:", *bases]
    if inspect.isroutine(value):
        return [f".. autofunction:: {package}.{name}"]
    return [f".. py:data:: {name}", "", f"   {said}"]


class Commands(SphinxDirective):
    """The help of every command, as `--help` prints it."""

    def run(self) -> list[nodes.Node]:
        found: list[nodes.Node] = []
        for parser in _parsers(gistkit.cli.parser()):
            section = nodes.section(ids=[nodes.make_id(parser.prog)], names=[parser.prog])
            section += nodes.title("", parser.prog)
            # As wide as a page, whatever terminal the site is built in.
            with patch.dict(os.environ, COLUMNS="98"):
                section += nodes.literal_block(text=parser.format_help(), language="text")
            found.append(section)
        return found


def _parsers(parser: ArgumentParser) -> list[ArgumentParser]:
    """The commands below a parser that have none below them, in the order of its help."""
    # Some add theirs at first use.
    parser.format_help()
    below = [action for action in parser._actions if isinstance(action, _SubParsersAction)]
    if not below:
        return [parser]
    return [leaf for action in below for one in dict.fromkeys(action.choices.values()) for leaf in _parsers(one)]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("api", Api)
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
