"""The list of all commands that `gistkit` and `gistkit --help` print, generated from the parsers."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Mapping, Sequence

# A command in no group is listed in the last one.
GROUPS: Mapping[str, Sequence[str]] = {
    "compress a text and ask it": ("compress", "ask", "serve", "demo", "export"),
    "look inside": ("view", "info", "nuggets"),
    "train and measure": ("train", "evaluate"),
    "the papers' experiments": ("study", "judge", "lm-eval"),
}
WIDTH = 100


def command_map(root: argparse.ArgumentParser) -> str:
    """All commands and subcommands of a parser with their help lines, in groups."""
    lines = {
        name: [(name, purpose), *((f"{name} {below}", words) for below, words, _ in _commands(parser))]
        for name, purpose, parser in _commands(root)
    }
    groups = {title: [name for name in names if name in lines] for title, names in GROUPS.items()}
    grouped = {name for names in groups.values() for name in names}
    next(reversed(groups.values())).extend(name for name in lines if name not in grouped)
    column = max(len(words) for rows in lines.values() for words, _ in rows) + 4
    parts = []
    for title, names in groups.items():
        group_lines = [title]
        for name in names:
            for words, purpose in lines[name]:
                text = textwrap.wrap(purpose, WIDTH - column) or [""]
                group_lines.append(f"  {words}".ljust(column) + text[0])
                group_lines += [" " * column + more for more in text[1:]]
        if names:
            parts.append("\n".join(group_lines))
    return "\n\n".join(parts)


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """The name, help and parser of each command of a parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                yield choice.dest, choice.help or "", action.choices[choice.dest]
