"""A conversation in a terminal: a line for each question, and commands that begin with a slash."""

from __future__ import annotations

import re
import signal
import sys

from gistkit.cli.answers import Answers
from gistkit.common.messages import one_line
from gistkit.common.signals import held
from gistkit.options.messages import MOST
from gistkit.options.texts import check_text

HELP = """\
A line is a question, read behind the questions and answers before it.
  /sources on|off   after each answer, the parts of the text that it attended to most
  /new              begin a new conversation on the same memory
  /help             this list
  /quit             end, as Ctrl-D does
Ctrl-C stops an answer."""


def converse(answers: Answers) -> None:
    """Reads questions from the terminal until its end, /quit or SIGTERM, and answers them."""
    try:
        # It edits the lines that `input` reads.
        import readline  # noqa: F401
    except ImportError:
        _tell("lines cannot be edited: this Python has no readline")
    _tell("A question a line; /help lists commands, and Ctrl-D ends.")
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
            _tell(f"gistkit: QUESTION: expected a text of the terminal's encoding, got another: {error}")
            continue
        if re.fullmatch(r"/[a-z]+(\s.*)?", line):
            if _obey(line.split(), answers):
                return
        elif line:
            _answer(line, answers)


def _obey(words: list[str], answers: Answers) -> bool:
    """Obeys a command; whether it ends the conversation."""
    match words:
        case ["/quit" | "/exit"]:
            return True
        case ["/help"]:
            _tell(HELP)
        case ["/new"]:
            answers.conversation.new()
            _tell("A new conversation on the same memory.")
        case ["/sources", "on" | "off" as choice]:
            answers.sources = choice == "on"
        case ["/sources"]:
            _tell(f"Sources are {'on' if answers.sources else 'off'}.")
        case _:
            _tell(f"gistkit: expected a command that /help lists, got {' '.join(words)!r:.80}")
    return False


def _answer(question: str, answers: Answers) -> None:
    """Answers a question; Ctrl-C ends the answer after the token that is being made, a second one at once."""
    try:
        check_text("QUESTION", question)
        with held() as signals:
            gone = answers.answer(question, lambda: signals.number)
            if gone:
                _tell(f"The model's window is full: the oldest {'turn is' if gone == 1 else f'{gone} turns are'} gone.")
    except KeyboardInterrupt as error:
        _refuse_terminated(error)
        print(flush=True)
    except ValueError as error:
        _tell(f"gistkit: {one_line(error, MOST)}")


def _refuse_terminated(error: KeyboardInterrupt) -> None:
    """Raises what ends more than an answer: SIGTERM."""
    if getattr(error, "number", signal.SIGINT) != signal.SIGINT:
        raise error


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
