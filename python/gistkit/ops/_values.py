"""Whether the values of an argument may be looked at: they are checked wherever that is possible."""

from __future__ import annotations

import torch
from torch import Tensor


def has_values(tensor: Tensor) -> bool:
    """Not while compiling, nor while a CUDA graph is captured, which may not wait for the device."""
    if torch.compiler.is_compiling():
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
