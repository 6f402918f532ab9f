"""SeqPEPositions: SeqPE's embeddings in queries and keys, as sum, product or bias."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from gistkit.nn.positions import PositionEncoding
from gistkit.nn.rotary import check_doubled
from gistkit.nn.seqpe.encoder import SeqPE

Integration = Literal["sum", "mul", "bias"]
Projection = Literal["shared", "layer", "none"]


class SeqPEPositions(PositionEncoding):
    """Position embeddings e of an encoder, integrated into attention (SeqPE, equations 11 to 14).

    With e_q, e_k = W e the logits are, each times 1 / sqrt(D),

    - sum: (q + e_q) . (k + e_k)
    - mul: (q * e_q) . (k * e_k), elementwise
    - bias: q . k + e_q . e_k, by queries [q, e_q] and keys [k, e_k] of 2 D channels, without a matrix of biases

    Args:
        encoder: positions to embeddings [.., out_dim].
        heads: H of queries.
        head_dim: D, at most 128 for "bias".
        key_heads: Hk, heads of keys, where queries share them; None: heads.
        layers: layers of the model; only for projection "layer".
        integration: see above.
        projection: W, a linear map with bias to (H + Hk) D channels (queries first, each head's side by side): "shared"
            by all layers, one of each "layer", or "none": e_q = e_k = e, which needs out_dim = H D and Hk = H.
        mul_start: constant added to e_q and e_k of integration "mul", whose W starts near 0: with 1, attention starts
            as if without positions; with 0, the paper's form, logits start near 0.
        std: of the normal distribution that W and the embeddings of `extra_tokens` start from.
        extra_tokens: see `PositionEncoding`; each has a learned embedding in the place of the encoder's.
    """

    on_host = True

    def __init__(
        self,
        encoder: SeqPE,
        heads: int,
        head_dim: int,
        *,
        key_heads: int | None = None,
        layers: int = 1,
        integration: Integration = "bias",
        projection: Projection = "shared",
        mul_start: float = 0.0,
        std: float = 0.02,
        extra_tokens: int = 0,
    ) -> None:
        super().__init__(encoder.axes, extra_tokens)
        if integration not in get_args(Integration):
            raise ValueError(f"integration: expected {', '.join(get_args(Integration))}, got {integration!r}")
        if projection not in get_args(Projection):
            raise ValueError(f"projection: expected {', '.join(get_args(Projection))}, got {projection!r}")
        if mul_start and integration != "mul":
            raise ValueError(f"mul_start: expected 0 for integration {integration!r}, got {mul_start}")
        if integration == "bias":
            check_doubled(head_dim)
        key_heads = heads if key_heads is None else key_heads
        if key_heads < 1 or heads % key_heads or (projection == "none" and key_heads != heads):
            allowed = f"{heads} for projection 'none'" if projection == "none" else f"a divisor of {heads} heads"
            raise ValueError(f"key_heads: expected {allowed}, got {key_heads}")
        if projection == "none" and encoder.out_dim != heads * head_dim:
            raise ValueError(
                f"encoder: expected an out_dim of {heads} heads x {head_dim} = {heads * head_dim} for projection "
                f"'none', got {encoder.out_dim}"
            )
        self.encoder = encoder
        self.heads, self.key_heads, self.head_dim = heads, key_heads, head_dim
        self.layers, self.integration, self.projection, self.mul_start = layers, integration, projection, mul_start
        self.own_layers = layers if projection == "layer" else None
        maps = {"shared": 1, "layer": layers, "none": 0}[projection]
        width = (heads + key_heads) * head_dim
        self.projections = nn.ModuleList(nn.Linear(encoder.out_dim, width) for _ in range(maps))
        self.extra = nn.Parameter(torch.empty(extra_tokens, encoder.out_dim)) if extra_tokens else None
        self.reset_parameters(std)

    def reset_parameters(self, std: float = 0.02) -> None:
        """Projections and embeddings of extra tokens from a normal distribution, biases 0; not the encoder."""
        if self.extra is not None:
            nn.init.normal_(self.extra, std=std)
        for name, parameter in self.projections.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=std)

    def prepare(self, positions: Tensor, embeddings: Tensor | None = None) -> Any:
        """(e_q, e_k), [(B,) H, N, D] and [(B,) Hk, N, D], or the embeddings if each layer has its own projection.

        Positions on a GPU are copied to the CPU, which waits for the GPU once a pass.
        """
        if embeddings is None:
            embeddings = self.encoder(positions, wait=True)
        else:
            self._check(positions, embeddings)
        if self.extra is not None:
            extra = self.extra.to(embeddings.dtype).expand(*embeddings.shape[:-2], -1, -1)
            embeddings = torch.cat([extra, embeddings], -2)
        if self.projection == "layer":
            return embeddings
        return self.project(embeddings)

    def frozen(self, positions: Tensor | None = None) -> AbstractContextManager[None]:
        return self.encoder.frozen(positions)

    def project(self, embeddings: Tensor, layer: int = 0) -> tuple[Tensor, Tensor]:
        """e_q [.., H, N, D] and e_k [.., Hk, N, D] of embeddings [.., N, out_dim]."""
        if self.projection == "none":
            both = embeddings.unflatten(-1, (self.heads, self.head_dim)).transpose(-2, -3)
            both = both + self.mul_start if self.mul_start else both
            return both, both
        projection = self.projections[layer if self.projection == "layer" else 0]
        projected = projection(embeddings)
        projected = projected + self.mul_start if self.mul_start else projected
        both = projected.unflatten(-1, (-1, self.head_dim)).transpose(-2, -3)
        e_q, e_k = both.split([self.heads, self.key_heads], -3)
        return e_q, e_k

    def forward(self, query: Tensor, key: Tensor, prepared: Any, layer: int) -> tuple[Tensor, Tensor]:
        e_q, e_k = self.project(prepared, layer) if self.projection == "layer" else prepared
        return self._integrate(query, e_q, "query"), self._integrate(key, e_k, "key")

    def _integrate(self, heads: Tensor, e: Tensor, name: str) -> Tensor:
        if heads.shape[1:] != e.shape[-3:] or (e.dim() == 4 and e.shape[0] not in (1, heads.shape[0])):
            count, length, width = e.shape[-3:]
            raise ValueError(f"{name}: expected [B, {count}, {length}, {width}], got shape {tuple(heads.shape)}")
        e = e.to(heads.dtype)
        if self.integration == "sum":
            return heads + e
        if self.integration == "mul":
            return heads * e
        return torch.cat([heads, e.expand_as(heads)], -1)

    def _check(self, positions: Tensor, embeddings: Tensor) -> None:
        tokens = positions.shape[-1 if self.axes == 1 else -2]
        width = self.encoder.out_dim
        if embeddings.dim() not in (2, 3) or embeddings.shape[-2:] != (tokens, width):
            raise ValueError(
                f"embeddings: expected [{tokens}, {width}] or [B, {tokens}, {width}], got shape "
                f"{tuple(embeddings.shape)}"
            )
