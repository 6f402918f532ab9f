"""Keeper: collects keys and values during a pass, with their gradients, also under gradient checkpointing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from gistkit import ops

Layers = Sequence[tuple[Tensor, Tensor]]


class Rope(Protocol):
    """How a layer makes keys of hidden states at position IDs, as it did in a pass."""

    @property
    def positions(self) -> Tensor:
        """Position IDs [B or 1, N] of the pass."""

    def kept(self) -> Rope:
        """A copy that later passes do not change."""

    def project(self, layer: nn.Module, hidden_states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [B, Hk, K, D] of hidden states, as the layer makes them.

        Args:
            layer: the decoder layer.
            hidden_states: [B, K, d], not normalised, like the layer's input.
            positions: position IDs [K] or [B, K]; float64 where fractional.
        """


class Keeper:
    """The argument `keep` of a model inside `attach`; each method runs once a layer, and again in checkpointing.

    A subclass takes the same tensors in every call and keeps those of the first one.
    """

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._closed = False

    @property
    def layers(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """The kept (key, value) of each layer in order, [B, Hk, K, D], which a pass takes as `memory`."""
        return tuple(self._layers[index] for index in sorted(self._layers))

    def close(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Returns `layers` and keeps nothing more: a pass that runs again in checkpointing must not hold its graph."""
        layers, self._layers, self._closed = self.layers, {}, True
        return layers

    def keep(self, layer_idx: int, key: Tensor, value: Tensor) -> None:
        """Keeps a layer's keys and values, unless the layer has some already."""
        if not self._closed:
            self._layers.setdefault(layer_idx, (key, value))

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> None:
        """Receives queries, keys and values of attention layer `layer_idx`, its scale and its sliding window, if any.

        Args:
            query: [B, Hq, N, D], rotated.
            key, value: [B, Hk, N, D], for `store`.
        """
        self.store(layer_idx, key, value)

    def store(self, layer_idx: int, key: Tensor, value: Tensor) -> None:
        """Receives the rotated keys and the values [B, Hk, N, D] that attention layer `layer_idx` made."""

    def leave(self, layer_idx: int, layer: nn.Module, before: Tensor, after: Tensor, rope: Rope) -> None:
        """Receives the hidden states [B, N, d] before and after decoder layer `layer_idx`."""


class KeptKeys(Keeper):
    """Keeps some rows of every layer's rotated keys and values, with their gradients.

    Pass it as `keep` to one pass, and its `layers` as `memory` to the next. Unlike transformers' caches it works with
    gradient checkpointing (use_reentrant=False), which runs every layer once more in the backward pass.

    Args:
        rows: the rows to keep, as a slice or as int64 indices [K], or [B, K] for each row of the batch.
    """

    def __init__(self, rows: slice | Tensor) -> None:
        super().__init__()
        self.rows = rows

    def store(self, layer_idx: int, key: Tensor, value: Tensor) -> None:
        """Keeps the rows of key and value [B, Hk, N, D]; only the first call of a layer counts."""
        # In every call: a layer that runs again must save the same tensors as the first time.
        self.keep(layer_idx, self._take(key), self._take(value))

    def _take(self, tensor: Tensor) -> Tensor:
        if isinstance(self.rows, Tensor) and self.rows.dim() == 2:
            return tensor.take_along_dim(self.rows[:, None, :, None], 2)
        rows = tensor[:, :, self.rows]
        # A copy, since a view keeps the keys of all rows alive; with gradients the graph does so anyway.
        return rows if torch.is_grad_enabled() else rows.clone()


class WithBos(Keeper):
    """Keeps BOS's own keys and values of a layer, followed by those that `compressed` computes."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: dict[int, tuple[Tensor, Tensor]] = {}

    def store(self, layer_idx: int, key: Tensor, value: Tensor) -> None:
        """Holds key and value until the layer is left."""
        self._pending[layer_idx] = key, value

    def leave(self, layer_idx: int, layer: nn.Module, before: Tensor, after: Tensor, rope: Rope) -> None:
        """Keeps [BOS][compressed tokens]; only the first call of a layer counts."""
        key, value = self._pending.pop(layer_idx)
        made_key, made_value = self.compressed(layer, before, after, key, value, rope)
        self.keep(layer_idx, torch.cat([key[:, :, :1], made_key], 2), torch.cat([value[:, :, :1], made_value], 2))

    def compressed(
        self, layer: nn.Module, before: Tensor, after: Tensor, key: Tensor, value: Tensor, rope: Rope
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the compressed tokens, from a layer's input and output and its own keys and values."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class LlamaRope:
    """The `Rope` of a Llama's attention and of those built like it: what its layers get instead of cos and sin.

    Args:
        positions: position IDs [B or 1, N] of the pass.
        inv_freq: frequencies [R/2].
        scaling: attention scaling.
    """

    positions: Tensor
    inv_freq: Tensor
    scaling: float

    def kept(self) -> LlamaRope:
        """With a copy of the frequencies, which RoPE types that depend on the length change in place."""
        return replace(self, inv_freq=self.inv_freq.clone())

    def project(self, layer: nn.Module, hidden_states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values with the layer's norms and projections; see `Rope`."""
        parts = cast(Any, layer)
        attention = parts.self_attn
        normed = parts.input_layernorm(hidden_states)
        heads = (*hidden_states.shape[:2], -1, attention.head_dim)
        key = attention.k_proj(normed).view(heads).transpose(1, 2)
        value = attention.v_proj(normed).view(heads).transpose(1, 2)
        if hasattr(attention, "k_norm"):
            key = attention.k_norm(key)
        rotated, _ = ops.rope(key, key[:, :0], positions, self.inv_freq, scaling=self.scaling)
        return rotated.to(value.dtype), value
