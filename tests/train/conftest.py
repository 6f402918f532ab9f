"""What tests of training share."""

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def imported_stays():
    """The end of every run collects garbage, which among all that is imported takes longer than a short run."""
    gc.freeze()
