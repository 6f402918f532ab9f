"""The layout of a plain causal language model."""

import numpy as np

from gistkit.layouts._checks import at_least
from gistkit.layouts.layout import Layout
from gistkit.layouts.relations import CAUSAL, Role


def causal(length: int) -> Layout:
    """A plain causal language model: TEXT tokens at positions 0..length-1. `length`: int, at least 1."""
    length = at_least("causal", "length", length, 1)
    return Layout(roles=np.full(length, Role.TEXT, np.uint8), sees={Role.TEXT: {Role.TEXT: CAUSAL}}, name="causal")
