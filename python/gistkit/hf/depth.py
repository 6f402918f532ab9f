"""first_layers and layer_outputs: a model that ends after some of its layers, or whose layers are listened to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from gistkit.hf.attach import decoder_of
from gistkit.hf.carry import layers_of


@contextmanager
def first_layers(model: nn.Module, count: int, *, norm: bool = True) -> Iterator[None]:
    """Inside, the decoder of `model` runs only its first `count` layers and its final norm.

    Open it inside `attach`, which takes a whole decoder.

    Args:
        model: what `attach` takes.
        count: number of layers that run, 1 to all of them.
        norm: apply the final norm to the last layer's output, which `last_hidden_state` returns.

    Raises:
        ValueError: if the model has fewer layers.
        TypeError: if the model does not hold its layers in one list.
    """
    decoder = cast(Any, decoder_of(model))
    total = decoder.config.num_hidden_layers
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= total:
        raise ValueError(f"count: expected 1 to {total} layers, got {count!r}")
    layers = _layers(decoder)
    every = layers._modules
    with ExitStack() as undo:
        layers._modules = dict(list(every.items())[:count])
        undo.callback(setattr, layers, "_modules", every)
        if not norm:
            undo.enter_context(_without_norm(decoder, layers[-1]))
        yield


@contextmanager
def layer_outputs(model: nn.Module) -> Iterator[list[Tensor]]:
    """Inside, the list gets the hidden states [B, N, d] that each layer returns, in order, with their graph.

    Args:
        model: what `attach` takes.

    Raises:
        TypeError: if the model does not hold its layers in one list.
    """
    outputs: list[Tensor] = []
    hooks = [layer.register_forward_hook(partial(_remember, outputs)) for layer in _layers(decoder_of(model))]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _layers(decoder: Any) -> nn.ModuleList:
    layers, total = layers_of(decoder), decoder.config.num_hidden_layers
    if len(layers) != total:
        raise TypeError(f"model: expected a decoder with a list of its {total} layers, got {type(decoder).__name__}")
    return layers


def _remember(outputs: list[Tensor], layer: nn.Module, args: Any, output: Tensor | tuple[Tensor, ...]) -> None:
    """A hook that appends a layer's hidden states."""
    outputs.append(output[0] if isinstance(output, tuple) else output)


@contextmanager
def _without_norm(decoder: nn.Module, layer: nn.Module) -> Iterator[None]:
    """Inside, the decoder returns what `layer`, its last one, returned."""
    outputs: list[Tensor] = []

    def put_back(decoder: nn.Module, args: Any, output: Any) -> None:
        output.last_hidden_state = outputs.pop()

    hooks = layer.register_forward_hook(partial(_remember, outputs)), decoder.register_forward_hook(put_back)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
