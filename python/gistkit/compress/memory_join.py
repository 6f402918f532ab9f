"""join: the memories of several documents, compressed one by one, as the memory of one context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from gistkit import hf, ops
from gistkit.compress.generation import MemoryReader
from gistkit.compress.memory import Memory


def join(compressor: MemoryReader, memories: Sequence[Memory]) -> Memory:
    """The memory of several documents in that order, as if they were consecutive chunks of one context.

    If the encoder numbers the context through all chunks (UPL, EPL), a document's position ids continue those of the
    document before, and its cached keys are rotated accordingly. Otherwise every chunk is numbered from 0 anyway.

    Args:
        memories: at least one, all readable by `compressor`, with the same number of rows; only the last may have a
            rest.
    """
    if not memories:
        raise ValueError("memories: expected at least one, got none")
    for memory in memories:
        compressor.check_readable(memory)
        if memory.dtype != memories[0].dtype:
            raise ValueError(f"memories: expected {memories[0].dtype} in each, got one of {memory.dtype}")
        if memory.batch_size != memories[0].batch_size:
            raise ValueError(
                f"memories: expected {memories[0].batch_size} rows in each, got one of {memory.batch_size}"
            )
    for memory in memories[:-1]:
        if any(memory.rest):
            raise ValueError(
                "memories: expected a rest behind the window only in the last one, got one in an earlier memory"
            )
    result = memories[0]
    for memory in memories[1:]:
        result = _append(compressor, result, memory)
    return result


def _append(compressor: MemoryReader, first: Memory, second: Memory) -> Memory:
    source = first.source
    contexts = _sum(first.context_lengths, second.context_lengths)
    lengths = _sum(first.lengths, second.lengths)
    # The offset of the second's ids: the context before it, or, for embeddings numbered in a row, the memory before it.
    if source.carrier == "kv":
        offsets = first.context_lengths if source.layout in ("upl", "epl") else (0,) * first.batch_size
    else:
        offsets = first.context_lengths if source.consistent else first.lengths
    delta = torch.tensor(offsets)[:, None]
    positions = second.positions + delta
    layers = None
    if first.layers is not None and second.layers is not None:
        rotation = (
            (delta.to(second.device) * torch.ones_like(second.positions, device=second.device))
            if any(offsets)
            else None
        )
        rotated_keys = [key for key, _ in second.layers]
        if rotation is not None:
            frequencies = hf.frequencies(compressor.lm.model)
            rotated_keys = [
                ops.rerotate(k, rotation, f.to(k.device)) for k, f in zip(rotated_keys, frequencies, strict=True)
            ]
        layers = tuple(
            (_after(key, rotated_key, first, second), _after(value, other_value, first, second))
            for (key, value), rotated_key, (_, other_value) in zip(
                first.layers, rotated_keys, second.layers, strict=True
            )
        )
    embeddings = None
    if first.embeddings is not None and second.embeddings is not None:
        embeddings = _after(first.embeddings, second.embeddings, first, second)
    return replace(
        second,
        lengths=lengths,
        context_lengths=contexts,
        positions=_after(first.positions[..., None], positions[..., None], first, second)[..., 0],
        starts=contexts if source.consistent else lengths,
        embeddings=embeddings,
        layers=layers,
        fingerprint=first.fingerprint if first.fingerprint == second.fingerprint else None,
        maker=first.maker if first.maker == second.maker else None,
    )


def _sum(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _after(first_values: Tensor, second_values: Tensor, first: Memory, second: Memory) -> Tensor:
    """[B, .., K, d]: each row's `first_values`, then its `second_values`, padded with zeros at the end."""
    if min(first.lengths) == first.num_tokens:
        return torch.cat([first_values, second_values], -2)
    width = max(_sum(first.lengths, second.lengths))
    rows = [
        F.pad(torch.cat([a[..., :n, :], b[..., :m, :]], -2), (0, 0, 0, width - n - m))
        for a, b, n, m in zip(first_values, second_values, first.lengths, second.lengths, strict=True)
    ]
    return torch.stack(rows)
