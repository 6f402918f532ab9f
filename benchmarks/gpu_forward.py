"""Attention's forward pass on Hopper: right against float64, then timed by rounds beside mma.sync's kernels and cuDNN.

A GPU's clock drifts by a fifth with what ran before: every contender has its turn in each round, and medians are of
rounds. `--build` compiles the kernels a second time with the choices of `CHOICES`, which the library does not make by
default; they are timed where they have been built, and need nothing but nvcc to be. Rows are printed as JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from masks import PLANS, visible_pairs
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import gistkit
from gistkit import Plan, layouts
from gistkit.ops import attention as op
from gistkit.ops import reference

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "cuda_on_cpu"))
from attention_cases import KINDS, Device, DeviceTiles, Forward, Rows  # noqa: E402

BUILD = ROOT / "build" / "gpu_forward"
SOURCES = ["pairwise", *(f"{kind}{part}" for kind in ("forward", "hopper_forward") for part in ("", "_bf16", "_fp16"))]
# Names of what the library does not do by default, with the macros that choose it.
CHOICES = {"gistkit, no maximum a step": ["-DGISTKIT_HOPPER_FORWARD_MAXIMUM=0"]}
OURS, MMA = "gistkit", "gistkit, mma.sync"
LAUNCHER = "_ZN7gistkit4cuda17attention_forwardERKNS_16AttentionForwardERKNS_15AttentionDeviceEP11CUstream_st"
BF16, FP16 = torch.bfloat16, torch.float16
# Largest relative error of a result, which is rounded to these.
LIMITS = {BF16: 4e-3, FP16: 6e-4}


# ---- the kernels built with other choices


def library(choice: str) -> Path:
    """Where its library lies once it has been built."""
    return BUILD / f"lib{'-'.join(flag.rpartition('_')[2].lower() for flag in CHOICES[choice])}.so"


def build() -> None:
    """Compiles every choice for sm_90a alone."""
    BUILD.mkdir(parents=True, exist_ok=True)
    flags = ["-std=c++20", "-O3", "-Icsrc", "-gencode=arch=compute_90a,code=sm_90a", "-Xcompiler=-fPIC"]

    def compiled(choice: str, name: str) -> Path:
        out = library(choice).with_suffix("") / f"{name}.o"
        out.parent.mkdir(exist_ok=True)
        source = f"csrc/cuda/attention/{name}.cu"
        subprocess.run(["nvcc", *flags, *CHOICES[choice], "-c", source, "-o", str(out)], cwd=ROOT, check=True)
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for choice in CHOICES:
            objects = [str(path) for path in pool.map(lambda name, of=choice: compiled(of, name), SOURCES)]
            subprocess.run(["nvcc", "-shared", *objects, "-o", str(library(choice))], check=True)


class Built:
    """Attention by a library's launcher, past the op.

    Args:
        path: the library.
    """

    def __init__(self, path: Path) -> None:
        self._launch = ctypes.CDLL(str(path))[LAUNCHER]

    def bound(self, tensors: list[Tensor], plan: Plan) -> Callable[[], Tensor]:
        """A call on these tensors."""
        query, key, value = tensors
        (batch, heads, rows, dim), keys = query.shape, key.shape[2]
        spans, tiles = op._lists(plan, False)
        assert tiles is not None
        own, other = -(-rows // 128) * spans.shape[0], -(-keys // 64)
        begin = tiles.data_ptr()
        places = (begin, begin + 8 * own, begin + 16 * own, begin + 12 * own)
        lists = DeviceTiles(*places, tiles.shape[1] - 4 * own - other, own, other)
        out = query.new_empty(batch, rows, heads, dim).transpose(1, 2)
        lse = query.new_empty(batch, heads, rows, dtype=torch.float32)
        workspace = torch.empty(64, dtype=torch.int32, device=query.device)
        params = Forward(
            dtype=KINDS[query.dtype], batch=batch, query_heads=heads, key_heads=key.shape[1], num_queries=rows,
            num_keys=keys, dim_qk=dim, dim_v=dim, scale=dim**-0.5, spans=spans.data_ptr(),
            spans_shared=spans.shape[0] == 1, num_spans=spans.shape[2], query=Rows.of(query), key=Rows.of(key),
            value=Rows.of(value), out=Rows.of(out), lse=lse.data_ptr(),
        )  # fmt: skip
        device = Device(key_tiles=lists, splits=1, shared_limit=227 * 1024, workspace=workspace.data_ptr())
        kept = spans, tiles, workspace, lse, tensors

        def call() -> Tensor:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            error = self._launch(ctypes.byref(params), ctypes.byref(device), stream)
            assert error == 0 and kept, f"cudaError_t {error}"
            return out

        return call


@contextmanager
def without_hopper() -> Iterator[None]:
    """Kernels of all devices alone."""
    os.environ["GISTKIT_HOPPER"] = "0"
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
        Check("growing scores", causal(2048), grow=True),
        Check("growing scores D64 float16", causal(2048), FP16, dim=64, grow=True),
    ]


def check(case: Check, device: str, others: dict[str, Built]) -> dict[str, Any]:
    """Errors against float64, of the result relative to its size, of lse absolute; whether a second run is the same."""
    tensors, plan = case.tensors(device), case.plan.to(device)
    bias = tensors[3] if case.bias else None
    options: dict[str, Any] = {"softcap": case.softcap, "key_bias": bias, "return_lse": True}
    wide = {**options, "key_bias": None if bias is None else bias.double()}
    exact, exact_lse = reference.attention(*(t.double() for t in tensors[:3]), plan, **wide)
    seen = exact_lse > -torch.inf

    def error(out: Tensor) -> float:
        return float((out.double() - exact).norm() / exact.norm())

    out, lse = gistkit.attention(*tensors[:3], plan, **options)
    again, _ = gistkit.attention(*tensors[:3], plan, **options)
    found = {
        "error": error(out),
        "lse": float((lse.double() - exact_lse)[seen].abs().max()),
        "empty": bool(((lse == -torch.inf) == ~seen).all() and (out[~seen] == 0).all()),
        "same": torch.equal(out, again),
    }
    with without_hopper():
        found["error, mma.sync"] = error(gistkit.attention(*tensors[:3], plan, **options)[0])
    if not case.bias and case.softcap is None:
        found |= {f"error, {name}": error(other.bound(tensors, plan)()) for name, other in others.items()}
    errors = [value for name, value in found.items() if name.startswith("error")]
    if device == "cuda":
        call = lambda: gistkit.attention(*tensors[:3], plan, **options)  # noqa: E731
        found["wgmma"] = any("hopper" in name for name in kernels(call))
    found["ok"] = max(errors) < LIMITS[case.dtype] and found["lse"] < 2e-3 and found["empty"] and found["same"]
    return found


def kernels(call: Callable[[], object]) -> list[str]:
    """The names of the kernels that a call launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sorted({event.name for event in profile.events() if event.name.startswith("void gistkit")})


