"""gistkit.rope against transformers' rotary embedding (eager and compiled) and against copying the tensors.

transformers' forms get cosines and sines ready made, as a model computes them once for all layers; ours starts from
positions. All forms take turns, so that the machine's moods hit them alike; times are medians with quartiles.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import gistkit

# name: B, Hq, Hk, N, D, dtype, token major in memory (as a projection leaves it)
CASES = {
    "long, 32+8 heads": (1, 32, 8, 4096, 128, torch.float32, False),
    "long, 32+8 heads, bf16": (1, 32, 8, 4096, 128, torch.bfloat16, False),
    "long, 32+8 heads, token major": (1, 32, 8, 4096, 128, torch.float32, True),
    "short, 4+4 heads": (16, 4, 4, 80, 32, torch.float32, True),
    "one token, 32+8 heads": (1, 32, 8, 1, 128, torch.float32, True),
}


def heads(batch, count, tokens, dim, dtype, token_major):
    if token_major:
        return torch.randn(batch, tokens, count, dim).to(dtype).transpose(1, 2)
    return torch.randn(batch, count, tokens, dim).to(dtype)


def forms(case, backward):
    """The contenders of a case, as functions without arguments."""
    batch, queries, keys, tokens, dim, dtype, token_major = case
    query = heads(batch, queries, tokens, dim, dtype, token_major).requires_grad_(backward)
    key = heads(batch, keys, tokens, dim, dtype, token_major).requires_grad_(backward)
    positions = torch.arange(tokens)
    inv_freq = 10000.0 ** -(torch.arange(0, dim, 2) / dim)
    angle = (positions[:, None] * inv_freq).repeat(1, 2)[None]
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    compiled = torch.compile(apply_rotary_pos_emb, fullgraph=True)
    if backward:
        ones = torch.randn_like(query), torch.randn_like(key)

        def both(rotated):
            torch.autograd.grad(rotated, (query, key), ones)

        return {
            "gistkit": lambda: both(gistkit.rope(query, key, positions, inv_freq)),
            "eager": lambda: both(apply_rotary_pos_emb(query, key, cos, sin)),
            "compiled": lambda: both(compiled(query, key, cos, sin)),
        }
    ready = torch.empty_like(query), torch.empty_like(key)
    return {
        "gistkit": lambda: gistkit.rope(query, key, positions, inv_freq),
        "gistkit in place": lambda: gistkit.rope(*ready, positions, inv_freq, inplace=True),
        "eager": lambda: apply_rotary_pos_emb(query, key, cos, sin),
        "compiled": lambda: compiled(query, key, cos, sin),
        "copy, fresh memory": lambda: (query.clone(), key.clone()),
        "copy, ready buffers": lambda: (ready[0].copy_(query), ready[1].copy_(key)),
    }


def time_in_turns(functions, seconds):
    """Milliseconds of each function: lower quartile, median, upper quartile."""
    times = {name: [] for name in functions}
    for function in functions.values():
        function(), function()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["gistkit"]) < 5:
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.quantiles(values, n=4) for name, values in times.items()}


def environment():
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "isa": gistkit.ops.cpu_isa(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip() or None,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the time, noisier")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    result = {"environment": environment(), "milliseconds": {}}
    print("  ".join(f"{key} {value}" for key, value in result["environment"].items()))
    for name, case in CASES.items():
        for direction in ("forward", "forward + backward"):
            torch.compiler.reset()
            quartiles = time_in_turns(forms(case, direction != "forward"), 0.5 if options.quick else 5)
            result["milliseconds"][f"{name}, {direction}"] = quartiles
            print(f"\n{name}, {direction}")
            mine = quartiles["gistkit"][1]
            for form, (low, median, high) in quartiles.items():
                print(f"  {form:20} {median:9.3f} ms  ({low:.3f} to {high:.3f})  {median / mine:6.2f} x gistkit")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
