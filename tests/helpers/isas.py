"""The instruction sets of this machine's tests."""

import os
import platform

ISAS = ["generic", "neon"] if platform.machine() in ("aarch64", "arm64") else ["generic", "avx2", "avx512"]
# Those that have kernels of attention alone.
BEYOND = ["avx512_bf16", "amx"] if "avx512" in ISAS else []


def highest_isa():
    """The best instruction set of this processor, or what GISTKIT_ISA bounds it to."""
    from gistkit.ops import best_isa

    return os.environ.get("GISTKIT_ISA", best_isa())


def best_isas():
    """That one, and the best of those that have kernels of every op."""
    best = highest_isa()
    return [ISAS[-1], best] if best in BEYOND else [best]
