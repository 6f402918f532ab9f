"""The quick start's exchange with the trained compressor: the commands print what it shows."""

import re
import shlex
import shutil

import pytest

from gistkit import cli
from tests.helpers.smollm2 import ROOT

(BLOCK,) = re.findall(
    r"```console\n(.*?)```", (ROOT / "docs/quickstart.md").read_text().replace(" \\\n", " "), re.DOTALL
)


@pytest.mark.slow
def test_the_exchange_of_the_quick_start(cached_smollm2, tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs/report.txt", tmp_path / "docs")
    commands = [part.split("\n", 1) for part in BLOCK.split("$ gistkit ")[1:]]
    assert len(commands) == 2
    for command, shown in commands:
        assert cli.main(shlex.split(command)) == 0
        # `compress` goes on with seconds and sizes.
        assert capsys.readouterr().out.startswith(shown)
