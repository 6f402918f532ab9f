"""carry: keyword arguments for attention layers of families whose decoder layers drop them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn


@contextmanager
def carry(decoder: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Inside, what a decoder layer gets under `names` also reaches its attention.

    Hooks on each layer hold the arguments while it runs, so that a layer that runs again in gradient checkpointing has
    its own again.

    Args:
        decoder: its layers take any keyword argument, and each has one module with a `layer_idx`.
        names: of the keyword arguments.
    """
    with ExitStack() as undo:
        for layer in layers_of(decoder):
            held: dict[str, Any] = {}
            for module in layer.modules():
                if module is not layer and hasattr(module, "layer_idx") and _takes_any(module):
                    undo.callback(module.register_forward_pre_hook(_give(held), with_kwargs=True).remove)
            undo.callback(layer.register_forward_pre_hook(_hold(held, names), with_kwargs=True).remove)
            undo.callback(layer.register_forward_hook(_drop(held), always_call=True).remove)
        yield


def layers_of(decoder: nn.Module) -> list[nn.Module]:
    """The decoder's layers: its longest list of modules, [] if there is none."""
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=[]))


def _takes_any(module: nn.Module) -> bool:
    parameters = inspect.signature(module.forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _hold(held: dict[str, Any], names: Sequence[str]) -> Any:
    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        held.update({name: kwargs[name] for name in names if name in kwargs})

    return hook


def _give(held: dict[str, Any]) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | held

    return hook


def _drop(held: dict[str, Any]) -> Any:
    def hook(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        held.clear()

    return hook
