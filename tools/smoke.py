"""A small test of an installed gistkit, with torch and NumPy alone: each library computes what plain torch does.

example: python tools/smoke.py
         PYTHONPATH=folder python tools/smoke.py folder      # the package has to come from there
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import gistkit as gk


def attention_is_sdpa() -> None:
    """The op, its gradients and the plan of a layout, against torch's own attention under the layout's mask."""
    torch.manual_seed(0)
    layout = gk.layouts.gistpool(context=40, ratio=8, text=9)
    q, k, v = (torch.randn(2, 3, len(layout), 16, requires_grad=True) for _ in range(3))
    mask = torch.from_numpy(layout.dense_mask(order="physical"))
    out = gk.attention(q, k, v, layout.compile())
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    upstream = torch.randn_like(out)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(*(torch.autograd.grad(x, (q, k, v), upstream) for x in (out, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def windows_are_means() -> None:
    """`window_pool` against a mean."""
    k, v = torch.randn(2, 3, 32, 16).unbind(0)
    pooled = gk.window_pool(k[None], v[None], windows=8)
    for ours, given in zip(pooled, (k, v), strict=True):
        torch.testing.assert_close(ours[0], given.unflatten(1, (-1, 8)).mean(2), rtol=1e-5, atol=1e-6)


def seqpe_is_its_plain_form() -> None:
    """SeqPE's encoder, which plans a trie of digits, against the form that reads each digit by itself."""
    encoder = gk.nn.SeqPE(32, digits=3, layers=2, heads=2).eval()
    positions = torch.arange(0, 900, 7)
    torch.testing.assert_close(encoder(positions), encoder.plain(positions), rtol=1e-4, atol=1e-5)


def main(folder: str | None = None) -> None:
    """Runs all of them; `folder`: where the package has to come from."""
    package = Path(gk.__file__).resolve().parent
    if folder is not None and package.parent != Path(folder).resolve():
        sys.exit(f"expected gistkit from {folder}, got the one in {package.parent}")
    for test in (attention_is_sdpa, windows_are_means, seqpe_is_its_plain_form):
        test()
    versions = f"torch {torch.__version__}, Python {sys.version.split()[0]}, {gk.ops.cpu_isa()}"
    print(f"gistkit {gk.__version__} works: {versions}")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(f"usage: {sys.argv[0]} [FOLDER]")
    main(*sys.argv[1:])
