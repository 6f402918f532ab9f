"""Commands that other distributions bring, as entry points: the lab's, the server's and vLLM's."""

from __future__ import annotations

import argparse
from importlib.metadata import entry_points
from typing import Any

# {group of entry points: {name: the folder of this repository that brings it}}
BROUGHT = {
    "gistkit.commands": {"study": "lab", "serve": "apps/serve", "export": "apps/vllm"},
    "gistkit.view": {"results": "lab"},
    "gistkit.stores": {"stores": "apps/serve"},
}


def add_plugins(commands: Any, group: str) -> None:
    """Adds what a group's entry points name, each with a function `add`; one that is not installed says how to."""
    found = {entry.name: entry for entry in entry_points(group=group)}
    for name in {**BROUGHT[group], **found}:
        if name in found:
            found[name].load().add(commands)
        else:
            _add_missing(commands, name, BROUGHT[group][name])


def stores() -> Any:
    """What `gistkit compress` and `gistkit ask` do with stores, None where it is not installed."""
    return next((entry.load() for entry in entry_points(group="gistkit.stores")), None)


def missing(name: str, folder: str) -> ValueError:
    """What to say of something that is not installed."""
    return ValueError(f"{name}: expected gistkit's {folder}, which is not installed: pip install ./{folder}")


def _add_missing(commands: Any, name: str, folder: str) -> None:
    told = f"not installed: pip install ./{folder}"
    parser = commands.add_parser(name, help=told, description=told)
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    def refuse(arguments: argparse.Namespace) -> int:
        raise missing(name, folder)

    parser.set_defaults(run=refuse)
