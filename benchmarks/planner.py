"""Times layout.compile(), from NumPy arrays to tensors. Targets: 8k tokens in 0.2 ms, 1M tokens in 20 ms."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import harness
import numpy as np

from gistkit import layouts
from gistkit.layouts import Layout


def layouts_of(tokens: int) -> dict[str, Callable[[], Layout]]:
    """Layouts of about `tokens` tokens for each method."""
    documents = max(1, tokens // 512)
    return {
        "causal": lambda: layouts.causal(tokens),
        "ICAE encoder 510/102": lambda: layouts.icae_encoder(tokens * 5 // 6, 510, 102),
        "GistPool 8x": lambda: layouts.gistpool(tokens * 7 // 9, 8, tokens // 8),
        "Dodo 10%, tau 128": lambda: layouts.dodo(np.random.default_rng(0).random(tokens) < 0.1, 128),
        "VoCo, 576 -> 128": lambda: layouts.voco(576, 128, tokens // 4, images=max(1, tokens * 3 // 4 // 704)),
        "packed, 512 each": lambda: Layout.pack([layouts.gistpool(400, 8, 62)] * documents),
    }


def cases() -> Iterator[harness.Case]:
    """Every layout at 8k and 1M tokens."""
    for tokens, size in ((8192, "8k"), (2**20, "1M")):
        for name, make in layouts_of(tokens).items():
            yield harness.Case(
                f"{name}, {size} tokens", lambda make=make: {"compile": make().compile}, facts={"tokens": tokens}
            )


if __name__ == "__main__":
    options = harness.parser(__doc__, "python benchmarks/planner.py --quick", appends=True).parse_args()
    harness.run("planner", list(cases()), options, seconds=1)
