"""carry: keyword arguments for attention layers of families whose decoder layers drop them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, eq=False)
class Carried:
    """What a decoder layer hands on as its attention mask: the mask, and keyword arguments that it would drop."""

    mask: Any
    arguments: Mapping[str, Any]


@contextmanager
def carry(decoder: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Inside, what a decoder layer gets under `names` reaches its attention within the attention mask.

    Gradient checkpointing keeps a layer's arguments, so that a layer that runs again has its own again.

    Args:
        decoder: its layers take any keyword argument, and hand their `attention_mask` on.
        names: of the keyword arguments.
    """

    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = {name: kwargs[name] for name in names if kwargs.get(name) is not None}
        return args, kwargs | {"attention_mask": Carried(kwargs.get("attention_mask"), given)}

    with ExitStack() as undo:
        for layer in layers_of(decoder):
            undo.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def layers_of(model: Any) -> nn.ModuleList:
    """The layers of a transformer: its longest list of modules, or else the first inside of as many as it says."""
    lists = [child for child in model.children() if isinstance(child, nn.ModuleList)]
    if lists:
        return max(lists, key=len)
    count = getattr(model.config, "num_hidden_layers", None)
    inside = (module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == count)
    return next(inside, nn.ModuleList())
