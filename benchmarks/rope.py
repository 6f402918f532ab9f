"""gistkit.rope against transformers' rotary embedding (eager and compiled) and against copying the tensors.

transformers' forms get cosines and sines ready made, as a model computes them once for all layers; ours starts from
positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import harness
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import gistkit


@dataclass(frozen=True)
class Case:
    """Sizes of one case; token_major is the memory order that a projection leaves."""

    batch: int
    query_heads: int
    key_heads: int
    tokens: int
    dim: int
    dtype: torch.dtype
    token_major: bool

    def heads(self, count: int, gradient: bool) -> Tensor:
        """Random [B, count, N, D]."""
        if self.token_major:
            heads = torch.randn(self.batch, self.tokens, count, self.dim).to(self.dtype).transpose(1, 2)
        else:
            heads = torch.randn(self.batch, count, self.tokens, self.dim).to(self.dtype)
        return heads.requires_grad_(gradient)


CASES = {
    "long, 32+8 heads": Case(1, 32, 8, 4096, 128, torch.float32, False),
    "long, 32+8 heads, bf16": Case(1, 32, 8, 4096, 128, torch.bfloat16, False),
    "long, 32+8 heads, token major": Case(1, 32, 8, 4096, 128, torch.float32, True),
    "short, 4+4 heads": Case(16, 4, 4, 80, 32, torch.float32, True),
    "one token, 32+8 heads": Case(1, 32, 8, 1, 128, torch.float32, True),
}


def forms(case: Case, backward: bool) -> harness.Forms:
    """The contenders of a case."""
    query, key = case.heads(case.query_heads, backward), case.heads(case.key_heads, backward)
    positions = torch.arange(case.tokens)
    inv_freq = 10000.0 ** -(torch.arange(0, case.dim, 2) / case.dim)
    angle = (positions[:, None] * inv_freq).repeat(1, 2)[None]
    cos, sin = angle.cos().to(case.dtype), angle.sin().to(case.dtype)
    compiled = torch.compile(apply_rotary_pos_emb, fullgraph=True)
    ours: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "gistkit": lambda: gistkit.rope(query, key, positions, inv_freq),
        "eager": lambda: apply_rotary_pos_emb(query, key, cos, sin),
        "compiled": lambda: compiled(query, key, cos, sin),
    }
    if backward:
        ones = torch.randn_like(query), torch.randn_like(key)
        return {name: lambda form=form: torch.autograd.grad(form(), (query, key), ones) for name, form in ours.items()}
    ready = torch.empty_like(query), torch.empty_like(key)
    return ours | {
        "gistkit in place": lambda: gistkit.rope(*ready, positions, inv_freq, inplace=True),
        "copy, fresh memory": lambda: (query.clone(), key.clone()),
        "copy, ready buffers": lambda: (ready[0].copy_(query), ready[1].copy_(key)),
    }


def cases() -> Iterator[tuple[str, Callable[[], harness.Forms]]]:
    """Every case, forward and forward + backward."""
    for name, case in CASES.items():
        yield f"{name}, forward", partial(forms, case, False)
        yield f"{name}, forward + backward", partial(forms, case, True)


if __name__ == "__main__":
    options = harness.parser(__doc__, "python benchmarks/rope.py --quick --json rope.json").parse_args()
    harness.run("rope", cases(), options, seconds=4)
