"""join: joins memories of several documents into the memory of one context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gistkit import hf, ops
from gistkit.compress.memory import Memory, last_places


def join(compressor: Any, memories: Sequence[Memory]) -> Memory:
    """Joins memories in order, as if their documents were consecutive chunks of one context.

    If the encoder numbers the context through all chunks (UPL, EPL), a document's position ids continue those of the
    document before, and its cached keys are rotated accordingly, by the frequencies that they were made with. Otherwise
    every chunk is numbered from 0 anyway. If RoPE's frequencies depend on the length of a context (dynamic, longrope)
    and differ between documents, all keys get those of the longest document.

    Args:
        memories: at least one, all readable by `compressor`, with the same number of rows; only the last may have a
            `rest`.
    """
    _check(compressor, memories)
    memories = _in_one_rotation(compressor, memories)
    result = memories[0]
    for memory in memories[1:]:
        result = _append(compressor, result, memory)
    return result


def join_selected(compressor: Any, memories: Sequence[Memory]) -> Memory:
    """`join` of memories of `Select`: each document keeps its own BOS, and its keys are rotated behind those before it.

    Raises:
        TypeError: for a model whose keys cannot be moved.
    """
    _check(compressor, memories)
    hf.check_moves(compressor.lm.model)
    result = memories[0]
    for memory in memories[1:]:
        if result.counts is not None:
            result = _append_packed(compressor, result, memory)
            continue
        delta = torch.tensor(result.starts)[:, None]
        context = torch.tensor(result.context_lengths)[:, None, None]
        positions = (memory.positions + context).where(memory.positions > 1, memory.positions)
        first, second = (compressor.ordinals(one)[0] for one in (result, memory))
        biases = _biases(result, memory)
        result = replace(
            _together(result, memory),
            positions=_after(result.positions, positions, result, memory),
            ordinals=_columns_after(first, second + delta, result, memory),
            starts=_sum(result.starts, memory.starts),
            key_bias=_after(*biases, result, memory) if biases else None,
            layers=_layers_after(compressor, result, memory, delta),
        )
    return result


def join_in_place(compressor: Any, memories: Sequence[Memory]) -> Memory:
    """`join` of memories that were compressed in place: the first BOS stays, and other keys move behind those before.

    Raises:
        TypeError: for a model whose keys cannot be moved.
    """
    _check(compressor, memories)
    hf.check_moves(compressor.lm.model)
    result = memories[0]
    for memory in memories[1:]:
        first, second = result, _without_bos(memory)
        delta = torch.tensor(first.starts)[:, None] - 1
        result = replace(
            _together(first, second),
            positions=_columns_after(first.positions, second.positions + delta, first, second),
            starts=tuple(start - 1 for start in _sum(first.starts, second.starts)),
            straight_through=None
            if first.straight_through is None or second.straight_through is None
            else _columns_after(first.straight_through, second.straight_through, first, second),
            layers=_layers_after(compressor, first, second, delta),
        )
    return result


def _without_bos(memory: Memory) -> Memory:
    """A memory without its first column."""
    return replace(
        memory,
        lengths=tuple(length - 1 for length in memory.lengths),
        positions=memory.positions[:, 1:],
        straight_through=None if memory.straight_through is None else memory.straight_through[:, 1:],
        layers=tuple((key[:, :, 1:], value[:, :, 1:]) for key, value in memory.layers or ()),
    )


def _layers_after(compressor: Any, first: Memory, second: Memory, delta: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    """The keys and values of the first, and then those of the second, whose keys move by `delta` [B, 1] positions."""
    keys = [key for key, _ in second.layers or ()]
    if bool(delta.any()):
        moves = delta.to(second.device).expand(-1, second.num_tokens)
        keys = [_turned(key, moves, f) for key, f in zip(keys, _frequencies(compressor, second), strict=True)]
    return tuple(
        (_after(key, moved_key, first, second), _after(value, other_value, first, second))
        for (key, value), moved_key, (_, other_value) in zip(first.layers or (), keys, second.layers or (), strict=True)
    )


def _append_packed(compressor: Any, first: Memory, second: Memory) -> Memory:
    """`join_selected` of two memories with `counts`: the second one's keys of each head follow the first one's."""
    first, second = first.of_each_row(), second.of_each_row()
    layers = []
    for (key, value), (other_key, other_value), own, others, frequencies in zip(
        first.layers or (), second.layers or (), first.counts or (), second.counts or (),
        _frequencies(compressor, second), strict=True,
    ):  # fmt: skip
        rows = zip(other_key.split(others.sum(1).tolist()), first.starts, frequencies.split(1), strict=True)
        moved = [
            _turned(keys[None, None], torch.full((1, len(keys)), by, device=keys.device), f) for keys, by, f in rows
        ]
        moved_key = torch.cat(moved, 2)[0, 0]
        layers.append((_interleaved(key, moved_key, own, others), _interleaved(value, other_value, own, others)))
    own, others = (torch.cat(one.counts or (), 1) for one in (first, second))
    context = torch.tensor(first.context_lengths, dtype=torch.int32).repeat_interleave(others.sum(1))
    positions = torch.where(second.positions > 1, second.positions + context, second.positions)
    biases = _biases(first, second)
    starts, lengths = _sum(first.starts, second.starts), tuple((own + others).amax(1).tolist())
    return replace(
        _together(first, second),
        lengths=lengths,
        positions=_interleaved(first.positions, positions, own, others),
        ordinals=last_places(starts, lengths),
        starts=starts,
        counts=tuple(a + b for a, b in zip(first.counts or (), second.counts or (), strict=True)),
        key_bias=_interleaved(*biases, own, others) if biases else None,
        layers=tuple(layers),
    )


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


def _check(compressor: Any, memories: Sequence[Memory]) -> None:
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
                "memories: expected tokens after the window only in the last memory, got some in an earlier one"
            )


def _in_one_rotation(compressor: Any, memories: Sequence[Memory]) -> Sequence[Memory]:
    """The memories with keys that the same frequencies rotated in all of a row, those of its longest document."""
    first = memories[0]
    complete = all(memory.frequencies is not None for memory in memories)
    if first.layers is None or len(memories) == 1 or not (complete or _numbered_through(first)):
        return memories
    own = [_frequencies(compressor, memory) for memory in memories]
    longest = [
        max(range(len(memories)), key=lambda index: memories[index].context_lengths[row])
        for row in range(first.batch_size)
    ]
    common = tuple(
        torch.stack([own[index][layer][row] for row, index in enumerate(longest)]) for layer in range(len(own[0]))
    )
    return [_rotated_by(memory, before, common) for memory, before in zip(memories, own, strict=True)]


def _numbered_through(memory: Memory) -> bool:
    """Whether the encoder numbers a context's tokens through all its chunks, in keys that are cached."""
    return memory.source.carrier == "kv" and memory.source.layout in ("upl", "epl")


