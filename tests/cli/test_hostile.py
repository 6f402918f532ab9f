"""Hostile words on the command line: each command with each option, and every mistake is one line."""

import argparse
import io
import re
import sys

import pytest
import torch

from gistkit import cli, compress
from gistkit.options.models import new_compressor
from gistkit.options.outputs import check_file, check_folder
from tests.cli.test_cli import TEXT, commands, folder, report, run, small_llama  # noqa: F401 - fixtures
from tests.helpers.vision import tiny_vision

pytestmark = pytest.mark.usefixtures("one_thread")

NUMBERS = ("", "-1", "nan", "inf", "1e400", "x", "None", "[]", "²", "\0", "\udcff", "1" * 5000, "1" + "0" * 23)
# What every option of a file or folder that is read is given, and what every output is given.
INPUTS = ("empty", "binary", "latin.txt", "folder", "list.json", "deep.json", "missing", "empty/below", "x" * 5000)
OUTPUTS = ("-", "", "folder", "empty/below", "x" * 5000, "/proc/none/below", "a\0b")


@pytest.fixture
def hostile(tmp_path):
    """The working folder, with files that are none of what commands expect."""
    for name, content in (
        ("empty", b""), ("binary", bytes(range(256)) * 4), ("latin.txt", b"caf\xe9"), ("list.json", b"[1]\n"),
        ("deep.json", b"[" * 3000), ("ok.txt", TEXT.encode()),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    return tmp_path


def told(words, capsys):
    """The line that a command says, which must be one."""
    capsys.readouterr()
    try:
        status = cli.main([str(word) for word in words])
    except SystemExit as stop:
        status = stop.code
    lines = [line for line in re.split(r"[\r\n]+", capsys.readouterr().err) if line.startswith("gistkit")]
    lines = [line for line in lines if ": warning: " not in line]
    assert status == 2 and len(lines) == 1, (words, status, lines)
    return lines[0]


def actions(parser, *path):
    """The actions of a command's parser."""
    for word in path:
        parser.format_help()
        group = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        parser = group.choices[word]
    parser.format_help()
    return [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]


def kinds(action):
    """What an option takes: "choice", or the name of its converter, such as "whole", "number" or "path"."""
    name = getattr(action.type, "__qualname__", "")
    name = "path" if name in ("existing", "trained_folder") else name.partition(".")[0]
    return "choice" if action.choices else name


def checked(parser, command):
    """The actions of a command whose values its parser checks."""
    return [action for action in actions(parser, *command) if kinds(action) in ("whole", "number", "choice", "path")]


def test_numbers_and_paths_are_checked_by_their_converters():
    parser = cli.parser()
    for action in [action for command in commands(parser) for action in checked(parser, command)]:
        for value in {"path": ("", " ", "a\0b"), "whole": NUMBERS, "number": NUMBERS[:-1]}.get(kinds(action), ()):
            with pytest.raises(argparse.ArgumentTypeError, match="expected a") as error:
                action.type(value)
            assert len(str(error.value)) < 300


@pytest.mark.slow
@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_a_hostile_value_is_one_line_of_the_parser(command, capsys):
    for action in [action for action in checked(cli.parser(), command) if action.option_strings][:3]:
        # A path may be any text but these two.
        value = "\0" if kinds(action) == "path" else "1" * 5000
        line = told([*command, f"{action.option_strings[-1]}={value}"], capsys)
        assert line.startswith(f"gistkit {' '.join(command)}: argument ") and len(line) < 1200, line


def call(run, *words, **options):  # noqa: F811
    """(status, lines) of a command on the small model."""
    try:
        status, _, complaints = run(*words, **options)
    except SystemExit:
        # The parser's own refusal, which other tests look at: `run` left it where it was written.
        sys.stderr.seek(0)
        sys.stderr.truncate()
        return 2, ["gistkit: refused by the parser"]
    lines = [line for line in re.split(r"[\r\n]+", complaints) if line.startswith("gistkit")]
    return status, [line for line in lines if ": warning: " not in line]


COMPRESSOR = ("--ratio", 4, "--chunk", 20)
# {place of a hostile file: the command}
READING = {
    "text": lambda file: ("compress", file, "-o", "out.gist", *COMPRESSOR),
    "compressor": lambda file: ("compress", "ok.txt", "-o", "out.gist", "--compressor", file),
    "memory": lambda file: ("ask", file, "Who?", "--max-new-tokens", 4),
    "second memory": lambda file: ("ask", "ok.txt", "Who?", "--with", file, "--max-new-tokens", 4),
    "questions": lambda file: ("evaluate", "--questions", file, *COMPRESSOR),
    "held out": lambda file: ("evaluate", "--text", file, *COMPRESSOR),
    "corpus": lambda file: ("train", "--text", file, "--out", "run", *COMPRESSOR),
    "asked": lambda file: ("train", "--questions", file, "--losses", "qa", "--out", "run", *COMPRESSOR),
    "start": lambda file: ("train", "--compressor", file, "--out", "run"),
    "viewed": lambda file: ("view", "attention", "--text", file),
}


# A text in place of a memory is compressed on the way.
ASKED = ("memory", "second memory")


@pytest.mark.slow
@pytest.mark.parametrize("place", READING)
def test_files_that_are_something_else_are_refused(place, run, hostile):  # noqa: F811
    for file in INPUTS:
        if (place, file) in (("text", "list.json"), ("text", "deep.json"), ("viewed", "list.json")):
            continue
        status, lines = call(run, *READING[place](file))
        if status == 0:
            # A text may be anything that is UTF-8.
            assert file in ("list.json", "deep.json") and place in ("viewed", "held out", "corpus", *ASKED), (
                place,
                file,
            )
            continue
        assert status == 2 and len(lines) == 1 and len(lines[0]) < 1200, (place, file, lines)
    assert not list(hostile.glob("*.gist*"))


WRITING = {
    "compress": lambda out: ("compress", "ok.txt", "-o", out, *COMPRESSOR),
    "standard input": lambda out: ("compress", "-", "-o", out, *COMPRESSOR),
    "evaluate": lambda out: ("evaluate", "--out", out, *COMPRESSOR),
    "train": lambda out: ("train", "--out", out, *COMPRESSOR),
    "attention": lambda out: ("view", "attention", "--text", "ok.txt", "-o", out),
}


# One that writes files, one that writes a folder.
OTHERS = [pytest.param(each, marks=pytest.mark.slow) for each in WRITING if each not in ("compress", "train")]


@pytest.mark.parametrize("command", ["compress", "train", *OTHERS])
def test_outputs_are_checked_before_work_begins(command, run, hostile, monkeypatch):  # noqa: F811
    def load(*_):
        raise AssertionError("the model was loaded")

    for module in ("compress", "evaluate", "train", "view_attention"):
        monkeypatch.setattr(f"gistkit.cli.{module}.load_model", load)
    for out in OUTPUTS:
        fits = {"compress": ("folder",), "standard input": ("folder",), "train": ("-", "folder")}.get(command, ())
        if out in fits:
            continue
        words = WRITING[command](out)
        status, lines = call(run, *words, stdin=TEXT)
        assert status == 2 and len(lines) == 1, (out, lines)
    assert sorted(path.name for path in hostile.iterdir()) == [
        "binary", "deep.json", "empty", "folder", "latin.txt", "list.json", "ok.txt",
    ]  # fmt: skip


def test_what_can_be_written(tmp_path):
    (tmp_path / "there").write_text("")
    for path in ("there", "new", "new/below/it"):
        check_file("-o", tmp_path / path)
        check_folder("-o", tmp_path / "new" / path)
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="-o: expected a file, got a folder"):
        check_file("-o", tmp_path)
    with pytest.raises(ValueError, match=r"-o: cannot write to .*there.: Not a directory"):
        check_folder("-o", tmp_path / "there")
    # A device would be replaced by a file, if the user may do that.
    for place in ("/dev/null", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"):
        with pytest.raises(ValueError, match=f"-o: expected a file, got a device or a pipe, {place}"):
            check_file("-o", type(tmp_path)(place))
    (tmp_path / "link").symlink_to("there")
    check_file("-o", tmp_path / "link", [tmp_path / "new", None, "-"])
    with pytest.raises(ValueError, match=r"-o: expected another file than one that is read, got .*link"):
        check_file("-o", tmp_path / "link", [None, str(tmp_path / "there")])


@pytest.mark.parametrize(
    "words",
    [
        ["view", "attention", "--text", "ok.txt", "-o", "ok.txt"],
        ["evaluate", "--questions", "list.json", "ok.txt", "--out", "ok.txt"],
        ["evaluate", "--text", "ok.txt", "--out", "ok.txt"],
        ["judge", "list.json", "ok.txt", "--questions", "deep.json", "--out", "ok.txt"],
    ],
)
def test_no_command_writes_over_what_it_reads(words, hostile, capsys):
    assert f"{words[-2]}: expected another file than one that is read, got ok.txt" in told(words, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("method", compress.METHODS)
def test_settings_of_methods_are_named(method, monkeypatch):
    # An encoder's name is looked for in the cache of the hub only.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    values = [7, -1, 1e30, 10**23, 0.5, True, None, "x", [], [[]], {"ae": "x"}, float("nan")]
    build = (lambda: tiny_vision("llava").float()) if method == "voco" else lambda: small_llama(num_hidden_layers=2)
    model = build()
    needed = {"layer": 1} if method in ("dodo", "kv_distill") else {}
    # Adapters are most of the time of a compressor that is built; these two are none without.
    needed |= {} if method in ("kv_distill", "separate_encoder") else {"lora": None}
    for name in sorted(compress.METHODS[method].config_class.names()):
        for value in values:
            try:
                new_compressor(model, method, **needed | {name: value})
            except ValueError as error:
                assert name in str(error) and "\n" not in str(error), (name, value, error)
                continue
            # What is right may leave adapters in the model.
            model = build()


def test_no_memory_is_one_line_and_other_errors_are_not_hidden(monkeypatch, capsys):
    for error, caught in (
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("a bug"), False),
    ):

        def fail(_, error=error):
            raise error

        monkeypatch.setattr("gistkit.cli.info._run", fail)
        if caught:
            assert "out of memory; try smaller sizes" in told(["info"], capsys)
        else:
            with pytest.raises(RuntimeError, match="a bug"):
                cli.main(["info"])


def test_questions_of_another_encoding(run, report, folder, monkeypatch):  # noqa: F811
    assert run("compress", report, "--compressor", folder / "x500")[0] == 0
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9?\n")))
    status, lines = call(run, "ask", report.with_suffix(".gist"), "--compressor", folder / "x500")
    message = "standard input: expected UTF-8 text, got byte 0xe9 at 3; convert it with iconv"
    assert status == 2 and lines == [f"gistkit: {message}"]
