"""Compare the fused op with torch's attention: the same output, without a mask.

python examples/fused_attention.py                   # 2,048 tokens of context
python examples/fused_attention.py 8192
"""

import sys
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

import gistkit as gk

tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 2048
layout = gk.layouts.gistpool(context=tokens, ratio=8, text=64)
plan = layout.compile()  # once for all layers, heads and steps
torch.manual_seed(0)
query, key, value = (torch.randn(1, 4, len(layout), 64) for _ in range(3))
mask = torch.from_numpy(layout.dense_mask(order="physical"))


def measured(function):
    """(its output, milliseconds of the best of three calls)."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        out = function()
        times.append(time.perf_counter() - start)
    return out, 1000 * min(times)


ours, ours_ms = measured(lambda: gk.attention(query, key, value, plan))
theirs, theirs_ms = measured(
    lambda: scaled_dot_product_attention(query, key, value, attn_mask=mask)
)
visible = mask.float().mean().item()
print(
    f"{layout.name}: {len(layout)} tokens, of whose pairs {visible:.1%} are visible"
)
print(
    f"scaled_dot_product_attention with a mask of {mask.numel() / 1e6:.1f} MB: "
    f"{theirs_ms:.1f} ms"
)
print(
    f"gistkit.attention with a plan: {ours_ms:.1f} ms, "
    f"{theirs_ms / ours_ms:.1f} times as fast"
)
print(f"largest difference: {(ours - theirs).abs().max().item():.1e}")
