"""Adafactor, of weights that FSDP has sharded too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from gistkit.train.sharding import whole


class Adafactor(torch.optim.Adafactor):
    """torch's Adafactor, whose step does not take sharded weights: here their means and norms are of all shards.

    The state of sharded weights is torch's, the means of rows and columns whole in every process.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As torch's; with FSDP all weights are sharded."""
        if not any(isinstance(parameter, DTensor) for group in self.param_groups for parameter in group["params"]):
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, parameter.grad, _begun(self.state[parameter], parameter), group)
        return loss


def _begun(state: dict[str, Tensor], parameter: Tensor) -> dict[str, Tensor]:
    """The state of a parameter, as torch's begins."""
    if not state:
        like: dict[str, Any] = {"dtype": parameter.dtype, "device": parameter.device}
        shape = parameter.shape
        state["step"] = torch.tensor(0.0)
        if parameter.dim() > 1:
            state["row_var"] = torch.zeros(*shape[:-1], 1, **like)
            state["col_var"] = torch.zeros(*shape[:-2], 1, shape[-1], **like)
        else:
            state["variance"] = torch.zeros_like(parameter)
    return state


def _update(parameter: DTensor, gradient: DTensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """An update of one parameter."""
    (least, least_scale), rate = group["eps"], float(group["lr"])
    least = torch.finfo(parameter.dtype).eps if least is None else least
    state["step"] += 1
    count = float(state["step"])
    scale = max(least_scale, _size(parameter)) * min(rate, count**-0.5)
    parameter.mul_(1 - rate * group["weight_decay"])
    squares, share = gradient.square(), count ** group["beta2_decay"]
    if gradient.dim() > 1:
        for name, dim in (("row_var", -1), ("col_var", -2)):
            mean = whole(squares.sum(dim, keepdim=True)) / squares.shape[dim]
            state[name] = whole(state[name]).lerp(mean, share)
        rows = state["row_var"] / state["row_var"].mean(-2, keepdim=True).clamp(min=least)
        mine: Any = _replicated(rows, gradient).redistribute(placements=gradient.placements)
        variance = mine * _replicated(state["col_var"], gradient)
    else:
        variance = state["variance"] = state["variance"].lerp(squares, share)
    update: Any = gradient * variance.clamp(min=least**2).rsqrt()
    update = update.redistribute(placements=parameter.placements)
    parameter.add_(update, alpha=-scale / max(1.0, _size(update) / group["d"]))


def _replicated(values: Tensor, like: DTensor) -> DTensor:
    """A tensor that is whole in every process, for products with a sharded one."""
    mesh = like.device_mesh
    return DTensor.from_local(values.to(mesh.device_type), mesh, [Replicate()] * mesh.ndim, run_check=False)


def _size(values: DTensor) -> float:
    """The root of the mean square."""
    return float(whole(values.square().sum()) / values.numel()) ** 0.5