def _frequencies(compressor: Any, memory: Memory) -> tuple[Tensor, ...]:
    """The frequencies [B, R/2] of each layer's keys; the model's own of the moment for a memory without them."""
    if memory.frequencies is not None:
        return tuple(layer.to(memory.device) for layer in memory.frequencies)
    return tuple(layer.to(memory.device).expand(memory.batch_size, -1) for layer in hf.frequencies(compressor.lm.model))


def _rotated_by(memory: Memory, before: tuple[Tensor, ...], after: tuple[Tensor, ...]) -> Memory:
    """The memory with keys as if `after`, [B, R/2] for each layer, had rotated them in place of `before`."""
    if all(torch.equal(old, new) for old, new in zip(before, after, strict=True)):
        return replace(memory, frequencies=after)
    positions = memory.positions.to(memory.device)
    layers = tuple(
        (_turned(_turned(key, -positions, old), positions, new), value)
        for (key, value), old, new in zip(memory.layers or (), before, after, strict=True)
    )
    return replace(memory, layers=layers, frequencies=after)


def _turned(keys: Tensor, delta: Tensor, frequencies: Tensor) -> Tensor:
    """Keys [B, Hk, K, D] moved by `delta` [B, K] positions, each row by its own frequencies [B, R/2]."""
    if bool((frequencies == frequencies[0]).all()):
        return ops.rerotate(keys, delta, frequencies[0])
    rows = zip(keys.split(1), delta.split(1), frequencies, strict=True)
    return torch.cat([ops.rerotate(*row) for row in rows])


def _append(compressor: Any, first: Memory, second: Memory) -> Memory:
    source = first.source
    contexts = _sum(first.context_lengths, second.context_lengths)
    lengths = _sum(first.lengths, second.lengths)
    # The offset of the second's ids: the context before it, or, for embeddings numbered in a row, the memory before it.
    if source.carrier == "kv":
        offsets = first.context_lengths if _numbered_through(first) else (0,) * first.batch_size
    else:
        offsets = first.context_lengths if source.consistent else first.lengths
    delta = torch.tensor(offsets)[:, None]
    positions = second.positions + delta
    layers = None
    if first.layers is not None and second.layers is not None:
        layers = _layers_after(compressor, first, second, delta)
    embeddings = None
    if first.embeddings is not None and second.embeddings is not None:
        embeddings = _after(first.embeddings, second.embeddings, first, second)
    return replace(
        _together(first, second),
        positions=_columns_after(first.positions, positions, first, second),
        starts=contexts if source.consistent else lengths,
        embeddings=embeddings,
        layers=layers,
        frequencies=None if first.frequencies is None else second.frequencies,
    )


def _together(first: Memory, second: Memory) -> Memory:
    """The second memory with the lengths and the origin of both."""
    return replace(
        second,
        lengths=_sum(first.lengths, second.lengths),
        context_lengths=_sum(first.context_lengths, second.context_lengths),
        documents=tuple(one + other for one, other in zip(first.documents, second.documents, strict=True)),
        fingerprint=first.fingerprint if first.fingerprint == second.fingerprint else None,
        maker=first.maker if first.maker == second.maker else None,
    )


def _sum(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _columns_after(first_values: Tensor, second_values: Tensor, first: Memory, second: Memory) -> Tensor:
    """`_after` of [B, K]."""
    return _after(first_values[..., None], second_values[..., None], first, second)[..., 0]


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
