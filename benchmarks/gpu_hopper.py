"""Attention on Hopper: results right against float64, then both passes by rounds beside mma.sync's kernels and cuDNN.

A GPU's clock drifts by a fifth with what ran before: every contender has its turn in each round, and medians are of
rounds. With `--trials`, in a build with GISTKIT_TRIALS (CUDAFLAGS=-DGISTKIT_TRIALS), kernels that are not the default
are checked and timed too. Rows are printed as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from masks import PLANS, visible_pairs
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import gistkit
from gistkit import Plan, layouts
from gistkit.ops import reference

# What is compared, by values of GISTKIT_HOPPER; the last one is in builds with GISTKIT_TRIALS.
FORMS = {"gistkit": None, "gistkit, mma.sync": "0"}
TRIALS = {"gistkit, no maximum a step": "sums"}
TRIALS_OF_GRADIENTS = {"gistkit, started sums": "started"}
Forms = dict[str, str | None]
BF16, FP16 = torch.bfloat16, torch.float16
# Largest relative error of a result, which is rounded to these.
LIMITS = {BF16: 4e-3, FP16: 6e-4}


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


# ---- right?


@dataclass(frozen=True)
class Check:
    """A problem: sizes, plan and options."""

    name: str
    plan: Plan
    dtype: torch.dtype = BF16
    dim: int = 128
    batch: int = 1
    heads: int = 16
    key_heads: int = 8
    softcap: float | None = None
    bias: bool = False
    spoiled: bool = False  # keys and values that no row sees are NaN
    grow: bool = False  # keys grow with their place, so that scores outgrow what they are weighed against

    def tensors(self, device: str) -> list[Tensor]:
        """Query, key, value and perhaps a bias."""
        g = torch.Generator().manual_seed(0)
        rows = self.plan.num_queries, self.plan.num_keys, self.plan.num_keys
        heads = self.heads, self.key_heads, self.key_heads
        made = [torch.randn(self.batch, h, n, self.dim, generator=g) for h, n in zip(heads, rows, strict=True)]
        if self.grow:
            made[1] *= torch.linspace(0.1, 8, self.plan.num_keys)[:, None]
        made = [t.to(device, self.dtype) for t in made]
        return [*made, torch.randn(1, self.heads, rows[1], generator=g).to(device)] if self.bias else made

    def spoil(self, tensors: list[Tensor]) -> None:
        """Fills what no row sees."""
        seen = reference.dense_mask(self.plan).any(0).any(0).to(tensors[1].device)
        for t in tensors[1:3]:
            t[:, :, ~seen] = torch.nan


def random_plan(batch: int, queries: int, keys: int, spans: int, align: int = 1) -> Plan:
    """Rows of random spans, some of them empty, some tiles seeing nothing."""
    g = torch.Generator().manual_seed(queries + keys)
    cuts = torch.randint(0, keys // align + 1, (batch, queries, 2 * spans), generator=g, dtype=torch.int32) * align
    found = cuts.sort(-1).values.view(batch, queries, spans, 2)
    found[torch.rand(batch, queries, generator=g) < 0.2] = keys
    found[:, 128:256] = keys
    return Plan(found, keys)


def checks(scale: int) -> list[Check]:
    """All of them; lengths are divided by `scale`. They have tiles enough for a device that none is cut into parts."""
    causal = lambda n: layouts.causal(n // scale).compile()  # noqa: E731
    pool = layouts.gistpool(1500 // scale, 8, 300 // scale).compile()
    few = random_plan(2, 777 // scale, 1000 // scale, 2)
    middle = random_plan(2, 777 // scale, 1000 // scale, 2)
    middle.spans.clamp_(99 // scale, 930 // scale)
    many = random_plan(1, 500 // scale, 900 // scale, 5)
    return [
        Check("causal D128", causal(2048)),
        Check("causal D64, group of 4", causal(1500), dim=64, key_heads=4),
        Check("causal D128 float16", causal(1000), FP16, key_heads=16),
        Check("GistPool D128", pool),
        Check("GistPool D64 float16, batch", pool, FP16, dim=64, batch=2),
        Check("spans of each row of the batch", few, batch=2),
        Check("many spans D64", many, dim=64, heads=36, key_heads=12),
        Check("D80", causal(1024), dim=80),
        Check("D48 float16", few, FP16, dim=48, batch=2),
        Check("softcap", causal(1024), softcap=5.0),
        Check("bias D64", causal(777), dim=64, bias=True),
        Check("bias and softcap float16", few, FP16, batch=2, bias=True, softcap=3.0),
        Check("NaN in keys and values that no row sees", middle, batch=2, spoiled=True),
        Check("NaN in keys and values that no row sees, D64 float16", middle, FP16, dim=64, batch=2, spoiled=True),
        Check("growing scores", causal(2048), grow=True),
        Check("growing scores D64 float16", causal(2048), FP16, dim=64, grow=True),
    ]


def check(case: Check, device: str, forms: Forms) -> dict[str, Any]:
    """Errors against float64, of results relative to their size, of lse absolute; whether a second run is the same."""
    tensors, plan = case.tensors(device), case.plan.to(device)
    bias = tensors[3] if case.bias else None
    options: dict[str, Any] = {"softcap": case.softcap, "key_bias": bias, "return_lse": True}
    wide = {**options, "key_bias": None if bias is None else bias.double()}
    exact, exact_lse = reference.attention(*(t.double() for t in tensors[:3]), plan, **wide)
    seen = exact_lse > -torch.inf
    if case.spoiled:
        case.spoil(tensors)
    call = lambda: gistkit.attention(*tensors[:3], plan, **options)  # noqa: E731
    found: dict[str, Any] = {"ok": True}
    for name, kernel in forms.items():
        with chosen_kernels(kernel):
            (out, lse), (again, _) = call(), call()
            if device == "cuda" and kernel != "0":
                found["wgmma"] = found.get("wgmma", True) and any("hopper" in kernel for kernel in kernels(call))
        error = float((out.double() - exact).norm() / exact.norm())
        of_lse = float((lse.double() - exact_lse)[seen].abs().max())
        empty = bool(((lse == -torch.inf) == ~seen).all() and (out[~seen] == 0).all())
        found |= {name: error, f"{name}, lse": of_lse}
        found["ok"] &= error < LIMITS[case.dtype] and of_lse < 2e-3 and empty and torch.equal(out, again)
    return found


def kernels(call: Callable[[], object]) -> list[str]:
    """The names of the kernels that a call launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sorted({event.name for event in profile.events() if event.name.startswith("void gistkit")})


