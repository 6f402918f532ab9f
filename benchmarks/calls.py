"""Single calls as a decoded token makes them: one query over 64 keys against SDPA, rope of one token against
transformers' form.

A call takes microseconds, of which the kernel's part is half: the rest is Python, dispatch and new tensors. The heads
are those of Llama 3.1 8B; transformers' form of rope gets cosines and sines ready made. Nothing records a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import harness
import rope
import torch
from contenders import decode

from gistkit.ops._library import best_isa

KEYS = 64


def one_token(dtype: torch.dtype) -> harness.Forms:
    """The forms of rope for one token, compiled or not, but for copies."""
    forms = rope.forms(replace(rope.step(128), batch=1, dtype=dtype), backward=False)
    return {name: form for name, form in forms.items() if not name.startswith("copy")}


def cases() -> Iterator[harness.Case]:
    """Both calls in float32 and bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        yield harness.Case(
            f"one query over {KEYS} keys, {name}", partial(decode, KEYS, dtype, [best_isa()]), facts={"dtype": name}
        )
        yield harness.Case(f"rope of one token, {name}", partial(one_token, dtype), facts={"dtype": name})


def main() -> None:
    """Runs all cases."""
    options = harness.parser(
        __doc__, "python benchmarks/calls.py --threads 1 --json calls.json", appends=True
    ).parse_args()
    harness.run("calls", list(cases()), options, seconds=4)


if __name__ == "__main__":
    main()
