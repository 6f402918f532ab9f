"""docs/transformers.md: its examples run with the trained compressor, and print what they say."""

import re

import pytest
from transformers.pipelines import PIPELINE_REGISTRY

from tests.helpers.smollm2 import ROOT, beside_the_report

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "transformers.md").read_text(), re.DOTALL)


@pytest.mark.slow
def test_the_examples_print_what_they_say(tmp_path, monkeypatch, capsys):
    beside_the_report(tmp_path, monkeypatch)
    names = {}
    try:
        for block in BLOCKS:
            exec(block, names)
            expected = re.findall(r"^print\(.*  # (.*)$", block, re.MULTILINE)
            assert expected and capsys.readouterr().out.splitlines() == expected
    finally:
        PIPELINE_REGISTRY.supported_tasks.pop("gist-text-generation", None)