# ---- fast?


def contenders(tensors: list[Tensor], plan: Plan, causal: bool, forms: Forms) -> dict[str, Callable[[], object]]:
    """Calls by name, in the order of a round."""

    def ours(kernel: str | None) -> object:
        with chosen_kernels(kernel):
            return gistkit.attention(*tensors, plan)

    def cudnn() -> object:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return sdpa(*tensors, is_causal=True, enable_gqa=tensors[0].shape[1] != tensors[1].shape[1])

    found: dict[str, Callable[[], object]] = {name: partial(ours, kernel) for name, kernel in forms.items()}
    return {**found, "SDPA, cuDNN": cudnn} if causal else found


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

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return sdpa(*leaves, is_causal=True, enable_gqa=leaves[0].shape[1] != leaves[1].shape[1])

    ours = partial(gistkit.attention, *leaves, plan)
    found = {name: gradients(kernel, ours) for name, kernel in forms.items()}
    found["gistkit, sums in any order"] = gradients(None, partial(ours, deterministic=False))
    return {**found, "SDPA, cuDNN": gradients(None, cudnn)} if causal else found


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


def main() -> int:
    """Checks, then times; 1 where something is wrong."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--trials", action="store_true", help="kernels that are not the default too")
    options.add_argument("--length", type=int, default=8192, help="tokens of what is timed (default: %(default)s)")
    options.add_argument("--rounds", type=int, default=5, help="of all contenders (default: %(default)s)")
    options.add_argument("--launches", type=int, default=15, help="a round and contender (default: %(default)s)")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the checks")
    chosen = options.parse_args()
    there, forms = chosen.device == "cuda", FORMS | (TRIALS if chosen.trials else {})
    begun, wrong = time.monotonic(), 0
    with torch.no_grad():
        for case in checks(1 if there else 4):
            try:
                found = check(case, chosen.device, forms)
            except Exception as error:
                found = {"ok": False, "said": f"{type(error).__name__}: {error}"[:300]}
            wrong += not found["ok"]
            print(json.dumps({"check": case.name, **found}), flush=True)
        print(f"gpu_hopper: {wrong} wrong, {time.monotonic() - begun:.1f} s", flush=True)
        if not there:
            return int(wrong > 0)
        for row in timed(chosen.length, chosen.rounds, chosen.launches, chosen.trials):
            print(json.dumps(row), flush=True)
    print(f"gpu_hopper: {time.monotonic() - begun:.1f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
