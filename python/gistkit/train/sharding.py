"""FSDP2 for compressors: gathers weights for the keys and values that leave a layer beside its output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


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


def _watch(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    def gather(gradient: Tensor) -> None:
        layer.unshard()

    keep = kwargs.get("keep")
    if keep is not None and keep.layers:
        for tensor in keep.layers[-1]:
            if tensor.requires_grad:
                tensor.register_hook(gather)
