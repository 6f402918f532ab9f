"""gistkit.attention against torch on the masks of the papers: SDPA (dense mask, is_causal) and FlexAttention.

FlexAttention is compiled and its block mask made beforehand; it has no backward on a CPU. Every instruction set that
the processor has takes part.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import harness
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

import gistkit
from gistkit import Plan, layouts
from gistkit.ops import reference
from gistkit.ops._library import ISA_NAMES


def selected(length: int, ratio: int) -> Tensor:
    """Every ratio-th token."""
    return torch.arange(length) % ratio == 0


PLANS: dict[str, Callable[[int], Plan]] = {
    "causal": lambda n: layouts.causal(n).compile(),
    "Gist 8x": lambda n: layouts.gist(n * 5 // 6, n * 5 // 48, n // 16).compile(),
    "GistPool 8x": lambda n: layouts.gistpool((n - 257) * 8 // 9, 8, 256).compile(),
    "GistPool 8x, interleaved": lambda n: layouts.gistpool((n - 257) * 8 // 9, 8, 256).compile(grouped=False),
    "Dodo 10x, tau 128": lambda n: layouts.dodo(selected(n, 10).numpy(), 128).compile(),
    "Dodo 10x, tau 512": lambda n: layouts.dodo(selected(n, 10).numpy(), 512).compile(),
    "ICAE chunks of 510": lambda n: layouts.icae_encoder(n * 5 // 6, 510, 102).compile(),
    "VoCo, 576 to 128": lambda n: layouts.voco(576, 128, n // 4, images=max(1, n * 3 // 4 // 704)).compile(),
}
FEW = ("causal", "GistPool 8x", "Dodo 10x, tau 128")


def flex(plan: Plan, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Tensor]:
    """Compiled FlexAttention under the plan's mask, its block mask ready."""
    mask = reference.dense_mask(plan)[0]
    blocks = create_block_mask(
        lambda b, h, row, column: mask[row, column], None, None, *mask.shape, device="cpu", _compile=False
    )
    compiled = torch.compile(flex_attention, fullgraph=True)
    enable_gqa = query.shape[1] != key.shape[1]

    @torch.no_grad()
    def run() -> Tensor:
        return compiled(query, key, value, block_mask=blocks, enable_gqa=enable_gqa)

    return run


def forms(name: str, options: argparse.Namespace, length: int, backward: bool) -> harness.Forms:
    """The contenders of a mask, ours first."""
    plan = PLANS[name](length)
    dtype = getattr(torch, options.dtype)

    def heads(count: int, rows: int) -> Tensor:
        return torch.randn(options.batch, count, rows, options.dim).to(dtype).requires_grad_(backward)

    query = heads(options.heads, plan.num_queries)
    key, value = heads(options.key_heads, plan.num_keys), heads(options.key_heads, plan.num_keys)
    grad = torch.randn_like(query)
    mask = reference.dense_mask(plan)[0]
    gqa = options.key_heads != options.heads

    def ours(isa: str) -> Tensor:
        gistkit.ops.cpu_isa(isa)
        return gistkit.attention(query, key, value, plan)

    found: dict[str, Callable[[], Tensor]] = {f"gistkit {isa}": partial(ours, isa) for isa in options.isa}
    found["SDPA, dense mask"] = lambda: sdpa(query, key, value, attn_mask=mask, enable_gqa=gqa)
    if name == "causal":
        found["SDPA, is_causal"] = lambda: sdpa(query, key, value, is_causal=True, enable_gqa=gqa)
    if backward:
        return {
            who: lambda form=form: torch.autograd.grad(form(), (query, key, value), grad) for who, form in found.items()
        }
    if not options.no_flex:
        found["FlexAttention, compiled"] = flex(plan, query, key, value)
    return found


def decode(options: argparse.Namespace, keys: int) -> harness.Forms:
    """One query a sequence over a long cache; a copy of the cache shows the memory's speed."""
    query = torch.randn(1, 32, 1, 128)
    key, value = torch.randn(1, 8, keys, 128), torch.randn(1, 8, keys, 128)
    plan = Plan.from_spans(torch.tensor([[[0, keys]]], dtype=torch.int32), keys)

    def ours(isa: str) -> Tensor:
        gistkit.ops.cpu_isa(isa)
        return gistkit.attention(query, key, value, plan)

    return {f"gistkit {isa}": partial(ours, isa) for isa in options.isa} | {
        "SDPA": lambda: sdpa(query, key, value, enable_gqa=True),
        "sum of the cache": lambda: (key.sum(), value.sum()),
    }


def cases(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], harness.Forms]]]:
    """Every mask and length, forward and forward + backward, then decoding."""
    size = f"B{options.batch} H{options.heads}/{options.key_heads} D{options.dim} {options.dtype}"
    for length in options.lengths:
        for name in options.masks:
            yield f"{name}, N {length}, {size}, forward", partial(forms, name, options, length, False)
            yield f"{name}, N {length}, {size}, forward + backward", partial(forms, name, options, length, True)
    if not options.no_decode:
        for keys in (64, 32768):
            yield f"decoding, 1 query, {keys} keys, H32/8 D128 float32", partial(decode, options, keys)


def main() -> None:
    """Runs the cases that the command line asks for."""
    parser = harness.parser(__doc__, "python benchmarks/attention.py --quick --masks causal --isa avx2")
    here = ISA_NAMES[1 : ISA_NAMES.index(gistkit.ops.best_isa()) + 1][::-1] or ISA_NAMES[:1]
    parser.add_argument("--isa", nargs="+", choices=ISA_NAMES, default=list(here), help="default: all but generic")
    parser.add_argument("--masks", nargs="+", choices=list(PLANS), default=None, help="default: all; three if --quick")
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096], metavar="N", help="default: 4096")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--key-heads", type=int, default=None, help="default: as many as --heads")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--no-flex", action="store_true", help="leave FlexAttention out: compiling it takes a while")
    parser.add_argument("--no-decode", action="store_true", help="leave decoding out")
    options = parser.parse_args()
    options.key_heads = options.key_heads or options.heads
    options.masks = options.masks or list(FEW if options.quick else PLANS)
    harness.run("attention", cases(options), options, seconds=8)


if __name__ == "__main__":
    main()
