"""Gradients of ops, recorded in eager mode at half the cost of torch.library's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gistkit.ops._modes import refuse_forward_mode
from gistkit.ops._private import below_autograd, levels, transforms


def differentiable(
    op: Any, backward: Callable[..., Any], setup_context: Callable[[Any, tuple[Any, ...], Any], None]
) -> Callable[..., Any]:
    """Registers the op's gradient and returns a faster function of the same arguments for its Python wrapper.

    torch.library walks schema and arguments on every call, some 20 us of Python; a Function of our own does not. A call
    that records nothing leaves autograd out, whose kernel of torch.library takes 5 us of Python even then. Compiled
    code sees the op. So do torch.func's transforms, through a Function of the form that they ask for, which torch calls
    more slowly. Tangents of forward-mode differentiation are refused, in inputs and upstream gradients.

    Args:
        op: an overload, such as `torch.ops.gistkit.rope.default`.
        backward, setup_context: as `torch.library.register_autograd` takes them.
    """
    name = op._opname

    def checked(ctx: Any, *grads: Any) -> Any:
        refuse_forward_mode(name, *grads)
        return backward(ctx, *grads)

    torch.library.register_autograd(op, checked, setup_context=setup_context)

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = unrecorded(op, inputs)
        setup_context(ctx, inputs, output)
        return output

    def function(kind: str, **members: Any) -> Any:
        methods = {key: staticmethod(member) for key, member in members.items()}
        base = (torch.autograd.Function,)
        return type(f"{kind}_{name}", base, {**methods, "generate_vmap_rule": kind == "Transformed"}).apply  # type: ignore[attr-defined]

    apply = function("Recorded", forward=forward, backward=checked)
    transformed = function(
        "Transformed",
        forward=lambda *inputs: unrecorded(op, inputs),
        setup_context=setup_context,
        backward=checked,
    )

    def call(*inputs: Any) -> Any:
        if levels._current_level >= 0:
            refuse_forward_mode(name, *inputs)
        if torch.compiler.is_compiling():
            return op(*inputs)
        if torch.is_grad_enabled():
            for x in inputs:
                if isinstance(x, Tensor) and x.requires_grad:
                    return transformed(*inputs) if transforms() else apply(*inputs)
        return unrecorded(op, inputs)

    return call


def once(op: Any, name: str, what: str = "the gradient's own gradient (double backward)") -> Callable[..., Any]:
    """The op, which computes gradients of the op `name` and has none itself: `what` is refused."""

    def refuse(ctx: Any, *grads: Any) -> None:
        raise NotImplementedError(f"{name}: {what} is not implemented")

    return differentiable(op, refuse, lambda ctx, inputs, output: None)


def unrecorded(op: Any, inputs: tuple[Any, ...]) -> Any:
    """The op where no gradient is recorded: dispatched as ever, but past autograd."""
    # A transform of torch.func brings its own autograd.
    if transforms():
        return op(*inputs)
    with below_autograd():
        return op(*inputs)
