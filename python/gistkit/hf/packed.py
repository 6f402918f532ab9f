"""PackedLayers: a memory whose key heads keep different numbers of keys, one head after another without padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from gistkit import ops
from gistkit.common.checks import placed
from gistkit.hf.keep import Layers
from gistkit.layouts import Plan

# Numbers of queries whose plans are kept.
_KEPT = 4
# What stands for the log-sum-exp of a query that sees no key.
_NOTHING = -1e30


def spans_of(counts: Sequence[Tensor]) -> Tensor:
    """int64 [R, A, 2], where the keys of each head begin and end in those of its layer, see `PackedLayers.of`."""
    ends = [own.flatten().cumsum(0).view(own.shape) for own in counts]
    return torch.cat([torch.stack([end - own, end], -1) for end, own in zip(ends, counts, strict=True)], 1)


class PackedLayers:
    """A memory for `attach` whose heads keep different numbers of keys; a query sees all keys of its head.

    Args:
        layers: (key, value) of each layer, [T, D], keys rotated.
        spans: [R, A, 2] on the CPU, for each of A heads of all layers where its keys begin and end in those of its
            layer. Of a pass's B rows B / R in a row read the same keys.
        heads: key heads of each layer.
        biases: float32 [T] of each layer, added to the logits of its keys; None: none.
    """

    def __init__(
        self, layers: Layers, spans: Tensor, heads: Sequence[int], biases: Sequence[Tensor] | None = None
    ) -> None:
        self.layers, self.rows, self.biases = layers, len(spans), biases
        parts = placed(spans.int(), layers[0][0].device).split(list(heads), 1)
        self._spans = [part.flatten(0, 1) for part in parts]
        self._most = [int((part[..., 1] - part[..., 0]).max()) for part in spans.split(list(heads), 1)]
        # Of a layer and a number of queries, those used last at the end.
        self._plans: dict[tuple[int, int], Plan] = {}

    @classmethod
    def of(cls, layers: Layers, counts: Sequence[Tensor], biases: Sequence[Tensor] | None = None) -> PackedLayers:
        """What holds the heads of a row one after another, row by row.

        Args:
            layers, biases: see above.
            counts: of each layer int64 [R, Hk], how many keys each head has.
        """
        return cls(layers, spans_of(counts), [own.shape[1] for own in counts], biases)

    def __len__(self) -> int:
        return len(self.layers)

    def attend(self, layer: int, query: Tensor, dropout: float = 0.0, **options: Any) -> tuple[Tensor, Tensor]:
        """Out [B, Hq, N, D] and lse [B, Hq, N] of queries [B, Hq, N, D]; options are those of `ops.attention`."""
        key, value = (tensor.to(query.dtype) for tensor in self.layers[layer])
        heads, copies = len(self._spans[layer]) // self.rows, len(query) // self.rows
        if copies * self.rows != len(query) or query.shape[1] % heads:
            raise ValueError(
                f"memory: expected queries of {self.rows} rows or a multiple, and of {heads} heads or a multiple, for "
                f"layer {layer}, got {len(query)} rows of {query.shape[1]} heads"
            )
        # Each head is a row by itself, and rows that read the same keys are more queries of it.
        batch, query_heads, count, dim = query.shape
        group, flat = query_heads // heads, query
        if copies > 1:
            flat = query.view(self.rows, copies, heads, group, count, dim).permute(0, 2, 3, 1, 4, 5)
        flat = flat.reshape(-1, group, copies * count, dim)
        bias = None
        if self.biases is not None:
            bias = self.biases[layer].to(torch.promote_types(query.dtype, torch.float32))
        plan = self._plan(layer, flat.shape[2])
        if torch.is_grad_enabled() and len(key) and any(part.requires_grad for part in (query, key, value)):
            # A gradient has a copy of its keys for each head: these get columns of their own.
            places, plan = self._columns(plan, layer)
            key, value, bias = key[places], value[places], None if bias is None else bias[places]
        wide = (len(flat), 1, -1, -1)
        tensors = flat, key.unsqueeze(-3).expand(wide), value.unsqueeze(-3).expand(wide), plan
        if bias is not None:
            options |= {"key_bias": bias.view(-1, 1, bias.shape[-1])}
        out, lse = ops.attention(*tensors, return_lse=True, **options)
        if dropout:
            options.pop("softcap", None)
            out = ops.attention_with_dropout(*tensors, dropout=dropout, **options)
        if copies > 1:
            shape = self.rows, heads, group, copies, count
            out = out.view(*shape, out.shape[-1]).permute(0, 3, 1, 2, 4, 5)
            lse = lse.view(shape).permute(0, 3, 1, 2, 4)
        return out.reshape(batch, query_heads, count, out.shape[-1]), lse.reshape(batch, query_heads, count)

    def _plan(self, layer: int, queries: int) -> Plan:
        plan = self._plans.pop((layer, queries), None)
        if plan is None:
            spans = self._spans[layer][:, None, None].expand(-1, queries, -1, -1).contiguous()
            plan = Plan(spans, len(self.layers[layer][0]))
        self._plans[layer, queries] = plan
        if len(self._plans) > _KEPT * len(self.layers):
            del self._plans[next(iter(self._plans))]
        return plan

    def _columns(self, plan: Plan, layer: int) -> tuple[Tensor, Plan]:
        """Places [H, K] of each head's keys among all of the layer, for the head with most, and the plan over them."""
        start, end = plan.spans[:, :, 0].unbind(-1)
        width = self._most[layer]
        places = (start[:, :1] + torch.arange(width, device=start.device)).clamp(max=len(self.layers[layer][0]) - 1)
        spans = torch.stack([torch.zeros_like(start), end - start], -1)[:, :, None].contiguous()
        return places.long(), Plan(spans, width)

    def beside(self, layer: int, query: Tensor, out: Tensor, lse: Tensor, **options: Any) -> Tensor:
        """Attention over the memory and other keys, of which `out` and `lse` are that of the others."""
        own, own_lse = self.attend(layer, query, **options)
        share = torch.sigmoid(own_lse - lse.clamp(min=_NOTHING))[..., None]
        return cast(Tensor, torch.lerp(out.to(share.dtype), own.to(share.dtype), share).to(out.dtype))
