"""Pages of the site with the trained compressor: their commands and examples run, and print what they show."""

import re
import shlex
import shutil

import pytest
from transformers.pipelines import PIPELINE_REGISTRY

from gistkit import cli
from tests.helpers.smollm2 import ROOT

pytestmark = pytest.mark.slow


def blocks(page, language):
    """The page's blocks of code; the tests' folder has what they read."""
    shutil.copytree(ROOT / "docs", "docs", ignore=lambda folder, names: {*names} - {"report.txt"})
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


def test_the_exchange_of_the_quick_start(cached_smollm2, capsys):
    (block,) = blocks("quickstart.md", "console")
    commands = [part.split("\n", 1) for part in block.replace(" \\\n", " ").split("$ gistkit ")[1:]]
    assert len(commands) == 2
    for command, shown in commands:
        assert cli.main(shlex.split(command)) == 0
        # `compress` goes on with seconds and sizes.
        assert capsys.readouterr().out.startswith(shown)


def test_the_examples_of_the_page_on_transformers(cached_smollm2, capsys):
    names = {}
    try:
        for block in blocks("transformers.md", "python"):
            exec(block, names)
            expected = re.findall(r"^print\(.*  # (.*)$", block, re.MULTILINE)
            assert expected and capsys.readouterr().out.splitlines() == expected
    finally:
        PIPELINE_REGISTRY.supported_tasks.pop("gist-text-generation", None)
