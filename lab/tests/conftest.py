"""The text that tests of the lab read, and a study's command that measures little."""

import pytest
import torch
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


@pytest.fixture
def double():
    """From one seed, with float64 as the default dtype."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
