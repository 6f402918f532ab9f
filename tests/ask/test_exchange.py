"""The quick start's exchange with the trained compressor: the commands print what it shows."""

import re
import shlex

import pytest

from gistkit import cli
from tests.helpers.smollm2 import ROOT, beside_the_report

(BLOCK,) = re.findall(
    r"```console\n(.*?)```", (ROOT / "docs/quickstart.md").read_text().replace(" \\\n", " "), re.DOTALL
)


@pytest.mark.slow
def test_the_exchange_of_the_quick_start(tmp_path, monkeypatch, capsys):
    beside_the_report(tmp_path, monkeypatch)
    commands = [part.split("\n", 1) for part in BLOCK.split("$ gistkit ")[1:]]
    assert len(commands) == 2
    for command, shown in commands:
        assert cli.main(shlex.split(command)) == 0
        # `compress` goes on with seconds and sizes.
        assert capsys.readouterr().out.startswith(shown)
