"""What a command that is interrupted, or whose disk is full, says and leaves."""

import errno
import io
import os
import signal
import sys
from contextlib import suppress

import pytest

from gistkit import cli, compress
from gistkit.common.signals import Interrupted, deferred_signals, terminable
from gistkit.train import checkpoints
from gistkit.train.trainer import Trainer
from tests.cli.test_cli import saved

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("model"))


@pytest.fixture
def words(model, tmp_path):
    """The arguments of a training of six steps, without checkpoints before its end."""
    (tmp_path / "book.txt").write_text(" ".join(f"Memory tokens stand for {number} tokens." for number in range(99)))
    words = ["train", "--model", model, "--text", tmp_path / "book.txt", "--out", tmp_path / "run", "--device", "cpu"]
    words += ["--batch", 2, "--min-length", 40, "--max-length", 40, "--chunk", 20, "--lora", 2, "--losses", "ae"]
    return [str(word) for word in [*words, "--steps", 6, "--held-out", 4]]


def last_line(capsys):
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "word"),
    [
        pytest.param(signal.SIGINT, "interrupted", id="int"),
        pytest.param(signal.SIGTERM, "terminated", id="term", marks=pytest.mark.slow),
    ],
)
def test_training_that_is_interrupted_says_where_it_goes_on(number, word, words, tmp_path, monkeypatch, capsys):
    step, out = Trainer.training_step, tmp_path / "run"

    def signalled(self, *args, **options):
        if self.state.global_step == 2:
            signal.raise_signal(number)
        return step(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "training_step", signalled)
        assert cli.main(words) == 128 + number
    path = out / "checkpoint-3"
    told = f"gistkit: {word}; {path} is saved, and the same command with --resume goes on from there"
    assert last_line(capsys) == told and checkpoints.find(out) == [path]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, id="int", marks=pytest.mark.slow), pytest.param(signal.SIGTERM, id="term")]
)
def test_an_interrupt_before_the_first_step_says_that_nothing_is_saved(number, words, monkeypatch, capsys):
    monkeypatch.setattr(Trainer, "_resumes", lambda *_: signal.raise_signal(number))
    assert cli.main(words) == 128 + number
    assert last_line(capsys).endswith("ed; nothing is saved yet")


def test_one_process_of_a_launcher_says_it(monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("gistkit.cli.info._run", interrupt)
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["info"]) == 130 and capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    assert cli.main(["info"]) == 130 and capsys.readouterr().err == "\ngistkit: interrupted\n"


@pytest.mark.parametrize("count", [0, 1])
def test_an_interrupted_compress_says_what_it_has_written(count, model, tmp_path, monkeypatch, capsys):
    paths = [tmp_path / name for name in ("a.txt", "b.txt")]
    for path in paths:
        path.write_text("Memory tokens stand for a text.")
    saved, save = [], compress.Memory.save

    def signalled(memory, path):
        if len(saved) == count:
            raise KeyboardInterrupt
        saved.append(path)
        save(memory, path)

    monkeypatch.setattr(compress.Memory, "save", signalled)
    assert cli.main([str(word) for word in ("compress", *paths, "--model", model, "--option", "by=key_norm")]) == 130
    told = f"written: {saved[0]}" if saved else "nothing is written yet"
    assert last_line(capsys) == f"gistkit: interrupted; {told}" and sorted(tmp_path.glob("*.gist")) == saved


@pytest.mark.usefixtures("hangups")
def test_a_held_signal_that_nobody_asked_about_acts_at_the_end():
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_signals() as signals:
        signal.raise_signal(signal.SIGINT)
        done.append(signals.number)
    assert done == [signal.SIGINT]
    for number in (signal.SIGTERM, signal.SIGHUP):
        with pytest.raises(Interrupted) as caught, terminable(), deferred_signals():
            signal.raise_signal(number)
        assert caught.value.number == number and signal.getsignal(number) == signal.SIG_DFL
    # An error on its way is not covered.
    with pytest.raises(ZeroDivisionError), deferred_signals():
        signal.raise_signal(signal.SIGINT)
        _ = 1 / 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("hangups")
def test_a_closed_terminal_ends_a_command_as_sigterm_does(monkeypatch, capsys):
    """Unless nohup had SIGHUP ignored; the terminal of its last line may be gone."""
    monkeypatch.setattr("gistkit.cli.info._run", lambda *_: signal.raise_signal(signal.SIGHUP) or 7)
    assert cli.main(["info"]) == 129 and capsys.readouterr().err == "\ngistkit: terminated\n"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert cli.main(["info"]) == 7
    finally:
        signal.signal(signal.SIGHUP, before)

    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(errno.EIO, "the terminal is gone")

    monkeypatch.setattr(sys, "stderr", Gone())
    assert cli.main(["info"]) == 129


@pytest.mark.parametrize(("group", "ended"), [(0, True), (1, False)], ids=["foreground", "background"])
def test_where_sigint_was_left_ignored_it_ends_what_a_terminal_has_in_its_foreground(group, ended, monkeypatch):
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp() + group)
    before, seen = signal.signal(signal.SIGINT, signal.SIG_IGN), []
    try:
        with suppress(Interrupted), terminable():
            signal.raise_signal(signal.SIGINT)
            seen.append("goes on")
        assert seen == ([] if ended else ["goes on"]) and signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
