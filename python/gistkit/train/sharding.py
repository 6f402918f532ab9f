"""FSDP2 for compressors: which weights are whole when, and the export of a compressor whose weights are sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from gistkit.compress import Compressor
from gistkit.compress.model import of_models


@contextmanager
def gathers_kept_keys(module: nn.Module) -> Iterator[None]:
    """Inside, every sharded layer gathers its weights when the gradient of its kept keys or values arrives.

    FSDP gathers them when the gradient of a layer's output arrives; in 500xCompressor that of its kept keys may arrive
    first, or alone.

    Args:
        module: holds layers that `fully_shard` has sharded, or none.
    """
    from torch.distributed.fsdp import FSDPModule

    layers = [layer for layer in module.modules() if isinstance(layer, FSDPModule)]
    handles = [layer.register_forward_hook(_watch, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def reshard(module: nn.Module) -> None:
    """Frees weights that a pass without a backward pass left whole: until then the module has other parameters.

    FSDP keeps those of its root for the backward pass, by which the optimizer's parameters come back.
    """
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The tensor, or all shards of a sharded one, for which every process calls this."""
    gather: Any = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


@contextmanager
def whole_weights(compressor: Compressor, keep: bool) -> Iterator[None]:
    """Inside, all weights that a compressor saves are whole and on the CPU; every process must call it.

    Those are its own and its adapters', or without adapters all of the model's.

    Args:
        compressor: its parameters are sharded, or some of them, or none.
        keep: False in all processes but the one that saves; there, nothing changes.
    """
    saved = [
        name
        for name, _ in compressor.named_parameters()
        if compressor.adapters is None or not of_models(name) or compressor.adapters.owns(name)
    ]
    before: list[tuple[nn.Module, str, nn.Parameter]] = []
    places: dict[int, list[tuple[nn.Module, str]]] = {id(parameter): [] for parameter in compressor.parameters()}
    for module in compressor.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places[id(parameter)].append((module, name))
    try:
        for name in saved:
            parameter = compressor.get_parameter(name)
            if not hasattr(parameter, "full_tensor"):
                continue
            # One at a time: the others need not fit.
            gathered = whole(parameter.detach())
            if not keep:
                continue
            copy = nn.Parameter(gathered.cpu(), requires_grad=parameter.requires_grad)
            for module, own in places[id(parameter)]:
                before.append((module, own, parameter))
                module._parameters[own] = copy
        yield
    finally:
        for module, own, parameter in before:
            module._parameters[own] = parameter


def _watch(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    def gather(gradient: Tensor) -> None:
        layer.unshard()

    keep = kwargs.get("keep")
    if keep is not None and keep.layers:
        for tensor in keep.layers[-1]:
            if tensor.requires_grad:
                tensor.register_hook(gather)
