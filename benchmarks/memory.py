"""Peak memory of attention above its inputs and results, each case in a fresh process: gistkit against SDPA is_causal.

Linux with glibc only: the peak is the kernel's own count of resident pages. Target for gistkit: below 64 MiB.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import re
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import TypeVar

import harness
import torch
from torch import Tensor
from tqdm import tqdm

import gistkit
from gistkit import layouts

Result = TypeVar("Result")
TARGET_MIB = 64
FORMS = ("gistkit", "SDPA, is_causal")
SIZES = ((8, 8, 64), (8, 2, 64), (8, 8, 128))
"""Query heads, key heads and head dim."""


@dataclass(frozen=True)
class Case:
    """One measurement: causal attention over n tokens in float32."""

    form: str
    n: int
    heads: int
    key_heads: int
    dim: int
    backward: bool

    @property
    def name(self) -> str:
        """What the case is called in tables, without its form."""
        passes = "forward + backward" if self.backward else "forward"
        return f"causal, N {self.n}, B1 H{self.heads}/{self.key_heads} D{self.dim} float32, {passes}"


def status(field: str) -> int:
    """Bytes that /proc/self/status gives: VmRSS, what is resident now, or VmHWM, the most that ever was."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"memory: expected {field} in /proc/self/status, found none")
    return int(found[1]) * 1024


def reset_peak() -> None:
    """Makes VmHWM what is resident now, without what the C library keeps of freed memory for its next use."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def peak_of(call: Callable[[], Result]) -> tuple[Result, float]:
    """What a call returns, and the MiB at its peak above what was resident before."""
    gc.collect()
    reset_peak()
    before = status("VmRSS")
    result = call()
    return result, max(0.0, (status("VmHWM") - before) / 2**20)


def inputs_of(case: Case, n: int) -> list[Tensor]:
    """Query, key, value and the gradient of the result, for n tokens."""
    inputs = [torch.randn(1, count, n, case.dim) for count in (case.heads, case.key_heads, case.key_heads, case.heads)]
    for tensor in inputs[:3]:
        tensor.requires_grad_(case.backward)
    return inputs


def call(case: Case, inputs: list[Tensor], plan: gistkit.Plan) -> list[Tensor]:
    """One forward, or forward and backward; returns what a caller keeps."""
    *operands, grad = inputs
    if case.form == "gistkit":
        out = gistkit.attention(*operands, plan)
    else:
        gqa = case.heads != case.key_heads
        out = torch.nn.functional.scaled_dot_product_attention(*operands, is_causal=True, enable_gqa=gqa)
    return [out, *torch.autograd.grad(out, operands, grad)] if case.backward else [out]


def peak_mib(*fields: object) -> float:
    """MiB above inputs and results of a case, in this process: call it once in a fresh one."""
    case = Case(*fields)  # type: ignore[arg-type]
    # What a first call sets up once, such as threads and their buffers, is not the call's own.
    call(case, inputs_of(case, 256), layouts.causal(256).compile())
    inputs, plan = inputs_of(case, case.n), layouts.causal(case.n).compile()
    results, mib = peak_of(lambda: call(case, inputs, plan))
    return max(0.0, mib - sum(result.nbytes for result in results) / 2**20)


def cases(options: argparse.Namespace) -> list[Case]:
    """Every size, forward and forward + backward, ours and SDPA's; one size with backward if quick."""
    sizes, passes = (SIZES[:1], (True,)) if options.quick else (SIZES, (False, True))
    return [Case(form, options.length, *size, backward) for size in sizes for backward in passes for form in FORMS]


def main() -> None:
    """Measures every case in a fresh process, or the one that --case gives in this process."""
    parser = harness.parser(__doc__, "python benchmarks/memory.py --quick --length 4096", apart=True)
    parser.add_argument("--length", type=int, help="tokens (default: 32768; 4096 if --quick)")
    options = parser.parse_args()
    if harness.measured_here(options, peak_mib):
        return
    options.length = options.length or (4096 if options.quick else 32768)
    found = harness.begin("memory", options)
    rows: list[dict[str, object]] = []
    for case in tqdm(cases(options), desc="memory", unit="case", dynamic_ncols=True):
        mib = harness.measured_apart(options, *astuple(case))
        rows.append({"case": case.name, **asdict(case), "mib": mib})
        mark = f"  above the target of {TARGET_MIB} MiB" if case.form == FORMS[0] and mib > TARGET_MIB else ""
        tqdm.write(f"  {case.name:60} {case.form:18} {mib:8.1f} MiB{mark}")
    harness.write("memory", {"machine": found, "target": TARGET_MIB, "mebibytes": rows}, options)


if __name__ == "__main__":
    main()
