"""The CUDA kernels on a GPU: attention on the papers' masks against SDPA and FlexAttention, and rope.

Times are the GPU's own, between events; contenders take turns. One file with GPU, driver, versions and commit.
"""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import harness
import torch
from contenders import block_mask
from masks import FEW, PLANS, visible_pairs
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa
from tqdm import tqdm

import gistkit
from gistkit.ops import reference

LENGTHS = (2048, 8192, 16384)
LONGEST_DENSE = 8192


def milliseconds(forms: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each contender, in turns, after three calls each."""
    for form in forms.values():
        for _ in range(3):
            form()
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds):
        for name, form in forms.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            form()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: statistics.median(runs) for name, runs in times.items()}


def attention(mask: str, length: int, dim: int, backward: bool) -> dict[str, Callable[[], object]]:
    """The contenders of a case in bfloat16, 16 heads."""
    plan = PLANS[mask](length)
    plan = plan.to("cuda")
    heads = [
        torch.randn(1, 16, rows, dim, device="cuda", dtype=torch.bfloat16, requires_grad=backward)
        for rows in (plan.num_queries, plan.num_keys, plan.num_keys)
    ]
    grad = torch.randn_like(heads[0])
    forms: dict[str, Callable[[], torch.Tensor]] = {"gistkit": lambda: gistkit.attention(*heads, plan)}
    if mask == "causal":
        forms["SDPA, is_causal"] = lambda: sdpa(*heads, is_causal=True)
    if length <= LONGEST_DENSE:
        dense = reference.dense_mask(plan)[0]
        forms["SDPA, dense mask"] = lambda: sdpa(*heads, attn_mask=dense)
    blocks = block_mask(plan, compiled=True, device="cuda")()
    flex = torch.compile(flex_attention, fullgraph=True)
    forms["FlexAttention, compiled"] = lambda: flex(*heads, block_mask=blocks)
    if backward:
        return {name: lambda form=form: torch.autograd.grad(form(), heads, grad) for name, form in forms.items()}
    make = block_mask(plan, compiled=True, device="cuda")
    return {**forms, "FlexAttention, mask creation alone": make}


def rope(tokens: int) -> dict[str, Callable[[], object]]:
    """Llama 8B's heads in bfloat16."""
    query, key = (torch.randn(1, heads, tokens, 128, device="cuda", dtype=torch.bfloat16) for heads in (32, 8))
    positions = torch.arange(tokens, device="cuda")
    inv_freq = 1e4 ** -(torch.arange(0, 128, 2, device="cuda") / 128)
    compiled = torch.compile(lambda q, k: reference.rope(q, k, positions, inv_freq), fullgraph=True)
    return {
        "gistkit": lambda: gistkit.rope(query, key, positions, inv_freq),
        "plain torch, compiled": lambda: compiled(query, key),
        "copy": lambda: (query.clone(), key.clone()),
    }


def driver() -> str:
    """The GPU's driver, as its own tool tells."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]


def main() -> None:
    """Runs the cases and writes the file."""
    options = harness.parser(__doc__, "python benchmarks/gpu.py --quick --json gpu.json")
    options.add_argument("--masks", nargs="+", choices=list(PLANS), default=[*FEW, "Dodo 10x, tau 512"])
    chosen = options.parse_args()
    if not torch.cuda.is_available():
        options.error("there is no GPU here, or this torch has no CUDA")
    name = torch.cuda.get_device_name()
    environment = {**harness.environment(), "gpu": name, "driver": driver(), "cuda": torch.version.cuda}
    print(", ".join(f"{key} {value}" for key, value in environment.items()))
    rows: list[dict[str, object]] = []
    work = [
        (mask, n, dim, backward)
        for mask in chosen.masks
        for n in (LENGTHS[:1] if chosen.quick else LENGTHS)
        for dim in (64, 128)
        for backward in (False, True)
    ]
    rounds = 10 if chosen.quick else 30
    for mask, n, dim, backward in tqdm(work, desc="attention", unit="case", dynamic_ncols=True):
        torch.compiler.reset()
        flops = visible_pairs(PLANS[mask](n)) * 16 * 4 * dim * (3.5 if backward else 1)
        label = f"{mask}, N {n}, H16 D{dim} bfloat16, {'forward + backward' if backward else 'forward'}"
        for form, time in milliseconds(attention(mask, n, dim, backward), rounds).items():
            rate = flops / time * 1e-9
            rows.append({"case": label, "form": form, "median": time, "tflops": rate})
            tqdm.write(f"{label:60} {form:36} {time:9.3f} ms {rate:8.1f} TF/s visible")
    for tokens in (1024, 8192, 65536):
        label, size = f"rope, N {tokens}, H32/8 D128 bfloat16", 2 * 2 * 40 * tokens * 128
        for form, time in milliseconds(rope(tokens), rounds).items():
            rows.append({"case": label, "form": form, "median": time, "tbps": size / time * 1e-9})
            print(f"{label:60} {form:36} {time:9.3f} ms {size / time * 1e-9:8.2f} TB/s")
    folder = Path("runs/benchmarks" if chosen.quick else "benchmarks/results") / harness.slug(name, "cuda")
    path = chosen.json or (harness.ROOT / folder / "gpu.json" if chosen.save else None)
    if path:
        harness.write(Path(path), {"suite": "gpu", "machine": environment, "milliseconds": rows}, rows)


if __name__ == "__main__":
    main()
