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
        ("evaluate --judge http://x/v1", "--judge is not installed; pip install ./lab provides it"),
        ("evaluate --baselines summary", "--baselines: expected some of none, full, got summary; pip install ./lab "
         "provides others"),
        ("evaluate --judge-model x", "--judge-model is not installed; pip install ./lab provides it"),
        ("evaluate --prompt dodo", "--prompt is not installed; pip install ./lab provides it"),
        ("evaluate --prompt plain --images x", "--images is not installed; pip install ./lab provides it"),
        ("evaluate --tau 4", "--tau is not installed; pip install ./lab provides it"),
        ("evaluate --against presses", "--against: cannot be loaded: No module named 'nowhere'"),
        ("broken --steps 2", "broken: cannot be loaded: No module named 'nowhere'"),
    ],
)  # fmt: skip
def test_a_command_that_is_not_there_is_refused_by_name(words, message, monkeypatch, capsys):
    entries = [EntryPoint("broken", "nowhere.at.all", "gistkit.commands")]
    entries += [EntryPoint("presses", "nowhere.at.all", "gistkit.evaluate")]
    monkeypatch.setattr(
        "gistkit.cli.plugins.entry_points", lambda group: [entry for entry in entries if entry.group == group]
    )
    assert cli.main(words.split()) == 2
    assert capsys.readouterr().err == f"gistkit: {message}\n"
    assert cli.main(["info"]) == 0
