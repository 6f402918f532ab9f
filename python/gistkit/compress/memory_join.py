"""join: joins memories of several documents into the memory of one context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gistkit import hf, ops
from gistkit.common.checks import POSITIONS
from gistkit.compress.memory import Memory, check_memory


def join(compressor: Any, memories: Sequence[Memory]) -> Memory:
    """Joins memories in order, as if their documents were consecutive chunks of one context.

    If the encoder numbers the context through all chunks (UPL, EPL), a document's position IDs continue those of the
    document before, and its cached keys are rotated accordingly. Otherwise every chunk is numbered from 0 anyway.

    In methods in place each document was read by itself, and its keys move behind those before it. The first BOS
    stays for all; in `Select` each document keeps its own. `Memory.last` is the last document's and has read no other:
    it alone predicts the first token of a continuation that no prompt precedes.

    Args:
        memories: at least one, all readable by `compressor`, with the same number of rows; only the last may have a
            `rest`.

    Raises:
        TypeError: for a model whose keys cannot be moved, where they have to be, or whose RoPE depends on the length of
            a context (dynamic, longrope).
        ValueError: for memories that this method cannot join.
    """
    if not memories:
        raise ValueError("memories: expected at least one, got none")
    for memory in memories:
        check_memory(memory)
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
                "memories: expected tokens after the window only in the last memory, got some in an earlier one"
            )
    compressor.check_documents(memories)
    return joined(compressor, memories)


def joined(compressor: Any, memories: Sequence[Memory]) -> Memory:
    """`join` without its checks, of which those of documents do not hold for the parts of one context."""
    result = memories[0]
    for memory in memories[1:]:
        result = _append(compressor, result, memory)
    return result


def _append(compressor: Any, first: Memory, second: Memory) -> Memory:
    """Two memories as one; where heads keep different numbers of keys, the second's of each head follow the first's."""
    shared = compressor.shared_columns
    if shared:
        second = _without_first(second, shared)
    packed = first.counts is not None
    if packed:
        first, second = first.of_each_row(), second.of_each_row()
    delta = torch.tensor(compressor.offsets(first))[:, None]
    held = torch.arange(second.num_tokens) < torch.tensor(second.lengths)[:, None]
    positions, biases = compressor.positions_behind(first, second, delta), _biases(first, second)
    result = replace(
        second,
        lengths=_sum(first.lengths, second.lengths),
        context_lengths=_sum(first.context_lengths, second.context_lengths),
        documents=tuple(one + other for one, other in zip(first.documents, second.documents, strict=True)),
        starts=tuple(start - shared for start in _sum(first.starts, second.starts)),
        fingerprint=first.fingerprint if first.fingerprint == second.fingerprint else None,
        maker=first.maker if first.maker == second.maker else None,
    )
    if packed:
        own, others = (torch.cat(one.counts or (), 1) for one in (first, second))
        lengths = tuple((own + others).amax(1).tolist())
        return replace(
            result,
            lengths=lengths,
            positions=_interleaved(first.positions, positions, own, others),
            ordinals=_places_after(first, second, max(lengths)),
            counts=tuple(a + b for a, b in zip(first.counts or (), second.counts or (), strict=True)),
            key_bias=None if biases is None else _interleaved(*biases, own, others),
            layers=_packed_layers_after(compressor, first, second),
        )
    after = partial(_after, first=first, second=second)
    return replace(
        result,
        positions=after(first.positions, positions if positions.dim() > 2 else positions.where(held, 0)),
        ordinals=after(first.ordinals, None if second.ordinals is None else (second.ordinals + delta).where(held, 0)),
        embeddings=after(first.embeddings, second.embeddings),
        key_bias=None if biases is None else after(*biases),
        straight_through=after(first.straight_through, second.straight_through),
        layers=None if first.layers is None else _layers_after(compressor, first, second, delta),
    )


def _without_first(memory: Memory, count: int) -> Memory:
    """A memory without its first columns."""
    through = memory.straight_through
    return replace(
        memory,
        lengths=tuple(length - count for length in memory.lengths),
        positions=memory.positions[:, count:],
        straight_through=None if through is None else through[:, count:],
        layers=tuple((key[:, :, count:], value[:, :, count:]) for key, value in memory.layers or ()),
    )


def _layers_after(compressor: Any, first: Memory, second: Memory, delta: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    """The keys and values of the first, and then those of the second, whose keys move by `delta` [B, 1] positions."""
    keys = [key for key, _ in second.layers or ()]
    if bool(delta.any()):
        moves, inv_freqs = delta.to(second.device).expand(-1, second.num_tokens), hf.frequencies(compressor.lm.model)
        keys = [ops.rerotate(key, moves, inv_freq) for key, inv_freq in zip(keys, inv_freqs, strict=True)]
    return tuple(
        (_after(key, moved_key, first, second), _after(value, other_value, first, second))
        for (key, value), moved_key, (_, other_value) in zip(first.layers or (), keys, second.layers or (), strict=True)
    )


def _places_after(first: Memory, second: Memory, width: int) -> Tensor:
    """`ordinals` [B, width] of memories with `counts`."""
    places = torch.cat([first.places, second.places + torch.tensor(first.starts)[:, None]], 1).sort(1).values
    # Without sliding windows nobody asks for them, and there may be more than keys.
    places = places.where(places < POSITIONS, 0)[:, :width]
    return F.pad(places, (0, width - places.shape[1]))


def _packed_layers_after(compressor: Any, first: Memory, second: Memory) -> tuple[tuple[Tensor, Tensor], ...]:
    """`_layers_after` of memories with `counts`."""
    layers, starts = [], torch.tensor(first.starts)
    counts = zip(first.counts or (), second.counts or (), hf.frequencies(compressor.lm.model), strict=True)
    for (key, value), (other_key, other_value), (own, others, inv_freq) in zip(
        first.layers or (), second.layers or (), counts, strict=True
    ):
        delta = starts.repeat_interleave(others.sum(1)).to(other_key.device)
        moved_key = ops.rerotate(other_key[None, None], delta, inv_freq)[0, 0]
        layers.append((_interleaved(key, moved_key, own, others), _interleaved(value, other_value, own, others)))
    return tuple(layers)


def _biases(first: Memory, second: Memory) -> tuple[Tensor, Tensor] | None:
    """The biases of both memories, zeros where nothing was fitted; None where that is so in both."""
    if first.key_bias is None and second.key_bias is None:
        return None
    one, other = (
        torch.zeros(memory.positions.shape, device=memory.device) if memory.key_bias is None else memory.key_bias
        for memory in (first, second)
    )
    return one, other


def _interleaved(first: Tensor, second: Tensor, counts: Tensor, others: Tensor) -> Tensor:
    """For each head of each row what `first` [T, ..] has of it, and then what `second` has."""
    pairs = zip(first.split(counts.flatten().tolist()), second.split(others.flatten().tolist()), strict=True)
    return torch.cat([part for pair in pairs for part in pair])


def _sum(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _after(first_values: Any, second_values: Any, first: Memory, second: Memory) -> Any:
    """[B, K] or [B, .., K, d]: each row's `first_values`, then its `second_values`, zeros after them; None of None."""
    if first_values is None or second_values is None:
        return None
    if first_values.dim() == 2:
        return _after(first_values[..., None], second_values[..., None], first, second)[..., 0]
    if min(first.lengths) == first.num_tokens:
        return torch.cat([first_values, second_values], -2)
    width = max(_sum(first.lengths, second.lengths))
    rows = [
        F.pad(torch.cat([a[..., :n, :], b[..., :m, :]], -2), (0, 0, 0, width - n - m))
        for a, b, n, m in zip(first_values, second_values, first.lengths, second.lengths, strict=True)
    ]
    return torch.stack(rows)
