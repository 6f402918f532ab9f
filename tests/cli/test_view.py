"""`gistkit view`: which layout a page gets, how a run is drawn, and what is refused."""

import inspect
import json
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the viz extra is not installed")

from gistkit import cli, layouts
from gistkit.cli.view_layout import example
from gistkit.cli.view_page import LARGEST
from gistkit.layouts import Role
from gistkit.viz.page import MOST_TOKENS


@pytest.mark.parametrize("method", layouts.BUILDERS)
def test_every_builder_has_a_command(method, tmp_path, capsys, monkeypatch):
    its = set(inspect.signature(getattr(layouts, method)).parameters)
    # Position IDs of several axes have no page.
    its = {"dodo": its - {"selected"} | {"context", "ratio"}, "voco": its - {"ids"}}.get(method, its)
    command = ["view", "layout", method.replace("_", "-")]
    with pytest.raises(SystemExit):
        cli.main([*command, "--help"])
    shown = capsys.readouterr().out
    assert its == {name.replace("-", "_") for name in re.findall(r"^  --(?!out)([a-z-]+)", shown, re.MULTILINE)}
    laid = []
    monkeypatch.setattr("gistkit.viz.page.layout_page", lambda layout: laid.append(layout) or "<html>")
    path = tmp_path / "view.html"
    assert cli.main([*command, *example(method).split(), "-o", str(path)]) == 0
    assert path.read_text() == "<html>" and f"Written: {path}, 6 B; open it in a browser" in capsys.readouterr().out
    assert len(laid[0]) <= 4096


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("gistpool", "--windows N number of windows that a memory token sees, at least 1; all: all up to its own."),
        ("decoder", 'after the task token and the question, at least 0; all is `context` for task "ae".'),
        ("voco", "--images N number of images, at least 1; all: the length of `vision` or `memory`, else 1."),
        ("causal", "model: TEXT tokens at positions 0..length-1. options:"),
        ("causal", "--length N number of tokens, at least 1."),
    ],
)
def test_help_has_the_words_of_the_builder_and_the_values_of_the_option(capsys, method, words):
    with pytest.raises(SystemExit):
        cli.main(["view", "layout", method, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert words in shown and "None" not in shown


def test_the_limit_is_that_of_the_page():
    assert LARGEST == MOST_TOKENS


def test_a_command_gives_its_arguments_on(monkeypatch):
    laid = []
    monkeypatch.setattr("gistkit.viz.page.layout_page", lambda layout: laid.append(layout) or "")
    words = "--context 20 --ratio 4 --text 3 --windows all --memory-sees-memory --no-memory-sees-bos"
    assert cli.main(["view", "layout", "gistpool", *words.split()]) == 0
    expected = layouts.gistpool(20, 4, 3, windows=None, memory_sees_memory=True, memory_sees_bos=False)
    assert (laid[0].dense_mask() == expected.dense_mask()).all() and Path("view.html").exists()
    assert cli.main(["view", "layout", "gist", "--context", "20", "--ratio", "2.5"]) == 0
    # Text is there without being asked for: what it sees is what a layout is about.
    assert (laid[1].roles == layouts.gist(20, 2.5, 16).roles).all()
    assert cli.main(["view", "layout", "dodo", "--context", "9", "--ratio", "4", "--tau", "2", "--bos"]) == 0
    assert np.flatnonzero(laid[2].roles == Role.MEMORY).tolist() == [3, 7] and laid[2].roles[0] == Role.BOS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gistpool --context 64 --ratio 2.5", "argument --ratio: expected a whole number from 0 to 4096, got '2.5'"),
        ("avgpool --context 9 --ratio 0", "gistkit: avgpool: expected ratio >= 1, got 0"),
        ("gist --context 4000 --ratio 4", "layout_page: expected a layout of at most 4096 tokens, got 5017"),
        ("dodo --context 9 --ratio 0 --tau 2", "dodo: expected ratio >= 1, got 0"),
        ("causal --length 5000", "argument --length: expected a whole number from 0 to 4096, got '5000'"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    try:
        status = cli.main(["view", "layout", *words.split(), "-o", "/nonexistent/view.html"])
    except SystemExit as stop:
        status = stop.code
    lines = capsys.readouterr().err.splitlines()
    assert status == 2 and message in lines[-1], lines


def test_a_run_is_drawn_from_its_metrics(tmp_path, capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr("gistkit.cli.view_run.write_picture", lambda path, figure, dpi: drawn.append((path, figure)))
    steps = [{"step": n, "ae": 4 / n, "loss": 4 / n, "lr": n / 4, "grad_norm": 1.0, "seconds": n} for n in range(1, 5)]
    # The last one has no loss.
    records = [*steps, {"step": 4, "held_out": {"ae": 1.5}}, {"step": 5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert cli.main(["view", "run", str(tmp_path), "--over", "9"]) == 0
    (mean,) = (line for line in drawn.pop()[1].axes[0].lines if line.get_label() == "ae")
    assert mean.get_xydata().tolist() == [[4, pytest.approx(25 / 12)]]
    capsys.readouterr()
    assert cli.main(["view", "run", str(tmp_path), "--over", "2"]) == 0
    shown = capsys.readouterr().out
    assert "4 steps, 4 s, last loss 1.0000" in shown and "held out, after step 4: ae 1.5000" in shown
    ((path, figure),) = drawn
    assert path == tmp_path / "run.png" and len(figure.axes) == 3
    lines = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].lines}
    assert lines["ae"] == [[2, 3], [3, (2 + 4 / 3) / 2], [4, (4 / 3 + 1) / 2]] and lines["ae, held out"] == [[4, 1.5]]
    # A name is no formula.
    (tmp_path / "a$5_$6").symlink_to(".")
    assert cli.main(["view", "run", str(tmp_path / "a$5_$6")]) == 0
    drawn.pop()[1].draw_without_rendering()
    assert cli.main(["view", "run", str(tmp_path / "none")]) == 2
    assert "RUN: expected the folder of a training run" in capsys.readouterr().err
