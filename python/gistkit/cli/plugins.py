"""Commands and options of other distributions, found by entry points: the lab's, the server's and vLLM's."""

from __future__ import annotations

import argparse
from typing import Any

from gistkit.common.messages import one_line
from gistkit.common.plugins import brought

# {group of entry points: {name: the folder of this repository that provides it}}
BROUGHT = {
    "gistkit.commands": {
        **dict.fromkeys(("study", "nuggets", "judge", "lm-eval"), "lab"),
        "serve": "apps/serve",
        "export": "apps/vllm",
    },
    "gistkit.view": {"results": "lab"},
    "gistkit.evaluate": {"presses": "lab", "protocols": "lab"},
    "gistkit.stores": {"stores": "apps/serve"},
}


def add_plugins(commands: Any, group: str) -> None:
    """Adds a group's commands by their function `add`; a missing one is listed with the reason."""
    found = {entry.name: entry for entry in brought(group)}
    for name in {**BROUGHT[group], **found}:
        if name not in found:
            folder = BROUGHT[group][name]
            _add_refused(commands, name, f"not installed: pip install ./{folder}", missing(name, folder))
            continue
        try:
            command = found[name].load()
        except Exception as error:
            # A broken distribution must not break other commands.
            reason = f"cannot be loaded: {one_line(error)}"
            _add_refused(commands, name, reason, ValueError(f"{name}: {reason}"))
        else:
            command.add(commands)


def stores() -> Any:
    """The store functions of `gistkit compress` and `gistkit ask`; None if they are not installed."""
    return next((entry.load() for entry in brought("gistkit.stores")), None)


def add_evaluations(parser: Any) -> list[Any]:
    """Adds the options of evaluations to `gistkit evaluate`; returns the modules that make them, those that are there.

    The error for an unknown option says what is missing.
    """
    found = {entry.name: entry for entry in brought("gistkit.evaluate")}
    commands, notes = [], []
    for name, folder in BROUGHT["gistkit.evaluate"].items():
        if name not in found:
            notes.append(f"pip install ./{folder} adds options")
            continue
        try:
            commands.append(found[name].load())
        except Exception as error:
            notes.append(f"{name} cannot be loaded: {one_line(error)}")
    for command in commands:
        command.add(parser)
    parser.set_defaults(more="; ".join(dict.fromkeys(notes)))
    return commands


def missing(name: str, folder: str) -> ValueError:
    """The error for a command that is not installed."""
    return ValueError(f"{name} is not installed; pip install ./{folder} provides it")


def _add_refused(commands: Any, name: str, reason: str, error: ValueError) -> None:
    parser = commands.add_parser(name, help=reason, description=reason)

    def refuse(arguments: argparse.Namespace) -> int:
        raise error

    # Accepts any options.
    parser.set_defaults(run=refuse, refused=True)
