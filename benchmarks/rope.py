"""gistkit.rope against transformers' rotary embedding (eager and compiled) and against copying the tensors.

The shapes are those of Llama 3.2 1B and Llama 3.1 8B: a long text, and a decoding step of eight sequences.
transformers' forms get cosines and sines ready made, as a model computes them once for all layers; ours starts from
positions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import harness
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import gistkit


@dataclass(frozen=True)
class Shape:
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


def long(dim: int, dtype: torch.dtype = torch.float32, token_major: bool = False) -> Shape:
    """4096 tokens of one sequence."""
    return Shape(1, 32, 8, 4096, dim, dtype, token_major)


def step(dim: int) -> Shape:
    """One token of each of eight sequences."""
    return Shape(8, 32, 8, 1, dim, torch.float32, True)


CASES = {
    "Llama 1B, N 4096, B1 H32/8 D64 float32": long(64),
    "Llama 8B, N 4096, B1 H32/8 D128 float32": long(128),
    "Llama 8B, N 4096, B1 H32/8 D128 bfloat16": long(128, torch.bfloat16),
    "Llama 8B, N 4096, B1 H32/8 D128 float32, token major": long(128, token_major=True),
    "Llama 1B, decoding, N 1, B8 H32/8 D64 float32": step(64),
    "Llama 8B, decoding, N 1, B8 H32/8 D128 float32": step(128),
}


def forms(shape: Shape, backward: bool) -> harness.Forms:
    """The contenders of a shape."""
    query, key = shape.heads(shape.query_heads, backward), shape.heads(shape.key_heads, backward)
    positions = torch.arange(shape.tokens)
    inv_freq = 10000.0 ** -(torch.arange(0, shape.dim, 2) / shape.dim)
    angle = (positions[:, None] * inv_freq).repeat(1, 2)[None]
    cos, sin = angle.cos().to(shape.dtype), angle.sin().to(shape.dtype)
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
        "copy, fresh memory": lambda: (query.clone(), key.clone()),
        "copy, ready buffers": lambda: (ready[0].copy_(query), ready[1].copy_(key)),
    }


def cases() -> Iterator[harness.Case]:
    """Every shape, forward and forward + backward; a decoding step has no backward."""
    for name, shape in CASES.items():
        for backward in (False, True)[: 1 if shape.tokens == 1 else 2]:
            passes = "forward + backward" if backward else "forward"
            facts = {**asdict(shape), "dtype": str(shape.dtype).removeprefix("torch."), "pass": passes}
            yield harness.Case(f"{name}, {passes}", partial(forms, shape, backward), facts=facts)


def main() -> None:
    """Runs all cases; of Llama 8B in float32 alone if quick."""
    options = harness.parser(__doc__, "python benchmarks/rope.py --quick --json rope.json", appends=True).parse_args()
    found = [
        case for case in cases() if not options.quick or re.fullmatch("Llama 8B.* D128 float32, forward.*", case.name)
    ]
    harness.run("rope", found, options, seconds=4)


if __name__ == "__main__":
    main()
