"""What a call costs the host in front of a GPU, measured without one: launches are left out, all else is real.

The CUDA library's door, dispatcher, autograd and glue run on small CPU tensors over an emulated runtime that counts
launches and does nothing (tests/cuda_on_cpu/glue.py; g++ builds it, the first time in minutes). One thread;
microseconds of its CPU time, which other processes hardly change, and of the clock. torch's own `mul`, with its real
kernel for 8 numbers, is measured beside them. What a real launch takes is not in it.

    python benchmarks/host.py
    python benchmarks/host.py --rounds 40 --json host.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
CALLS = 200


def fastest(call: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Microseconds a call of CPU time and of the clock, each of the best round."""
    best = [float("inf"), float("inf")]
    for _ in range(rounds):
        begun = time.thread_time(), time.perf_counter()
        for _ in range(CALLS):
            call()
        spent = time.thread_time() - begun[0], time.perf_counter() - begun[1]
        best = [min(old, 1e6 * new / CALLS) for old, new in zip(best, spent, strict=True)]
    return best[0], best[1]


def measure(rounds: int) -> None:
    """Prints {op: [no grad, its clock, forward and backward, its clock]}; in the process that `glue.run` starts."""
    import glue
    import glue_cases
    import torch

    torch.set_num_threads(1)

    def attention(*inputs: torch.Tensor) -> torch.Tensor:
        return found["attention bfloat16"][0](*inputs)[0]

    found, small = glue_cases.cases(), torch.randn(8, requires_grad=True)
    forms = {"attention": (attention, found["attention bfloat16"][2])}
    for name in ("rope bfloat16", "window_pool bfloat16", "trie_mix", "ancestor_attention", "bias_gelu"):
        forms[name.split()[0]] = (found[name][0], found[name][2])
    forms["torch.mul"] = (torch.mul, [small, small.detach().clone().requires_grad_()])
    glue.dry(True)
    times = {}
    for name, (form, inputs) in forms.items():
        outs = form(*inputs)
        grads = [torch.ones_like(x) for x in (outs if isinstance(outs, tuple) else (outs,))]

        def both(form: Any = form, inputs: Any = inputs, grads: Any = grads) -> None:
            torch.autograd.grad(form(*inputs), inputs, grads)

        with torch.no_grad():
            alone = fastest(lambda form=form, inputs=inputs: form(*inputs), rounds)
        times[name] = [*alone, *fastest(both, rounds)]
    print(json.dumps(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help=f"rounds of {CALLS} calls; the best counts (20)")
    parser.add_argument("--json", type=Path, help="file for the times")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds: expected 1 or more, got {args.rounds}")
    sys.path.insert(0, str(FOLDER.parent / "tests" / "cuda_on_cpu"))
    import glue

    code = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import host; host.measure({args.rounds})"
    times = json.loads(glue.run(code).splitlines()[-1])
    print("us a call                no grad   (clock)   forward + backward   (clock)")
    for name, (alone, alone_clock, both, both_clock) in times.items():
        print(f"{name:22} {alone:9.1f} {alone_clock:9.1f} {both:20.1f} {both_clock:9.1f}")
    if args.json:
        args.json.write_text(json.dumps(times, indent=1) + "\n")


if __name__ == "__main__":
    main()
