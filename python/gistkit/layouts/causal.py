"""The layout of a plain causal language model, and its plan for the last tokens."""

from __future__ import annotations

import numpy as np
import torch

from gistkit.common.checks import at_least
from gistkit.layouts.builders import example
from gistkit.layouts.layout import Layout
from gistkit.layouts.plan import Plan
from gistkit.layouts.relations import CAUSAL, Role


@example("Causal", length=18)
def causal(length: int) -> Layout:
    """A plain causal language model: TEXT tokens at positions 0..length-1.

    Args:
        length: number of tokens, at least 1.
    """
    length = at_least("causal", "length", length, 1)
    return Layout(roles=np.full(length, Role.TEXT, np.uint8), sees={Role.TEXT: {Role.TEXT: CAUSAL}}, name="causal")


def causal_plan(num_queries: int, num_keys: int, device: torch.device, window: int | None = None) -> Plan:
    """The plan of plain causal attention: the queries are the last `num_queries` of `num_keys` tokens.

    With `window` each sees itself and at most the `window` - 1 keys before it.
    """
    end = torch.arange(num_keys - num_queries + 1, num_keys + 1, dtype=torch.int32, device=device)
    start = torch.zeros_like(end) if window is None else (end - window).clamp(min=0)
    return Plan(torch.stack([start, end], -1)[None, :, None], num_keys)


def full_plan(tokens: int, device: torch.device) -> Plan:
    """Every token sees every token."""
    span = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    return Plan(span.repeat(1, tokens, 1, 1), tokens)
