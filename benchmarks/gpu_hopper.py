"""Attention on Hopper: both passes by rounds beside mma.sync's kernels and cuDNN.

A GPU's clock drifts by a fifth with what ran before: every contender has its turn in each round, and medians are of
rounds. With `--trials`, in a build with GISTKIT_TRIALS (CUDAFLAGS=-DGISTKIT_TRIALS), kernels that are not the default
are timed too; `GISTKIT_HOPPER=sums python -m pytest tests/cuda` tests them. Rows are printed as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch
from masks import PLANS, visible_pairs
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import gistkit
from gistkit import Plan

# What is compared, by values of GISTKIT_HOPPER; the last one is in builds with GISTKIT_TRIALS.
FORMS = {"gistkit": None, "gistkit, mma.sync": "0"}
TRIALS = {"gistkit, no maximum a step": "sums"}
TRIALS_OF_GRADIENTS = {"gistkit, started sums": "started"}
Forms = dict[str, str | None]
BF16, FP16 = torch.bfloat16, torch.float16


@contextmanager
def chosen_kernels(name: str | None) -> Iterator[None]:
    """Those that GISTKIT_HOPPER names (csrc/cuda/README.md); None: the library's own choice."""
    if name is None:
        yield
        return
    os.environ["GISTKIT_HOPPER"] = name
    try:
        yield
    finally:
        del os.environ["GISTKIT_HOPPER"]


def cudnn(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention by cuDNN."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa(query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])


def contenders(tensors: list[Tensor], plan: Plan, causal: bool, forms: Forms) -> dict[str, Callable[[], object]]:
    """Calls by name, in the order of a round."""

    def ours(kernel: str | None) -> object:
        with chosen_kernels(kernel):
            return gistkit.attention(*tensors, plan)

    found: dict[str, Callable[[], object]] = {name: partial(ours, kernel) for name, kernel in forms.items()}
    return {**found, "SDPA, cuDNN": partial(cudnn, *tensors)} if causal else found


def contenders_of_gradients(
    tensors: list[Tensor], plan: Plan, causal: bool, forms: Forms
) -> dict[str, Callable[[], object]]:
    """Backward passes by name."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    upstream = torch.randn_like(tensors[0])

    def gradients(kernel: str | None, make: Callable[[], Any]) -> Callable[[], object]:
        with torch.enable_grad():
            out = make()

        def call() -> object:
            with chosen_kernels(kernel):
                return torch.autograd.grad(out, leaves, upstream, retain_graph=True)

        return call

    ours = partial(gistkit.attention, *leaves, plan)
    found = {name: gradients(kernel, ours) for name, kernel in forms.items()}
    found["gistkit, sums in any order"] = gradients(None, partial(ours, deterministic=False))
    return {**found, "SDPA, cuDNN": gradients(None, partial(cudnn, *leaves))} if causal else found


def rounds(calls: dict[str, Callable[[], object]], count: int, launches: int) -> dict[str, list[float]]:
    """Milliseconds a launch of each, by rounds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(count):
        for name, call in calls.items():
            call()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(launches):
                call()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / launches)
    return times


def timed(length: int, count: int, launches: int, trials: bool) -> Iterator[dict[str, Any]]:
    """A row for each case and contender, of both passes."""
    both = (
        ("forward", contenders, FORMS | (TRIALS if trials else {}), 4),
        ("backward", contenders_of_gradients, FORMS | (TRIALS_OF_GRADIENTS if trials else {}), 10),
    )
    sizes = ((128, BF16, 16), (64, BF16, 16), (128, BF16, 4), (128, FP16, 16), (96, BF16, 16), (48, BF16, 16))
    for mask, (dim, dtype, key_heads) in product(("causal", "GistPool 8x"), sizes):
        plan = PLANS[mask](length)
        pairs, plan = visible_pairs(plan), plan.to("cuda")
        rows = ((16, plan.num_queries), (key_heads, plan.num_keys), (key_heads, plan.num_keys))
        tensors = [torch.randn(1, heads, n, dim, device="cuda", dtype=dtype) for heads, n in rows]
        for which, make, forms, products in both:
            calls = make(tensors, plan, mask == "causal", forms)
            case = f"{which}, {mask}, N {length}, H16/{key_heads} D{dim} {str(dtype).removeprefix('torch.')}"
            for name, runs in rounds(calls, count, launches).items():
                rate = products * pairs * 16 * dim * 1e-9
                middle = statistics.median(runs)
                yield {
                    "case": case, "form": name, "ms": round(middle, 4), "best_ms": round(min(runs), 4),
                    "tflops": round(rate / middle, 1), "best_tflops": round(rate / min(runs), 1),
                }  # fmt: skip


def main() -> None:
    """Times all contenders on the GPU."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--trials", action="store_true", help="kernels that are not the default too")
    options.add_argument("--length", type=int, default=8192, help="tokens of what is timed (default: %(default)s)")
    options.add_argument("--rounds", type=int, default=5, help="of all contenders (default: %(default)s)")
    options.add_argument("--launches", type=int, default=15, help="a round and contender (default: %(default)s)")
    chosen = options.parse_args()
    begun = time.monotonic()
    with torch.no_grad():
        for row in timed(chosen.length, chosen.rounds, chosen.launches, chosen.trials):
            print(json.dumps(row), flush=True)
    print(f"gpu_hopper: {time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    main()
