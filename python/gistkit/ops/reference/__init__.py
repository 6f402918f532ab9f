"""Readable pure-torch forms of the ops, of the same signature: the tests' oracle and the benchmarks' baseline."""

from gistkit.ops.reference.attention import attention, dense_mask

__all__ = ["attention", "dense_mask"]
