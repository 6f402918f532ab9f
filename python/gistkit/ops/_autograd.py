"""Gradients of ops, of which a call in eager mode records them at half the cost of torch.library's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def differentiable(
    op: Any, backward: Callable[..., Any], setup_context: Callable[[Any, tuple[Any, ...], Any], None]
) -> Callable[..., Any]:
    """The op with its gradient registered, for whoever calls it, and a function of the same arguments for its door.

    torch.library walks schema and arguments on every call, some 20 us of Python; a Function of one's own does not. What
    is compiled sees the op. A door that gradients are off for may call the op itself.

    Args:
        op: an overload, such as `torch.ops.gistkit.rope.default`.
        backward, setup_context: as `torch.library.register_autograd` takes them.
    """
    torch.library.register_autograd(op, backward, setup_context=setup_context)

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = op(*inputs)
        setup_context(ctx, inputs, output)
        return output

    functions = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    apply = type(f"Recorded_{op._opname}", (torch.autograd.Function,), functions).apply  # type: ignore[attr-defined]

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return op(*inputs)
        for x in inputs:
            if isinstance(x, Tensor) and x.requires_grad:
                return apply(*inputs)
        return op(*inputs)

    return call
