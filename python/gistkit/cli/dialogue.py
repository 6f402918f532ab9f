"""A conversation in a terminal: one question a line, and commands that begin with a slash."""

from __future__ import annotations

import re
import signal
import sys

from gistkit.cli.answers import Answers
from gistkit.common.messages import one_line
from gistkit.common.signals import deferred_signals
from gistkit.options.messages import MOST
from gistkit.options.texts import check_text

HELP = """\
Each line is a question, read after the earlier questions and answers.
  /sources on|off   show the parts of the text that each answer attended to most
  /new              start a new conversation on the same memory
  /help             show this list
  /quit             quit, as Ctrl-D does
Ctrl-C stops an answer."""


def converse(answers: Answers) -> None:
    """Answers questions from the terminal until end of input, /quit or SIGTERM."""
    try:
        # Lets `input` edit lines.
        import readline  # noqa: F401
    except ImportError:
        _notice("no line editing: this Python has no readline")
    _notice("One question a line; /help lists commands, Ctrl-D quits.")
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt as error:
            _refuse_terminated(error)
            print()
            continue
        except UnicodeDecodeError as error:
            _notice(f"gistkit: QUESTION: not text in the terminal's encoding: {error}")
            continue
        if re.fullmatch(r"/[a-z]+(\s.*)?", line):
            if _run_command(line.split(), answers):
                return
        elif line:
            _answer(line, answers)


def _run_command(words: list[str], answers: Answers) -> bool:
    """Runs a command; returns whether it ends the conversation."""
    match words:
        case ["/quit" | "/exit"]:
            return True
        case ["/help"]:
            _notice(HELP)
        case ["/new"]:
            answers.conversation.new()
            _notice("A new conversation on the same memory.")
        case ["/sources", "on" | "off" as choice]:
            answers.sources = choice == "on"
        case ["/sources"]:
            _notice(f"Sources are {'on' if answers.sources else 'off'}.")
        case _:
            _notice(f"gistkit: unknown command {' '.join(words)!r:.80}; /help lists all")
    return False


def _answer(question: str, answers: Answers) -> None:
    """Answers a question; Ctrl-C stops the answer after the current token, a second Ctrl-C at once."""
    try:
        check_text("QUESTION", question)
        with deferred_signals() as signals:
            gone = answers.answer(question, lambda: signals.number)
            if gone:
                _notice(f"The context window is full: dropped the oldest {'turn' if gone == 1 else f'{gone} turns'}.")
    except KeyboardInterrupt as error:
        _refuse_terminated(error)
        print(flush=True)
    except ValueError as error:
        _notice(f"gistkit: {one_line(error, MOST)}")


def _refuse_terminated(error: KeyboardInterrupt) -> None:
    """Raises SIGTERM, which ends more than an answer."""
    if getattr(error, "number", signal.SIGINT) != signal.SIGINT:
        raise error


def _notice(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
