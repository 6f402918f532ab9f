"""Attention on the CPU against torch's scaled_dot_product_attention: causal, GistPool and Dodo masks.

    python benchmarks/attention.py [--quick] [--isa avx2 avx512] [--json FILE]

Every round times each candidate once, one after the other; the table gives medians, the middle half's spread and the
ratio to SDPA. Only ratios within one table mean anything.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import gistkit
from gistkit import Plan
from gistkit.ops import reference

ISAS = ("generic", "avx2", "avx512")


def causal(length: int) -> Plan:
    end = torch.arange(1, length + 1)
    return plan_of([(torch.zeros_like(end), end)], length)


def gistpool(length: int, ratio: int = 8, text: int = 256, window: int = 5) -> Plan:
    """Grouped [BOS][context][gists][text]: gists see the last `window` pooling windows, text sees gists and itself."""
    context = (length - 1 - text) * ratio // (ratio + 1) // ratio * ratio
    gists = context // ratio
    row = torch.arange(length)
    gist = row - 1 - context
    is_gist, is_text = (gist >= 0) & (gist < gists), gist >= gists
    bos = (torch.zeros_like(row), torch.where(is_gist | is_text, 1, row + 1))
    begin = torch.where(is_gist, 1 + ratio * (gist - window + 1).clamp(min=0), 1 + context)
    end = torch.where(is_gist, 1 + ratio * (gist + 1), row + 1)
    seen = (torch.where(is_gist | is_text, begin, length), torch.where(is_gist | is_text, end, length))
    own = (torch.where(is_gist, row, length), torch.where(is_gist, row + 1, length))
    return plan_of([bos, seen, own], length)


def dodo(length: int, recent: int = 128, ratio: int = 10) -> Plan:
    """[selected tokens][all tokens]: a row sees the selected ones before its window of recent tokens."""
    selected = -(-length // ratio)
    row = torch.arange(length)
    first = (row - recent + 1).clamp(min=0)
    return plan_of(
        [(torch.zeros_like(row), -(-first // ratio)), (selected + first, selected + row + 1)], selected + length
    )


def plan_of(spans: list[tuple[Tensor, Tensor]], keys: int) -> Plan:
    pairs = torch.stack([torch.stack(pair, -1) for pair in spans], 1).int()
    pairs[pairs[..., 0] >= pairs[..., 1]] = keys
    order = (2 * pairs[..., 0].long() + (pairs[..., 0] == keys)).argsort(dim=-1, stable=True)
    return Plan.from_spans(pairs.gather(1, order[..., None].expand_as(pairs)), keys)


MASKS: dict[str, Callable[[int], Plan]] = {"causal": causal, "gistpool": gistpool, "dodo": dodo}


def candidates(name: str, args: argparse.Namespace) -> tuple[dict[str, tuple[Callable, Callable]], float]:
    """Forward, and forward with backward, of each competitor; and the share of visible scores."""
    plan = MASKS[name](args.length)
    g = torch.Generator().manual_seed(0)
    dtype = getattr(torch, args.dtype)
    make = lambda rows: torch.randn(1, args.heads, rows, args.dim, generator=g).to(dtype)  # noqa: E731
    q, k, v = (make(n).requires_grad_() for n in (args.length, plan.num_keys, plan.num_keys))
    grad = make(args.length)
    mask = reference.dense_mask(plan)[0]

    def both(attend: Callable[[], Tensor]) -> tuple[Callable, Callable]:
        return torch.no_grad()(attend), lambda: torch.autograd.grad(attend(), (q, k, v), grad)

    def ours(isa: str) -> Tensor:
        gistkit.ops.cpu_isa(isa)
        return gistkit.attention(q, k, v, plan)

    found = {"SDPA dense mask": both(lambda: sdpa(q, k, v, attn_mask=mask))}
    if name == "causal":
        found["SDPA is_causal"] = both(lambda: sdpa(q, k, v, is_causal=True))
    for isa in args.isa:
        found[f"gistkit {isa}"] = both(lambda isa=isa: ours(isa))
    return found, mask.double().mean().item()


def milliseconds(function: Callable) -> float:
    start = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - start)


def measure(name: str, args: argparse.Namespace) -> list[dict]:
    found, density = candidates(name, args)
    runs = {(who, part): f for who, pair in found.items() for part, f in zip(("fwd", "fwd+bwd"), pair, strict=True)}
    for function in runs.values():
        function()
    times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for _ in range(args.rounds):
        for key, function in runs.items():
            times[key].append(milliseconds(function))
    rows = []
    multiplies = 4e-6 * args.heads * args.length * MASKS[name](args.length).num_keys * density * args.dim
    for (who, part), samples in times.items():
        low, middle, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else samples * 3
        row = {"mask": name, "density": density, "who": who, "part": part, "median_ms": middle, "spread_ms": high - low}
        row["gflops"] = multiplies * (3.5 if part == "fwd+bwd" else 1) / middle
        for rival in ("SDPA dense mask", "SDPA is_causal"):
            if (rival, part) in times:
                row[f"against {rival}"] = statistics.median(times[rival, part]) / middle
        rows.append(row)
    return rows


def machine() -> dict:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((s.split(":")[1].strip() for s in info.read_text().splitlines() if s.startswith("model name")), cpu)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {"cpu": cpu, "threads": torch.get_num_threads(), "torch": torch.__version__, "commit": commit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    levels = ISAS[1 : ISAS.index(gistkit.ops.best_isa()) + 1] or ISAS[:1]
    parser.add_argument("--isa", nargs="+", choices=ISAS, default=list(levels), help="instruction sets to time")
    parser.add_argument("--masks", nargs="+", choices=list(MASKS), default=list(MASKS))
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16", "float64"], default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="a quarter of the length, three rounds")
    parser.add_argument("--json", type=Path, help="also write machine and results to this file")
    args = parser.parse_args()
    if args.quick:
        args.length, args.rounds = args.length // 4, 3
    torch.set_num_threads(args.threads)

    about = machine()
    print(", ".join(f"{k} {v}" for k, v in about.items()))
    print(f"B1 H{args.heads} N{args.length} D{args.dim} {args.dtype}, {args.rounds} rounds\n")
    print(f"{'mask, density':16}{'':18}{'part':9}{'median ms':>10}{'spread':>8}{'GF/s':>7}{'x mask':>8}{'x causal':>9}")
    results = []
    for name in args.masks:
        for row in measure(name, args):
            results.append(row)
            ratios = [row.get(f"against {rival}") for rival in ("SDPA dense mask", "SDPA is_causal")]
            shown = "".join(f"{r:{w}.2f}" if r else " " * w for r, w in zip(ratios, (8, 9), strict=True))
            print(
                f"{name:10}{row['density']:<6.3f}{row['who']:18}{row['part']:9}{row['median_ms']:10.1f}"
                f"{row['spread_ms']:8.1f}{row['gflops']:7.0f}{shown}",
                flush=True,
            )
    if args.json:
        settings = {k: v for k, v in vars(args).items() if k != "json"}
        args.json.write_text(json.dumps({"machine": about, "settings": settings, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
