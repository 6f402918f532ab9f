"""What torch's modes ask of every op: autocast, and forward-mode differentiation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gistkit.ops._private import functorch, knows_forward_mode, levels


def autocast(*tensors: Any, dtype: torch.dtype | None = None) -> tuple[Any, ...]:
    """Under `torch.autocast` the tensors in its dtype, as scaled_dot_product_attention takes them, or in `dtype`.

    As there, float64 stays, and so does all that is not a floating tensor. The first one says which device's autocast.
    """
    device = "cuda" if isinstance(tensors[0], Tensor) and tensors[0].is_cuda else "cpu"
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = dtype or torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if _is_cast(x) else x for x in tensors)


def _is_cast(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64


def refuse_forward_mode(op: str, *tensors: Any) -> None:
    """A NotImplementedError if a tensor carries a tangent: kernels know none, and the result's would be zero."""
    if levels._current_level < 0:
        return
    # Code that is being compiled has no tensors to ask.
    compiling = torch.compiler.is_compiling()
    if (compiling and knows_forward_mode) or (
        not compiling and any(isinstance(x, Tensor) and _has_tangent(x) for x in tensors)
    ):
        raise NotImplementedError(
            f"{op}: forward-mode differentiation (torch.func.jvp, jacfwd, torch.autograd.forward_ad) is not "
            "implemented: use backward or torch.autograd.grad"
        )


def _has_tangent(x: Tensor) -> bool:
    # Under several transforms only the innermost one's tangent can be seen: what they wrap counts as having one.
    if (
        functorch is not None
        and functorch.is_functorch_wrapped_tensor(x)
        and (functorch.is_batchedtensor(x) or _nested())
    ):
        return True
    return forward_ad.unpack_dual(x).tangent is not None


def _nested() -> bool:
    level = functorch.maybe_current_level()
    return level is not None and level > 1
