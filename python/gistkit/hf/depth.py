"""first_layers: a model that ends after some of its layers, while a context is open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from torch import Tensor, nn

from gistkit.hf.attach import decoder_of


@contextmanager
def first_layers(model: nn.Module, count: int, *, norm: bool = True) -> Iterator[None]:
    """Inside, the decoder of `model` runs its first `count` layers and its final norm; afterwards it is as it was.

    Open it inside `attach`, which takes a whole decoder.

    Args:
        model: what `attach` takes.
        count: number of layers that run, 1 to all of them.
        norm: whether `last_hidden_state` is what the final norm makes of the last layer's output, or that output as it
            is.

    Raises:
        ValueError: if the model has fewer layers.
        TypeError: if the model does not hold its layers in one list.
    """
    decoder = cast(Any, decoder_of(model))
    total = decoder.config.num_hidden_layers
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= total:
        raise ValueError(f"count: expected 1 to {total} layers, got {count!r}")
    lists = {name: child for name, child in decoder.named_children() if isinstance(child, nn.ModuleList)}
    name = next((name for name, child in lists.items() if len(child) == total), None)
    if name is None:
        raise TypeError(f"model: expected a decoder with a list of its {total} layers, got {type(decoder).__name__}")
    with ExitStack() as undo:
        setattr(decoder, name, lists[name][:count])
        undo.callback(setattr, decoder, name, lists[name])
        if not norm:
            undo.enter_context(_without_norm(decoder, lists[name][count - 1]))
        yield


@contextmanager
def _without_norm(decoder: nn.Module, layer: nn.Module) -> Iterator[None]:
    """Inside, the decoder returns what `layer`, its last one, returned."""
    outputs: list[Tensor] = []

    def remember(layer: nn.Module, args: Any, output: Tensor | tuple[Tensor, ...]) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    def put_back(decoder: nn.Module, args: Any, output: Any) -> None:
        output.last_hidden_state = outputs.pop()

    hooks = layer.register_forward_hook(remember), decoder.register_forward_hook(put_back)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
