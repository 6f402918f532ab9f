"""Training curves: how soon a loss is reached, the pictures, and the command over runs."""

import json

import pytest

from gistkit import cli
from gistkit.train.metrics import read_metrics
from gistkit_lab.evaluate.curves import steps_to, training_curves
from gistkit_lab.viz.curves import draw_training_curves


def records(*values, loss="ae"):
    found = [{"step": 2 * (index + 1), loss: value, "loss": value, "lr": 0.1} for index, value in enumerate(values)]
    # An evaluation between the steps is none of the curve.
    return [*found[:1], {"step": 2, "held_out": {loss: 0.0}}, *found[1:]]


def test_the_first_step_whose_mean_is_at_the_goal():
    curve = records(4, 2, 0, 2, 1, 0)
    assert training_curves(curve, 1) == {"ae": [(2, 4), (4, 2), (6, 0), (8, 2), (10, 1), (12, 0)]}
    assert training_curves(curve, 3) == {"ae": [(6, 2), (8, pytest.approx(4 / 3)), (10, 1), (12, 1)]}
    assert training_curves(curve, 7) == training_curves([]) == {}
    # A single low step is no convergence where a mean is asked for.
    assert steps_to(curve, 0.0, over=1) == 6 and steps_to(curve, 1.0, over=3) == 10
    assert steps_to(curve, 0.5, over=3) is None and steps_to(curve, 9, loss="lm") is None
    with pytest.raises(ValueError, match="over: expected at least 1, got 0"):
        training_curves(curve, 0)


def test_a_panel_a_loss_and_a_line_a_run():
    both = [{**each, "lm": 3.0} if "ae" in each else each for each in records(*range(12, 0, -1))]
    runs = {"one": training_curves(both), "other": training_curves(records(*[5] * 12))}
    figure = draw_training_curves(runs, goal=0.01)
    first, second = figure.axes
    # The goal is a line too.
    assert [line.get_label() for line in first.lines[:2]] == ["one", "other"] and len(first.lines) == 3
    assert list(first.lines[0].get_ydata()) == [7.5, 6.5, 5.5] and list(first.lines[0].get_xdata()) == [20, 22, 24]
    assert len(second.lines) == 1 and (first.get_title("left"), second.get_title("left")) == ("AE", "LM")
    for wrong, message in (({}, "curves of 1 to 8 runs, got 0 with 0 losses"), ({"a": {}}, "got 1 with 0 losses")):
        with pytest.raises(ValueError, match=message):
            draw_training_curves(wrong)


def test_the_command(tmp_path, capsys):
    for name, values in (("fast", (3, 1, 0.001, 0.001)), ("slow", (3, 2, 1, 0.5))):
        (tmp_path / name).mkdir()
        lines = "".join(json.dumps(each) + "\n" for each in records(*values))
        (tmp_path / name / "metrics.jsonl").write_text(lines)
    out = tmp_path / "curves.png"
    runs = [str(tmp_path / name) for name in ("fast", "slow")]
    assert cli.main(["view", "curves", *runs, "--over", "2", "-o", str(out)]) == 0
    shown = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines() if line.startswith("|")]
    assert rows[0] == ["run", "steps to ae 0.01", "last ae", "steps"]
    assert rows[2:] == [[runs[0], "8", "0.0010", "8"], [runs[1], "-", "0.7500", "8"]]
    assert out.read_bytes().startswith(b"\x89PNG") and "Written" in shown
    assert cli.main(["view", "curves", runs[1], "--over", "1", "--goal", "2"]) == 0
    assert "| 4 " in capsys.readouterr().out and read_metrics(f"{runs[1]}/metrics.jsonl")[0]["step"] == 2
    for words, message in ((["-o", "a.gif"], "-o: expected a file that ends in .png"), (["x"], "No such file")):
        assert cli.main(["view", "curves", *runs, *words]) == 2
        assert message in capsys.readouterr().err
