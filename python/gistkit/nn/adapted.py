"""adapted_linear: a linear map with LoRA adapters on some rows of its input, computed in the map's dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gistkit.ops._private import levels, transforms


class Factors(NamedTuple):
    """A LoRA adapter of some rows: scale up down (LoRA, arXiv 2106.09685, eq. 3).

    down [r, in], up [out, r], scale alpha / r, and the rows [start, stop) of x [.., N, in].
    """

    down: Tensor
    up: Tensor
    scale: float
    start: int
    stop: int


def adapted_linear(x: Tensor, base: nn.Linear, adapters: Sequence[Factors]) -> Tensor:
    """x W^T + bias, plus scale (x A^T) B^T at the rows of each adapter, with W and bias frozen.

    The products run in x's dtype; the factors, which may be wider, are rounded for them, and on a GPU their gradients
    are summed in float32. Second derivatives are not supported.

    Args:
        x: [.., N, in], in the dtype of W.
        base: the map of W [out, in] and bias [out] or None.
        adapters: of rows that do not overlap.

    Returns:
        [.., N, out] in x's dtype.
    """
    factors = [factor for adapter in adapters for factor in adapter[:2]]
    of_rows = [adapter[2:] for adapter in adapters]
    return _AdaptedLinear.apply(x, base.weight, base.bias, of_rows, *factors)  # type: ignore[no-any-return]


def fits(x: Tensor, base: Any, down: Any, up: Any, dropout: nn.Module) -> bool:
    """Whether `adapted_linear` can run these modules: plain, frozen, no dropout, hooks, autocast or compilation."""
    return (
        all(map(plain, (base, down, up)))
        and x.dtype == base.weight.dtype
        and not base.weight.requires_grad
        and (base.bias is None or not base.bias.requires_grad)
        and down.bias is None
        and up.bias is None
        and x.dim() >= 2
        and x.numel() > 0
        and (isinstance(dropout, nn.Identity) or not dropout.training)
        and not any(map(watched, (base, down, up)))
        and not torch.is_autocast_enabled(x.device.type)
        and not torch.compiler.is_compiling()
        and not transformed()
    )


def plain(module: Any) -> bool:
    """Whether the module is a linear map whose weight is a torch tensor, and no quantised or distributed subclass."""
    return type(module) is nn.Linear and type(module._parameters.get("weight")) in (Tensor, nn.Parameter)


def transformed() -> bool:
    """Whether torch.func or forward-mode differentiation may be active, which this package's functions do not know."""
    return transforms() or levels._current_level >= 0


def watched(module: Any) -> bool:
    """Whether the module has hooks, or a forward other than that of its class."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or "forward" in vars(module)


class _AdaptedLinear(torch.autograd.Function):
    """For the backward pass it keeps the rows that have adapters, and their small products scale x A^T."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, of_rows: list[Any], *factors: Tensor
    ) -> Tensor:
        tokens = x.reshape(-1, *x.shape[-2:])
        # Not the view that a linear map returns: models may change it in place.
        out = x.new_empty(*x.shape[:-1], len(weight))
        out_tokens = out.view(-1, *out.shape[-2:])
        every, flat = tokens.flatten(0, 1), out.view(-1, len(weight))
        if bias is None:
            torch.mm(every, weight.t(), out=flat)
        else:
            torch.addmm(bias, every, weight.t(), out=flat)
        rounded = [factor.to(x.dtype) for factor in factors]
        read = [_flat(tokens, start, stop) for _, start, stop in of_rows]
        lows = [
            _scaled(scale, rows, down.t()) for (scale, *_), rows, down in zip(of_rows, read, rounded[::2], strict=True)
        ]
        for (_, *where), low, up in zip(of_rows, lows, rounded[1::2], strict=True):
            _add(out_tokens, low, up.t(), *where)
        ctx.save_for_backward(weight, *rounded, *read, *lows)
        ctx.of_rows, ctx.dtypes, ctx.shape = of_rows, [factor.dtype for factor in factors], x.shape
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        with torch.autocast(grad.device.type, enabled=False):
            return _gradients(ctx, grad)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    weight, *others = ctx.saved_tensors
    count = len(ctx.of_rows)
    rounded, read, lows = others[: 2 * count], others[2 * count : 3 * count], others[3 * count :]
    grad_tokens = grad.reshape(-1, *grad.shape[-2:])
    grad_x = grad_tokens @ weight if ctx.needs_input_grad[0] else None
    grads: list[Tensor | None] = []
    for i, ((scale, start, stop), rows, low) in enumerate(zip(ctx.of_rows, read, lows, strict=True)):
        down, up = rounded[2 * i : 2 * i + 2]
        grad_rows = _flat(grad_tokens, start, stop)
        grad_low = _scaled(scale, grad_rows, up)
        if grad_x is not None:
            _add(grad_x, grad_low, down, start, stop)
        pairs = (grad_low, rows), (grad_rows, low)
        grads += [
            _summed(*pair, dtype) if needed else None
            for pair, dtype, needed in zip(
                pairs, ctx.dtypes[2 * i : 2 * i + 2], ctx.needs_input_grad[4 + 2 * i : 6 + 2 * i], strict=True
            )
        ]
    return None if grad_x is None else grad_x.view(ctx.shape), None, None, None, *grads


def _flat(tokens: Tensor, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of each sequence, [B * n, d]: a copy only where several sequences have other rows between."""
    return tokens[:, start:stop].flatten(0, 1)


def _scaled(scale: float, left: Tensor, right: Tensor) -> Tensor:
    """scale left right, in one operation."""
    return torch.addmm(left.new_empty(()), left, right, beta=0, alpha=scale)


def _add(out: Tensor, left: Tensor, right: Tensor, start: int, stop: int) -> None:
    """Adds left right to rows [start, stop) of each sequence of `out`, in place."""
    rows = out[:, start:stop]
    if len(out) == 1 or rows.shape == out.shape:
        flat = rows.view(-1, rows.shape[-1])
        torch.addmm(flat, left, right, out=flat)
    else:
        rows.baddbmm_(left.view(*rows.shape[:2], -1), right.expand(len(out), -1, -1))


def _summed(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left^T right, whose sums are not rounded to the operands' dtype on the way to a wider one."""
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16) and dtype == torch.float32:
        return torch.mm(left.t(), right, out_dtype=dtype)
    return torch.mm(left.t(), right).to(dtype)


class AdaptedMap:
    """The forward of PEFT's layer around a linear map, by `adapted_linear` where one adapter of plain LoRA is active.

    Anything else passes to the layer: several adapters, none, merged ones, and what does not fit (`fits`).

    Args:
        layer: PEFT's layer.
    """

    def __init__(self, layer: Any) -> None:
        self._layer, self._plain = layer, layer.forward

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The map of x [.., in], as [.., out]."""
        layer = self._layer
        names = layer.active_adapters
        if len(names) == 1 and not layer._disable_adapters and not layer.merged and not args and not kwargs:
            (name,) = names
            if name in layer.lora_A and name not in layer.lora_variant:
                down, up = layer.lora_A[name], layer.lora_B[name]
                if fits(x, layer.base_layer, down, up, layer.lora_dropout[name]):
                    factors = Factors(down.weight, up.weight, layer.scaling[name], 0, x.shape[-2])
                    return adapted_linear(x, layer.base_layer, [factors])
        return self._plain(x, *args, **kwargs)  # type: ignore[no-any-return]


def adaptable(layer: Any) -> bool:
    """Whether PEFT's layer is LoRA on an `nn.Linear`."""
    return type(getattr(layer, "base_layer", None)) is nn.Linear and hasattr(layer, "lora_A")
