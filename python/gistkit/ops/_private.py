"""Names that torch keeps to itself, each with what does without it: slower, and as right."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import forward_ad


def found_in(private: Any, modes: Any) -> SimpleNamespace:
    """The names, from torch's `_C` and its `forward_ad`, or from what stands for them.

    - transforms(): whether a transform of torch.func is active; unknown counts as active, and ops are then called as
      torch.library has them.
    - below_autograd(): a context in which ops are dispatched past autograd, or to it.
    - autocasts(): whether autocast may be on for some device.
    - levels: its _current_level is at least 0 where a level of forward-mode differentiation may be open;
      `knows_forward_mode`: and is.
    - dispatch_modes(): how many modes see every op; unknown counts as one.
    - functorch: distinguishes wrapped tensors of torch.func from others; None: not available.
    """
    knows = hasattr(modes, "_current_level")
    return SimpleNamespace(
        transforms=getattr(private, "_are_functorch_transforms_active", lambda: True),
        below_autograd=getattr(private, "_AutoDispatchBelowAutograd", nullcontext),
        autocasts=getattr(private, "_is_any_autocast_enabled", lambda: True),
        knows_forward_mode=knows,
        levels=modes if knows else SimpleNamespace(_current_level=0),
        dispatch_modes=getattr(private, "_len_torch_dispatch_stack", lambda: 1),
        functorch=getattr(private, "_functorch", None),
    )


FOUND = found_in(torch._C, forward_ad)
transforms, below_autograd, autocasts = FOUND.transforms, FOUND.below_autograd, FOUND.autocasts
levels, knows_forward_mode = FOUND.levels, FOUND.knows_forward_mode
dispatch_modes, functorch = FOUND.dispatch_modes, FOUND.functorch


# As a decorator: torch's compiler leaves the function out, and loads only when it is called.
uncompiled = getattr(torch, "_disable_dynamo", torch.compiler.disable)


def op_names() -> list[str]:
    """The names of all registered ops; [] where torch does not say."""
    return getattr(torch._C, "_dispatch_get_all_op_names", list)()  # type: ignore[no-any-return]


def has_cuda_kernel(op: str) -> bool | None:
    """Whether the op of this name has a kernel for CUDA; None where torch does not say."""
    look = getattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", None)
    return None if look is None else bool(look(op, "CUDA"))
