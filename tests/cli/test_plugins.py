"""Commands of other distributions: those that are missing or broken say so, and the others go on."""

from importlib.metadata import EntryPoint

import pytest

from gistkit import cli


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("study", "study is not installed; pip install ./lab provides it"),
        ("broken", "broken: cannot be loaded: No module named 'nowhere'"),
    ],
)
def test_a_command_that_is_not_there_is_refused_by_name(command, message, monkeypatch, capsys):
    entries = [EntryPoint("broken", "nowhere.at.all", "gistkit.commands")]
    monkeypatch.setattr(
        "gistkit.cli.plugins.entry_points", lambda group: [entry for entry in entries if entry.group == group]
    )
    assert cli.main([command, "--steps", "2"]) == 2
    assert capsys.readouterr().err == f"gistkit: {message}\n"
    assert cli.main(["info"]) == 0
