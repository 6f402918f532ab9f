"""Docstrings as reStructuredText: their sections, their code, and links for the names between backticks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import names

SECTIONS = {"Args:": "Parameters", "Returns:": "Returns", "Raises:": "Raises", "Attributes:": "Attributes"}
# What NumPy makes of NDArray[...], and what stands for a field's default that is made anew.
ARRAY = re.compile(r"~numpy\.ndarray\[tuple\[~typing\.Any, \.\.\.\], ~numpy\.dtype\[([~\w.]+)\]\]")
FACTORY = "<factory>"
# What autodoc makes of an alias beside None.
ALIAS = re.compile(r"[~\w.]*TypeAliasForwardRef\('([\w.]+)'\)")
ITEM = re.compile(r"(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*): (.*)")


def convert(lines: list[str], package: str, closer: Sequence[str] = (), own: Collection[str] = ()) -> list[str]:
    """The lines of a docstring, cleaned of its indentation, as reStructuredText.

    Args:
        lines: purpose, paragraphs, code that is indented by four, then sections with items.
        package: where names are looked up, after `closer`; see `names.resolve`.
        own: names that are parameters here, which are never links.
    """

    def inline(text: str) -> str:
        """Text between backticks becomes code, with a link where it names something; the rest means what it says."""
        parts = re.split(r"`([^`]+)`", text)
        for index, part in enumerate(parts):
            if index % 2 == 0:
                parts[index] = re.sub(r"[\\*|]|_(?!\w)", lambda found: "\\" + found[0], part)
                continue
            word = part.removesuffix("()")
            target = None if word in own else names.resolve(word, package, *closer)
            code = f"``{part}``" if target is None else f":py:obj:`{part} <{target}>`"
            # Markup ends at an empty escape where a letter follows, and begins at one behind a letter.
            before, after = parts[index - 1][-1:].isalnum(), parts[index + 1][:1].isalnum()
            parts[index] = "\\ " * before + code + "\\ " * after
        return "".join(parts)

    return list(_blocks(lines, inline))


def _blocks(lines: list[str], inline: Callable[[str], str]) -> Iterator[str]:
    index = 0
    text_before = ""
    while index < len(lines):
        line = lines[index]
        if line in SECTIONS:
            end = next((i for i in range(index + 1, len(lines)) if lines[i] and lines[i][0] != " "), len(lines))
            yield ""
            yield from _section(SECTIONS[line], [part[4:] for part in lines[index + 1 : end]], inline)
            yield ""
            index = end
        elif line.startswith("    ") and not text_before:
            end = next((i for i in range(index, len(lines)) if lines[i] and lines[i][0] != " "), len(lines))
            yield from ["::", "", *lines[index:end], ""]
            index = end
        else:
            if line.lstrip().startswith("- ") and text_before and not text_before.lstrip().startswith("- "):
                yield from _gap(text_before)
            yield inline(line)
            text_before = line
            index += 1


def _gap(before: str) -> list[str]:
    """A list needs an empty line before it, unless `before` is the rest of an item."""
    return [] if before.startswith("  ") else [""]


def _section(title: str, lines: list[str], inline: Callable[[str], str]) -> Iterator[str]:
    """A field: with an item for each name, or with text."""
    yield f":{title}:"
    for line in lines:
        found = ITEM.fullmatch(line)
        if found and title != "Returns":
            listed = ", ".join(f"**{name.strip('*')}**" for name in found[1].split(", "))
            yield f"    - {listed}: {inline(found[2])}"
        elif title == "Returns" or not line:
            yield f"    {inline(line)}" if line else ""
        else:
            yield f"      {inline(line.removeprefix('    '))}"


def on_docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """What autodoc calls for each object, whose lines it changes in place."""
    package = ".".join(name.split(".")[:2])
    owner = name if what in ("class", "exception") else name.rpartition(".")[0] if what != "module" else None
    function = obj.fget if isinstance(obj, property) else obj
    try:
        own = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        own = []
    closer = [owner] if owner is not None and inspect.isclass(names.find(owner)) else []
    lines[:] = convert(lines, package, [*closer, getattr(function, "__module__", None) or package], own)


def short(annotations: str) -> str:
    """A signature, or what it returns, with NDArray[...] as it is in the source, and an ellipsis for a made default."""
    annotations = ARRAY.sub(r"~numpy.typing.NDArray[\1]", annotations).replace(FACTORY, "...")
    return ALIAS.sub(r"~\1", annotations)


def on_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, arguments: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """What autodoc calls for each signature, whose two parts it takes back."""
    return arguments and short(arguments), returned and short(returned)


def on_missing(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement) -> nodes.Node | None:
    """A link to what a name without an entry stands for, or its text if it is not public; a wrong name is a warning."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    package = ".".join((node.get("py:module") or target).split(".")[:2])
    found = names.resolve(target, package)
    if found is None:
        return None
    entries = env.domains.python_domain.find_obj(env, None, None, found, None)
    if not entries:
        return content
    (full, place), *_ = entries
    uri = app.builder.get_relative_uri(node["refdoc"], place.docname) + f"#{place.node_id}"
    reference = nodes.reference("", "", internal=True, refuri=uri, reftitle=full)
    reference += content
    return reference


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", on_docstring)
    app.connect("autodoc-process-signature", on_signature)
    app.connect("missing-reference", on_missing)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