# ---- fast?


def contenders(tensors: list[Tensor], plan: Plan, causal: bool, others: dict[str, Built]) -> dict[str, Callable]:
    """Calls by name, in the order of a round."""

    def plain() -> object:
        with without_hopper():
            return gistkit.attention(*tensors, plan)

    def cudnn() -> object:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return sdpa(*tensors, is_causal=True)

    found: dict[str, Callable] = {OURS: lambda: gistkit.attention(*tensors, plan)}
    found |= {name: other.bound(tensors, plan) for name, other in others.items()}
    found[MMA] = plain
    return {**found, "SDPA, cuDNN": cudnn} if causal else found


def rounds(calls: dict[str, Callable], count: int, launches: int) -> dict[str, list[float]]:
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


def timed(length: int, count: int, launches: int, others: dict[str, Built]) -> Iterator[dict[str, Any]]:
    """A row for each case and contender."""
    for mask in ("causal", "GistPool 8x"):
        plan = PLANS[mask](length)
        pairs, plan = visible_pairs(plan), plan.to("cuda")
        for dim, dtype in ((128, BF16), (64, BF16), (128, FP16), (96, BF16), (48, BF16)):
            rows = plan.num_queries, plan.num_keys, plan.num_keys
            tensors = [torch.randn(1, 16, n, dim, device="cuda", dtype=dtype) for n in rows]
            calls = contenders(tensors, plan, mask == "causal", others)
            for name, runs in rounds(calls, count, launches).items():
                rate = 4 * pairs * 16 * dim * 1e-9
                middle = statistics.median(runs)
                case = f"{mask}, N {length}, H16 D{dim} {str(dtype).removeprefix('torch.')}"
                yield {
                    "case": case, "form": name, "ms": round(middle, 4), "best_ms": round(min(runs), 4),
                    "tflops": round(rate / middle, 1), "best_tflops": round(rate / min(runs), 1),
                }  # fmt: skip


def main() -> int:
    """Checks, then times; 1 where something is wrong."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--build", action="store_true", help="compile the kernels with other choices, and end")
    options.add_argument("--length", type=int, default=8192, help="tokens of what is timed (default: %(default)s)")
    options.add_argument("--rounds", type=int, default=5, help="of all contenders (default: %(default)s)")
    options.add_argument("--launches", type=int, default=15, help="a round and contender (default: %(default)s)")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the checks")
    chosen = options.parse_args()
    if chosen.build:
        build()
        return 0
    there = chosen.device == "cuda"
    others = {name: Built(library(name)) for name in CHOICES if there and library(name).exists()}
    begun, wrong = time.monotonic(), 0
    with torch.no_grad():
        for case in checks(1 if there else 4):
            try:
                found = check(case, chosen.device, others)
            except Exception as error:
                found = {"ok": False, "said": f"{type(error).__name__}: {error}"[:300]}
            wrong += not found["ok"]
            print(json.dumps({"check": case.name, **found}), flush=True)
        print(f"gpu_forward: {wrong} wrong, {time.monotonic() - begun:.1f} s", flush=True)
        if not there:
            return int(wrong > 0)
        for row in timed(chosen.length, chosen.rounds, chosen.launches, others):
            print(json.dumps(row), flush=True)
    print(f"gpu_forward: {time.monotonic() - begun:.1f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
