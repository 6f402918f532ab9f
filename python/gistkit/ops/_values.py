"""Whether the values of an argument are looked at: they are checked wherever nothing has to wait for that."""

from __future__ import annotations

import torch
from torch import Tensor


def has_values(tensor: Tensor) -> bool:
    """On the CPU alone, which knows them, and not while compiling."""
    return tensor.is_cpu and not torch.compiler.is_compiling()
