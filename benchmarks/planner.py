"""Times layout.compile(): python benchmarks/planner.py [--repeat N]. Targets: 8k tokens 200 us, 1M tokens 20 ms."""

import argparse
import time
from collections.abc import Callable

import numpy as np

from gistkit import layouts
from gistkit.layouts import Layout


def cases(tokens: int) -> dict[str, Layout]:
    """Layouts of about `tokens` tokens for each method."""
    documents = max(1, tokens // 512)
    return {
        "causal": layouts.causal(tokens),
        "ICAE encoder 510/102": layouts.icae_encoder(tokens * 5 // 6, 510, 102),
        "GistPool 8x": layouts.gistpool(tokens * 7 // 9, 8, tokens // 8),
        "Dodo 10%, tau 128": layouts.dodo(np.random.default_rng(0).random(tokens) < 0.1, 128),
        "VoCo, 576 -> 128": layouts.voco(576, 128, tokens // 4, images=max(1, tokens * 3 // 4 // 704)),
        "packed, 512 each": Layout.pack([layouts.gistpool(400, 8, 62)] * documents),
    }


def best(function: Callable[[], object], repeat: int) -> tuple[float, float]:
    """Best and median seconds of `repeat` calls, after one to warm up."""
    function()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times), float(np.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=20)
    repeat = parser.parse_args().repeat
    print(f"{'layout':<24}{'tokens':>9}{'spans':>6}{'best':>12}{'median':>12}")
    for tokens in (8192, 2**20):
        for name, layout in cases(tokens).items():
            low, median = (t * 1e3 for t in best(layout.compile, repeat * (10 if tokens < 10**5 else 1)))
            width = layout.compile().spans.shape[2]
            print(f"{name:<24}{len(layout):>9}{width:>6}{low:>9.3f} ms{median:>9.3f} ms")


if __name__ == "__main__":
    main()
