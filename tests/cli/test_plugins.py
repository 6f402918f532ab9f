"""Commands of other distributions: those that are missing or broken say so, and the others go on."""

from importlib.metadata import EntryPoint

import pytest

from gistkit import cli


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("study --steps 2", "study is not installed; pip install ./lab provides it"),
        ("judge a.json b.json", "judge is not installed; pip install ./lab provides it"),
        ("view results a.jsonl", "results is not installed; pip install ./lab provides it"),
        ("evaluate --baselines summary", "--baselines: expected some of none, full, got summary; pip install ./lab "
         "provides others"),
        ("broken --steps 2", "broken: cannot be loaded: No module named 'nowhere'"),
    ],
)  # fmt: skip
def test_a_command_that_is_not_there_is_refused_by_name(words, message, monkeypatch, capsys):
    entries = [EntryPoint("broken", "nowhere.at.all", "gistkit.commands")]
    monkeypatch.setattr(
        "gistkit.cli.plugins.brought", lambda group: [entry for entry in entries if entry.group == group]
    )
    assert cli.main(words.split()) == 2
    assert capsys.readouterr().err == f"gistkit: {message}\n"
    assert cli.main(["info"]) == 0


def test_an_unknown_option_of_an_evaluation_says_what_is_missing(monkeypatch, capsys):
    for entries, told in (
        ([], "pip install ./lab adds options"),
        ([EntryPoint(name, "nowhere.at.all", "gistkit.evaluate") for name in ("presses", "protocols")],
         "presses cannot be loaded: No module named 'nowhere'; protocols cannot be loaded: No module named 'nowhere'"),
    ):  # fmt: skip
        monkeypatch.setattr(
            "gistkit.cli.plugins.brought",
            lambda group, entries=entries: entries if group == "gistkit.evaluate" else [],
        )
        with pytest.raises(SystemExit) as stop:
            cli.main(["evaluate", "--judge-model", "x"])
        assert stop.value.code == 2
        assert f"evaluate: unknown: --judge-model x; did you mean --model?; {told}; " in capsys.readouterr().err
        # The rest of the command stays.
        assert cli.main(["evaluate", "--split", "train"]) == 2
        assert capsys.readouterr().err.startswith("gistkit: --split: expected validation or test")
