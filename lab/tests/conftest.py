"""The text that tests of the lab read, and a study's command that measures little."""

import pytest
from study_runs import FewChunks

from gistkit.train import load_corpus
from gistkit_lab.studies import epl


@pytest.fixture(scope="session")
def corpus():
    """Python's topics as bytes."""
    return load_corpus()


@pytest.fixture
def few_chunks(monkeypatch):
    """The commands `demo` and `study epl` measure on few chunks."""
    monkeypatch.setattr(epl.Epl, "recipe_type", FewChunks)
