"""What models and files say is text to a terminal: no title, clipboard or screen is theirs to set."""

import io
import os
import sys

import pytest

from gistkit import cli
from gistkit.common.messages import plain, plain_terminals
from tests.helpers.terminal import Terminal

HOSTILE = "a\x1b]0;title\x07\x1b[2J\x9b5n\rb\tc\n\u202e d"
SHOWN = "a\ufffd]0;title\ufffd\ufffd[2J\ufffd5n\ufffdb\tc\n\ufffd d"
PRINTS = f"""
import sys
from gistkit import cli
from gistkit.cli import info
info._run = lambda _: print({HOSTILE!r}) or print({HOSTILE!r}, file=sys.stderr) or 0
sys.exit(cli.main(["info"]))
"""


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_every_script_stays_readable():
    text = "\u0645\u0631\u062d\u0628\u0627 \u092e\u0948\u0902 \U0001f469\u200d\U0001f52c na\u00efve \u65e5\u672c\n"
    assert plain(text) == text and plain(HOSTILE) == SHOWN


def test_what_a_command_prints_in_a_terminal_is_text():
    with Terminal("-c", PRINTS) as terminal:
        assert terminal.status() == 0
    assert "\x1b" not in terminal.shown and "\x07" not in terminal.shown and "\x9b" not in terminal.shown
    assert SHOWN in terminal.shown


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_only_terminals_are_filtered_and_bars_move_on_standard_error(name, monkeypatch):
    screen, file = Screen(), io.StringIO()
    for stream in (screen, file):
        monkeypatch.setattr(sys, name, stream)
        with plain_terminals():
            print(HOSTILE, end="", file=getattr(sys, name))
            getattr(sys, name).writelines(["\x1b[A", "\x1b[B"])
        assert getattr(sys, name) is stream
    assert file.getvalue() == HOSTILE + "\x1b[A\x1b[B"
    moved = {"stdout": "\ufffd[A\ufffd[B", "stderr": "\x1b[A\ufffd[B"}[name]
    assert screen.getvalue() == (SHOWN if name == "stdout" else SHOWN.replace("n\ufffdb", "n\rb")) + moved


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("place", ["a pipe that nobody reads", "/dev/full"])
def test_an_output_that_takes_no_more_ends_a_command_without_a_traceback(place, flush, monkeypatch, capsys):
    monkeypatch.setattr("gistkit.cli.info._run", lambda _: print("a line", flush=flush) or 0)
    if place == "/dev/full":
        end, status, told = os.open(place, os.O_WRONLY), 2, "No space left on device"
    else:
        (read, end), status, told = os.pipe(), 141, ""
        os.close(read)
    with open(end, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert cli.main(["info"]) == status
    assert told in capsys.readouterr().err if told else capsys.readouterr().err == ""


def test_characters_that_an_output_does_not_have_are_signs_of_them(monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr("gistkit.cli.info._run", lambda _: print("caf\u00e9 \u2713", end="") or 0)
    assert cli.main(["info"]) == 0 and output.buffer.getvalue() == b"caf\xe9 ?"


def test_errors_name_files_as_text(monkeypatch, tmp_path):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    assert cli.main(["ask", str(tmp_path / "\x1b[2J.gist"), "?"]) == 2
    assert "\x1b" not in screen.getvalue() and "[2J.gist" in screen.getvalue()
