"""Plain-torch forms of the ops, of the same signatures: the oracle of the tests and the baseline of the benchmarks."""

from gistkit.ops.reference.rope import rope

__all__ = ["rope"]
