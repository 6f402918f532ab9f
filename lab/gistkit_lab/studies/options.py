"""Options that the commands of several studies take."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from gistkit.options.arguments import names, number, positive, several, whole

# More runs than that are a mistake, and would be listed before the first begins.
seeds_of = whole(1, 10_000)


def add_names(
    parser: argparse.ArgumentParser, option: str, choices: Sequence[str], default: Sequence[str], more: str = ""
) -> None:
    """An option of comma-separated names. `more`: help text before the default."""
    parser.add_argument(
        option,
        type=names(*choices),
        default=list(default),
        help=f"comma-separated{more} (default: {','.join(default)})",
    )


def add_fields(
    parser: argparse.ArgumentParser, recipe: Any, purposes: Mapping[str, str], choices: Mapping[str, Any]
) -> None:
    """An option for each of some fields of a recipe's class; one that is not given is None.

    Args:
        parser: of the command.
        recipe: the class.
        purposes: help texts by field.
        choices: the values of a field that has names.
    """
    kinds: dict[str, dict[str, Any]] = {
        "bool": {"action": argparse.BooleanOptionalAction},
        "int": {"type": whole(), "metavar": "N"},
        "float": {"type": number(1e-9, 1.0)},
        "tuple[int, ...]": {"type": several(positive), "metavar": "N,N,.."},
    }
    for each in fields(recipe):
        if each.name in purposes:
            kind = {"choices": choices[each.name]} if each.name in choices else kinds[str(each.type)]
            parser.add_argument(f"--{each.name.replace('_', '-')}", help=purposes[each.name], **kind)
