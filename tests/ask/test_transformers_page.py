"""docs/transformers.md: its examples run with the trained compressor, and print what they say."""

import re
import shutil

import pytest
from transformers.pipelines import PIPELINE_REGISTRY

from tests.helpers.smollm2 import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "transformers.md").read_text(), re.DOTALL)


@pytest.mark.slow
def test_the_examples_print_what_they_say(cached_smollm2, tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs/report.txt", tmp_path / "docs")
    names = {}
    try:
        for block in BLOCKS:
            exec(block, names)
            expected = re.findall(r"^print\(.*  # (.*)$", block, re.MULTILINE)
            assert expected and capsys.readouterr().out.splitlines() == expected
    finally:
        PIPELINE_REGISTRY.supported_tasks.pop("gist-text-generation", None)
