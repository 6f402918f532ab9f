"""Ten small calls that reach every CUDA kernel, forward and backward: for compute-sanitizer, which is slow.

Sizes are odd: tiles, blocks and rows of 16 bytes end in their middle.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

import gistkit
from gistkit import Plan, layouts
from gistkit.layouts import Links
from gistkit.nn import DigitTrie
from gistkit.ops import ancestor_attention, bias_gelu, trie_mix


def _back(out: Tensor | Iterable[Tensor], *inputs: Tensor) -> list[Tensor]:
    outs = [out] if isinstance(out, Tensor) else list(out)
    return [*outs, *torch.autograd.grad([x.float().square().sum() for x in outs], inputs)]


def _randn(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype).requires_grad_()


def _rope(device: str) -> list[Tensor]:
    """With gradients of positions and frequencies."""
    query, key = _randn(2, 4, 37, 34, device=device), _randn(2, 2, 37, 34, device=device)
    positions = torch.rand(2, 37, device=device, dtype=torch.float64).mul(50).requires_grad_()
    inv_freq = torch.linspace(1, 0.1, 16, device=device, dtype=torch.float64).requires_grad_()
    inputs = query, key, positions, inv_freq
    return _back(gistkit.rope(*inputs), *inputs)


def _rope_interleaved(device: str) -> list[Tensor]:
    query, key = (torch.randn(1, heads, 203, 64, device=device, dtype=torch.bfloat16) for heads in (3, 1))
    inv_freq = torch.linspace(1, 0.1, 24, device=device)
    positions = torch.arange(203, device=device)
    return [*gistkit.rope(query, key, positions, inv_freq, interleaved=True)]


def _pool(device: str) -> list[Tensor]:
    key, value = (_randn(2, 3, 65, dim, device=device, dtype=torch.float16) for dim in (40, 24))
    offsets = torch.tensor([0, 1, 30, 33, 65], device=device)
    angles = {"positions": torch.arange(4, device=device) * 2.5, "inv_freq": torch.linspace(1, 0.1, 16, device=device)}
    return _back(gistkit.window_pool(key, value, windows=offsets, **angles), key, value)


def _equal_windows(device: str) -> list[Tensor]:
    hidden = _randn(2, 63, 50, device=device)
    return _back(gistkit.window_pool(hidden, windows=5), hidden)


def _attention(
    device: str, *, dtype: torch.dtype, dim: int, queries: int, keys: int, bias: bool = False, dim_v: int | None = None
) -> list[Tensor]:
    """Two spans a row, the last row empty; two query heads a key head."""
    start = torch.arange(queries) % 7
    middle = start + keys // 3
    spans = torch.stack([start, middle, middle + 3, (middle + 3 + torch.arange(queries)).clamp(max=keys)], -1)
    spans = spans.view(queries, 2, 2).int()
    spans[-1] = keys
    plan = Plan.from_spans(spans, keys).to(device)
    sizes = (4, queries, dim), (2, keys, dim), (2, keys, dim_v or dim)
    heads = [_randn(1, *size, device=device, dtype=dtype) for size in sizes]
    more = {"key_bias": _randn(1, 4, keys, device=device), "softcap": 3.0} if bias else {}
    out = gistkit.attention(*heads, plan, **more)
    return _back(out, *heads, *([more["key_bias"]] if bias else []))


def _decoding(device: str) -> list[Tensor]:
    query = torch.randn(2, 6, 1, 64, device=device, dtype=torch.bfloat16)
    key, value = torch.randn(2, 2, 2, 1031, 64, device=device, dtype=torch.bfloat16)
    return [gistkit.attention(query, key, value, layouts.causal_plan(1, 1031, torch.device(device)))]


def _trie(device: str, dtype: torch.dtype) -> list[Tensor]:
    trie = DigitTrie.of(torch.arange(130), digits=3).to(device)
    symbols = len(trie.symbols)
    shapes = (*trie.paths.rows.shape, 3), (symbols, 3, 70), (symbols, 70)
    mix = [_randn(*shape, device=device, dtype=dtype) for shape in shapes]
    counts = len(trie.leaf_ancestors.rows), trie.nodes, trie.nodes
    heads = [_randn(count, 2, 33, device=device, dtype=dtype) for count in counts]
    return [
        *_back(trie_mix(*mix, Links(*trie.paths)), *mix),
        *_back(ancestor_attention(*heads, trie.leaf_ancestors), *heads),
    ]


def _gelu(device: str) -> list[Tensor]:
    inputs = [_randn(*shape, device=device) for shape in ((203, 70), (70,), (203,))]
    return _back(bias_gelu(*inputs), *inputs)


BF16, FP16 = torch.bfloat16, torch.float16
CASES: dict[str, Callable[[str], list[Tensor]]] = {
    "rope": _rope,
    "rope interleaved": _rope_interleaved,
    "window_pool": _pool,
    "window_pool of equal windows": _equal_windows,
    "attention float32": partial(_attention, dtype=torch.float32, dim=33, queries=70, keys=131, bias=True),
    "attention bfloat16": partial(_attention, dtype=BF16, dim=64, queries=131, keys=203, bias=True),
    "attention float16, wide heads": partial(_attention, dtype=FP16, dim=192, dim_v=128, queries=67, keys=131),
    "attention decoding": _decoding,
    "trie": partial(_trie, dtype=torch.float32),
    "gelu": _gelu,
}


def main() -> None:
    """Runs the cases; fails where a result is not finite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.epilog = "example: compute-sanitizer --tool racecheck python tests/helpers/small_cases.py --device cuda"
    parser.add_argument("--device", default="cuda", help="torch device, cpu or cuda (default: %(default)s)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES], metavar="NAME", help="some of them")
    chosen = parser.parse_args()
    for name in chosen.cases:
        begun = time.perf_counter()
        torch.manual_seed(0)
        found = CASES[name](chosen.device)
        if not all(bool(x.isfinite().all()) for x in found):
            raise SystemExit(f"{name}: expected finite results, got others")
        print(f"{name}: {time.perf_counter() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main()
