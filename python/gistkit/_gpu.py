"""Questions about a tensor's device, none of which waits for a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def on_gpu(tensor: Tensor) -> bool:
    """Whether a plan whose spans are in this tensor gets lists of tiles."""
    return tensor.is_cuda


def has_values(tensor: Tensor) -> bool:
    """Whether an argument's values can be checked without waiting: on the CPU only, and not while compiling."""
    return tensor.is_cpu and not torch.compiler.is_compiling()


def capturing() -> bool:
    """Whether a CUDA graph is being captured: tensors made meanwhile belong to the graph."""
    return torch.cuda.is_current_stream_capturing()


def stream_of(tensor: Tensor) -> int:
    """The current stream of the tensor's device."""
    return torch.cuda.current_stream(tensor.device).cuda_stream
