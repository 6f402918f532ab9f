"""The command `gistkit`, a file for each command. A command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from gistkit import __version__
from gistkit.cli import ask, compress, demo, evaluate, info, judge, lm_eval, nuggets, train, view
from gistkit.cli.overview import command_map
from gistkit.cli.plugins import add_plugins
from gistkit.common.messages import one_line, plain_terminals
from gistkit.common.signals import terminable
from gistkit.options.arguments import LateParser, Parser
from gistkit.options.messages import MOST, one_line_warnings, out_of_memory

__all__ = ["main", "parser"]
DESCRIPTION = "Context compression and position layouts for transformers."
EXAMPLES = """\
example: gistkit ask report.txt "Who wrote it?"
         gistkit compress report.txt -o report.gist
         gistkit ask report.gist "Who wrote it?" "When?"
         gistkit COMMAND --help lists a command's options"""
COMMANDS = (demo, compress, ask, view, info, nuggets, train, evaluate, judge, lm_eval)


def parser() -> argparse.ArgumentParser:
    """The command line of `gistkit`."""
    root = _Map(prog="gistkit", description=DESCRIPTION, epilog=EXAMPLES)
    root.add_argument("--version", action="version", version=f"gistkit {__version__}")
    commands = root.add_subparsers(metavar="COMMAND", parser_class=LateParser)
    for command in COMMANDS:
        command.add(commands)
    add_plugins(commands, "gistkit.commands")
    return root


class _Map(Parser):
    """A parser whose help is the map of all commands."""

    def format_help(self) -> str:
        return "\n\n".join([self.format_usage().rstrip(), str(self.description), command_map(self), f"{self.epilog}\n"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command, whose output holds nothing that a terminal obeys.

    A user's mistake ends in one line on standard error and exit status 2, a warning is a line; SIGINT, SIGTERM and
    SIGHUP end in one that says what is saved, and 130, 143 or 129.
    """
    with plain_terminals():
        return _main(arguments)


def _main(arguments: Sequence[str] | None) -> int:
    options = argparse.Namespace()
    try:
        with terminable(), one_line_warnings():
            options = _parse(arguments)
            return options.run(options)
    except ModuleNotFoundError as error:
        return _refuse(_missing(error))
    except (ValueError, OSError, ImportError) as error:
        return _refuse(_as_typed(str(error), options))
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return _refuse(f"not enough memory; smaller sizes need less ({str(error) or type(error).__name__:.200})")
    except KeyboardInterrupt as error:
        number = getattr(error, "number", signal.SIGINT)
        # One line for all processes of a launcher.
        if os.environ.get("RANK", "0") == "0":
            word = "interrupted" if number == signal.SIGINT else "terminated"
            saved = f"; {options.saved(options)}" if "saved" in options else ""
            # The terminal may be gone.
            with suppress(OSError):
                print(f"\ngistkit: {word}{saved}", file=sys.stderr, flush=True)
        return 128 + number


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; words after an option are added to the list option named by the command's `words`."""
    root = parser()
    options, late = root.parse_known_args(arguments)
    name: str = getattr(options, "words", "")
    if "refused" in options:
        return options
    if late and (not name or any(word.startswith("-") and word != "-" for word in late)):
        root.error(f"unrecognized arguments: {' '.join(late)}")
    if "run" not in options:
        # Without a command: the map, and the status of a mistake.
        root.print_help(sys.stderr)
        sys.exit(2)
    if late:
        setattr(options, name, [*getattr(options, name), *late])
    return options


def _refuse(reason: object) -> int:
    print(f"gistkit: {one_line(reason, MOST)}", file=sys.stderr)
    return 2


def _as_typed(message: str, options: argparse.Namespace) -> str:
    """A message about an argument of Python's, with the option that was typed: "--max-length: expected ..."."""
    flags = {
        action.dest: next(flag for flag in action.option_strings if flag.startswith("--"))
        for action in getattr(options, "actions", ())
        if any(flag.startswith("--") for flag in action.option_strings)
    }

    def flag(found: re.Match[str]) -> str:
        return flags.get(found[0], found[0])

    # In the middle of a message a name is one where it cannot be a word.
    return re.sub(r"^\w+(?=: )|(?<![\w.-])\w+_\w+\b(?![.(/=])", flag, message)


def _missing(error: ModuleNotFoundError) -> object:
    """A message that says what to install for a missing module."""
    from gistkit.info import OPTIONAL

    name = (error.name or "").partition(".")[0]
    if not name or name == "gistkit":
        return error
    return f"{name} is missing; pip install {OPTIONAL.get(name, name)} brings it"
