"""OwnRope: keys and values of any hidden states from a layer's own forward, where its attention is not a Llama's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn

from gistkit.hf.carry import Carried
from gistkit.hf.keep import Keeper

# What a layer gets in a pass that another pass of it must not read.
_OF_THE_PASS = {
    "cache",
    "past_key_values",
    "past_key_value",
    "layer_past",
    "position_embeddings",
    "cache_position",
}


@dataclass(frozen=True, eq=False)
class OwnRope:
    """How a decoder layer was called, so that it can make keys and values again at other positions.

    Args:
        positions: int64 [B or 1, N], position IDs of the pass.
        rotary: the decoder's RoPE module; None: positions do not reach the layers' keys.
        layer_type: what `rotary` takes beside positions, where it has frequencies for each type of layer.
        arguments: what the layer got besides hidden states and positions, by name.
        first: the name of its hidden states.
    """

    positions: Tensor
    rotary: nn.Module | None
    layer_type: str | None
    arguments: Mapping[str, Any]
    first: str

    @classmethod
    def of(
        cls, decoder: nn.Module, layer: nn.Module, layer_idx: int, args: tuple[Any, ...], kwargs: Mapping[str, Any],
        own: tuple[str, ...],
    ) -> OwnRope:  # fmt: skip
        """What a hook on a layer sees; `own` are the names of gistkit's arguments."""
        names = _parameters(type(layer).forward)
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        mask = given.pop("attention_mask", None)
        ours = mask.arguments if isinstance(mask, Carried) else given
        positions, plan = given.get("position_ids"), ours.get("plan")
        if positions is None and plan is not None:
            positions = plan.positions
        hidden_states = given.pop(names[0])
        if positions is None:
            positions = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        rotary: Any = getattr(decoder, "rotary_emb", None) if given.get("position_embeddings") is not None else None
        typed = rotary is not None and "layer_type" in _parameters(type(rotary).forward)
        types = cast(Any, decoder).config.layer_types if typed else {layer_idx: None}
        taken = {name: value for name, value in given.items() if name not in own and name not in _OF_THE_PASS}
        return cls(torch.atleast_2d(positions), rotary, types[layer_idx], taken, names[0])

    def kept(self) -> OwnRope:
        """Itself: it holds nothing that later passes change."""
        return self

    def project(self, layer: nn.Module, hidden_states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that the layer's forward makes, which runs up to its attention; see `Rope`."""
        arguments = dict(self.arguments)
        arguments |= {self.first: hidden_states, "attention_mask": Carried(None, {"keep": _Stop()})}
        if self.rotary is not None:
            typed = {} if self.layer_type is None else {"layer_type": self.layer_type}
            arguments["position_embeddings"] = self.rotary(hidden_states, torch.atleast_2d(positions), **typed)
        if arguments.get("position_ids") is not None:
            arguments["position_ids"] = torch.atleast_2d(positions)
        if "use_cache" in arguments:
            arguments["use_cache"] = False
        try:
            # The forward itself: hooks and checkpointing belong to the layer's call in the pass.
            cast(Any, layer).forward(**arguments)
        except _Made as made:
            return made.key, made.value
        raise TypeError(f"layer: expected one that calls transformers' attention interface, got {type(layer).__name__}")


class _Made(Exception):
    """Ends a layer's forward at its attention."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        super().__init__()
        self.key, self.value = key, value


class _Stop(Keeper):
    def store(self, layer_idx: int, key: Tensor, value: Tensor) -> None:
        raise _Made(key, value)


@lru_cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a forward's parameters, self left out."""
    return tuple(signature(forward).parameters)[1:]
