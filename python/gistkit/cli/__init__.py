"""The command `gistkit`, one file a command. A command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import io
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import NoReturn

from gistkit import __version__
from gistkit.cli import ask, compress, demo, evaluate, info, train, view
from gistkit.cli.overview import command_map
from gistkit.cli.plugins import add_plugins
from gistkit.common.messages import one_line, plain_terminals
from gistkit.common.signals import terminable
from gistkit.options.arguments import LateParser, Parser, check_values
from gistkit.options.messages import MOST, one_line_warnings, out_of_memory

__all__ = ["main", "parser"]
DESCRIPTION = "Compress contexts of transformers into memories, and ask them."
EXAMPLES = """\
example: gistkit ask report.txt "Who wrote it?"
         gistkit compress report.txt -o report.gist
         gistkit ask report.gist "Who wrote it?" "When?"
         gistkit COMMAND --help          # the options of a command"""
COMMANDS = (demo, compress, ask, view, info, train, evaluate)


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
    """A parser whose help lists all commands."""

    def format_help(self) -> str:
        return "\n\n".join([self.format_usage().rstrip(), str(self.description), command_map(self), f"{self.epilog}\n"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; its output contains no terminal control characters.

    A user's mistake prints one line on standard error and returns 2. A warning is one line. SIGINT, SIGTERM and SIGHUP
    print one line that says what is saved, and return 130, 143 or 129. Where nobody reads its output any more it ends
    with 141, as SIGPIPE ends others.
    """
    if sys.stdin is None:
        # Closed by whoever started the process.
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # Not every encoding has all the characters of an answer.
        sys.stdout.reconfigure(errors="replace")
    try:
        with plain_terminals():
            try:
                return _main(arguments)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
    except OSError as error:
        # Python flushes once more where it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        return _refuse(f"standard output: {error.strerror}")


def _main(arguments: Sequence[str] | None) -> int:
    options = argparse.Namespace()
    try:
        with terminable(), one_line_warnings():
            options = _parse(arguments)
            check_values(options)
            return options.run(options)
    except ModuleNotFoundError as error:
        return _refuse(_missing(error))
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ImportError) as error:
        return _refuse(_as_typed(str(error), options))
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return _refuse(f"out of memory; try smaller sizes ({str(error) or type(error).__name__:.200})")
    except KeyboardInterrupt as error:
        number = getattr(error, "number", signal.SIGINT)
        # Only one process of a launcher prints it.
        if os.environ.get("RANK", "0") == "0":
            word = "interrupted" if number == signal.SIGINT else "terminated"
            saved = f"; {options.saved(options)}" if "saved" in options else ""
            # The terminal may be gone.
            with suppress(OSError):
                print(f"\ngistkit: {word}{saved}", file=sys.stderr, flush=True)
        return 128 + number


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The parsed options; positional words after options are added to the list named by the command's `words`."""
    root = parser()
    options, late = root.parse_known_args(arguments)
    name: str = getattr(options, "words", "")
    if "refused" in options:
        return options
    # What follows -- are words, however they begin.
    end = late.index("--") if name and "--" in late else len(late)
    late, words = late[:end], late[end + 1 :]
    if late and (not name or any(word.startswith("-") and word != "-" for word in late)):
        _refuse_unknown(root, options, late)
    if "run" not in options:
        # No command: print the list, and exit as for a mistake.
        root.print_help(sys.stderr)
        sys.exit(2)
    if late or words:
        setattr(options, name, [*getattr(options, name), *late, *words])
    return options


def _refuse_unknown(root: argparse.ArgumentParser, options: argparse.Namespace, late: list[str]) -> NoReturn:
    """Ends with the words that a command does not know, and its option that is spelled most like the first of them."""
    known = [name for action in getattr(options, "actions", ()) for name in action.option_strings]
    word = next((word for word in late if word.startswith("-")), "").partition("=")[0]
    near = get_close_matches(word, known, n=1, cutoff=0.7)
    root.prog = getattr(options, "prog", root.prog)
    hints = [f"did you mean {name}?" for name in near] + [getattr(options, "more", "")]
    root.error("; ".join([f"unknown: {' '.join(late)}", *filter(None, hints)]))


def _refuse(reason: object) -> int:
    print(f"gistkit: {one_line(reason, MOST)}", file=sys.stderr)
    return 2


def _as_typed(message: str, options: argparse.Namespace) -> str:
    """A message about a Python argument, with the name of the option as typed: "--max-length: expected ..."."""
    flags = {
        action.dest: next(flag for flag in action.option_strings if flag.startswith("--"))
        for action in getattr(options, "actions", ())
        if any(flag.startswith("--") for flag in action.option_strings)
    }
    flags |= {name: f"--option {name}" for name, _ in getattr(options, "option", None) or ()}

    def flag(found: re.Match[str]) -> str:
        return flags.get(found[0], found[0])

    # In the middle of a message, only names with an underscore are surely arguments.
    return re.sub(r"^\w+(?=: )|(?<![\w.-])\w+_\w+\b(?![.(/=])", flag, message)


def _missing(error: ModuleNotFoundError) -> object:
    """The message that says what to install for a missing module."""
    from gistkit.info import MODULES, OPTIONAL

    name = (error.name or "").partition(".")[0]
    if not name or name == "gistkit":
        return error
    package = MODULES.get(name, name)
    return f"{name} is missing; run pip install {OPTIONAL.get(package, package)}"
