"""FoldedMap: a linear map with its LoRA adapter added into the weight, for passes without gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gistkit.nn.adapted import plain, watched


class FoldedMap:
    """The forward of PEFT's layer around a linear map, as one product W + s B A (LoRA, arXiv 2106.09685, Section 4.1).

    It runs in eval mode, without gradients, if no other adapter is active; otherwise the layer runs.

    Args:
        layer: PEFT's layer, for which `foldable` is true.
        adapter: PEFT's name of the adapter.
        weight: what `fold` returned.
    """

    def __init__(self, layer: Any, adapter: str, weight: Tensor) -> None:
        self._layer, self._adapters, self._plain, self._weight = layer, [adapter], layer.forward, weight
        self._parts = layer.base_layer, layer.lora_A[adapter], layer.lora_B[adapter]

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The map of x [.., in], as [.., out]."""
        layer = self._layer
        alone = layer._active_adapter == self._adapters and not layer._disable_adapters
        if not alone or layer.training or torch.is_grad_enabled() or any(map(watched, self._parts)):
            return self._plain(x, *args, **kwargs)  # type: ignore[no-any-return]
        return F.linear(x, self._weight, layer.base_layer.bias)


def fold(layer: Any, adapter: str) -> Tensor:
    """The weight of PEFT's layer with the adapter in it, summed in float32 or wider and rounded once."""
    base = layer.base_layer.weight
    dtype = torch.promote_types(base.dtype, torch.float32)
    parts = (base, layer.lora_B[adapter].weight, layer.lora_A[adapter].weight)
    # What is kept outlives the call: passes outside of inference mode take it too.
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(base.device.type, enabled=False):
        wide = torch.addmm(*(part.to(dtype) for part in parts), alpha=layer.scaling[adapter])
        return wide.to(base.dtype)


def foldable(layer: Any, adapter: str) -> bool:
    """Whether PEFT's layer is plain LoRA on an `nn.Linear` with this adapter."""
    return (
        plain(getattr(layer, "base_layer", None))
        and adapter in getattr(layer, "lora_A", ())
        and adapter not in layer.lora_variant
        and plain(layer.lora_A[adapter])
        and plain(layer.lora_B[adapter])
        and layer.lora_B[adapter].bias is None
        and not layer.merged
    )
