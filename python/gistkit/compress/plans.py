"""Compiled plans of the encoder and the decoder pass, made once for each set of lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gistkit import layouts
from gistkit.common.checks import placed
from gistkit.layouts import Layout, Plan
from gistkit.layouts.layout import physical_order
from gistkit.layouts.positions import EncoderPositions, decoder_positions, encoder_positions
from gistkit.layouts.relations import CAUSAL, Role

# A plan takes some bytes for each token on its device, and ragged batches seldom repeat their lengths.
KEPT = 64


@dataclass(frozen=True, eq=False, kw_only=True)
class Places:
    """What is known of a memory before the pass that makes it.

    Args:
        lengths: memory tokens of each row, including BOS in methods in place.
        positions: int64 or float64 [B, K] or [B, K, A] on the CPU, their position IDs in the decoder.
        starts: position id of each row's task token, or of its text if there is none.
        last: the largest position id of the pass.
        last_rows: int64 [B], the column of the pass that predicts each row's text, if no task token does.
        ordinals: int64 [B, K] on the CPU, places of the memory tokens in logical order, if they are to be kept.
    """

    lengths: tuple[int, ...]
    positions: Tensor
    starts: tuple[int, ...]
    last: int
    last_rows: Tensor | None = None
    ordinals: Tensor | None = None


@lru_cache(maxsize=KEPT)
def encoder_pass(contexts: tuple[int, ...], chunk: int, memory: int, scheme: str, carrier: str) -> Places:
    """The memory of contexts of the given lengths, before any plan is made."""
    lengths = tuple(-(-context // chunk) * memory for context in contexts)
    reading = [decoder_positions(scheme, "lm", carrier, context, chunk, memory, 0) for context in contexts]
    positions = np.stack([np.pad(ids.memory, (0, max(lengths) - len(ids.memory))) for ids in reading])
    last = max(int(ids.max()) for context in {*contexts} for ids in encoder_positions(scheme, context, chunk, memory))
    starts = tuple(ids.task for ids in reading)
    # What is kept outlives the call: tensors made in inference mode could not be used in training later.
    with torch.inference_mode(False):
        return Places(lengths=lengths, positions=torch.from_numpy(positions), starts=starts, last=last)


@lru_cache(maxsize=KEPT)
def encoder_parts(
    contexts: tuple[int, ...],
    chunk: int,
    memory: int,
    scheme: str,
    windows: tuple[int, ...],
    device: str,
    tokens: int | None = None,
) -> tuple[tuple[slice, Plan], ...]:
    """[context columns, memory columns], padded to the longest context; a chunk sees only itself.

    In parts of whole chunks: the context columns of each part, and its plan.

    Args:
        contexts: tokens of each row; one plan for all rows of the batch if they are equal. In several parts, all have
            the same number of chunks.
        tokens: what the rows of a part may have in all, which is at least a chunk each; None: one part has all.
    """
    ids = {context: encoder_positions(scheme, context, chunk, memory) for context in {*contexts}}
    chunks = -(-max(contexts) // chunk)
    each = chunks if tokens is None else max(1, tokens // (len(contexts) * (chunk + memory)))
    parts = []
    for first in range(0, chunks, each):
        last = min(first + each, chunks)
        made = {context: _encoder_part(ids[context], chunk, memory, first, last) for context in ids}
        # Whole chunks are the same in contexts of any length.
        alike = {len(part): part for part in made.values()}
        plan = compiled([alike[len(made[context])] for context in contexts], windows, device)
        parts.append((slice(first * chunk, min(last * chunk, max(contexts))), plan))
    return tuple(parts)


def _encoder_part(ids: EncoderPositions, chunk: int, memory: int, first: int, last: int) -> Layout:
    """The encoder's layout of chunks `first` to before `last` of a context with these position IDs."""
    context = ids.context[first * chunk : last * chunk]
    layout = layouts.icae_encoder(len(context), chunk, memory)
    positions = np.empty(len(layout), np.int64)
    positions[layout.roles == Role.CONTEXT] = context
    positions[layout.roles == Role.MEMORY] = ids.memory[first * memory : last * memory]
    return replace(layout, positions=positions)


def compiled(parts: list[Layout], windows: tuple[int, ...], device: str, **ordered: Any) -> Plan:
    """The plan of a pass with a layout for each row, each role in the same columns; one for all if they are the same.

    Args:
        ordered: `compile`'s grouped=False, in logical order and padded at the end of rows, and queries.
    """
    # What is kept outlives the call: tensors made in inference mode could not be used in training later.
    with torch.inference_mode(False):
        if len({*map(id, parts)}) == 1:
            return parts[0].compile(device=device, windows=windows, **ordered)
        return layouts.compile_batch(parts, aligned=not ordered, device=device, windows=windows, **ordered)


@dataclass(frozen=True)
class ReadingRow:
    """One row that reads a memory: its memory tokens, then blocks of text, the first of which is the task token.

    Args:
        memory: memory tokens.
        positions: their position IDs, int64 bytes; empty if they are cached keys.
        ordinals: their places in logical order, int64 bytes, ascending.
        start: position id of the token after the memory.
        ordinal: its place in logical order.
        text: tokens in each block of text.
    """

    memory: int
    positions: bytes
    ordinals: bytes
    start: int
    ordinal: int
    text: tuple[int, ...]


@lru_cache(maxsize=KEPT)
def decoder_plan(
    rows: tuple[ReadingRow, ...],
    memory: int,
    widths: tuple[int, ...],
    cached: bool,
    windows: tuple[int, ...],
    device: str,
) -> Plan:
    """[memory][text block]...: causal; each part as wide as its longest row, padded at its end.

    Args:
        memory: columns of memory tokens.
        widths: columns of each block of text.
        cached: whether the memory tokens are cached keys, without rows in the pass.
    """
    parts = {row: _reading_layout(row, memory, widths) for row in rows}
    queries = slice(memory, None) if cached else None
    return compiled([parts[row] for row in rows], windows, device, grouped=False, queries=queries)


def _reading_layout(row: ReadingRow, memory: int, widths: tuple[int, ...]) -> Layout:
    counts = (row.memory, *row.text)
    columns = (memory, *widths)
    kinds = (Role.MEMORY, *[Role.TEXT] * len(widths))
    roles = np.concatenate(
        [np.repeat([kind, Role.PAD], [n, w - n]) for kind, n, w in zip(kinds, counts, columns, strict=True)]
    )
    real = np.flatnonzero(roles != Role.PAD)
    text = np.arange(len(real) - row.memory)
    ids = np.zeros(row.memory, np.int64)
    if row.positions:
        ids = np.frombuffer(row.positions, np.int64)[: row.memory]
    positions = np.zeros(len(roles), np.int64)
    positions[real] = np.concatenate([ids, row.start + text])
    before = np.frombuffer(row.ordinals, np.int64)[: row.memory]
    # Padding has no place in logical order, by which sliding windows count.
    ordinals = np.zeros(len(roles), np.int64)
    # Text behind padding alone, where other rows have memory, begins after that padding's 0.
    ordinals[real] = np.concatenate([before, row.ordinal + text]) + int(not row.memory)
    return Layout(
        roles=roles,
        sees={Role.MEMORY: {Role.MEMORY: CAUSAL}, Role.TEXT: {Role.MEMORY: CAUSAL, Role.TEXT: CAUSAL}},
        positions=positions,
        ordinals=np.maximum.accumulate(ordinals),
        name="decoder",
    )


def check_text(method: str, layout: Layout) -> None:
    """Refuses a layout whose text does not read what decoding reads: BOS, all memory tokens and earlier text."""
    roles = layout.roles[physical_order(layout)]
    visible = np.zeros(len(layout), dtype=bool)
    for start, end in layout.compile().spans[0, np.flatnonzero(roles == Role.TEXT)[-1]].tolist():
        visible[start:end] = True
    if not np.array_equal(visible, np.isin(roles, (Role.BOS, Role.MEMORY, Role.TEXT))):
        counts = {
            role.name: f"{visible[roles == role].sum()} of {(roles == role).sum()}" for role in Role if role in roles
        }
        raise ValueError(
            f"{method}: expected a layout whose text sees BOS, all memory tokens and earlier text, as decoding a "
            f"memory does, and nothing else, got one whose last token sees {counts}"
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class InPlacePass(Places):
    """One pass over [BOS][context][gists] of a batch.

    Args:
        plan: of the pass, every role in the same columns of all rows of the batch.
        context, gists: the columns of each; empty if there are none.
        windows: int64 [B, K], where the pooling windows of each row begin, and where the last one ends, counted in the
            context's columns; shorter rows repeat their end.
    """

    plan: Plan
    context: slice
    gists: slice
    windows: Tensor


@lru_cache(maxsize=KEPT)
def in_place_pass(method: Any, contexts: tuple[int, ...], windows: tuple[int, ...], device: str) -> InPlacePass:
    """The pass over contexts of the given lengths, BOS not counted.

    Args:
        method: the config of a method that compresses in place; plans are kept by it.
    """
    full_layouts = {context: method.layout(context) for context in contexts}
    in_memory = {c: np.isin(layout.roles, (Role.BOS, Role.MEMORY)) for c, layout in full_layouts.items()}
    lengths = tuple(int(in_memory[context].sum()) for context in contexts)
    pass_layouts = {c: _pass_layout(layout, not method.has_gists) for c, layout in full_layouts.items()}
    width = max(lengths)
    positions = np.stack(
        [
            np.pad(full_layouts[c].positions[in_memory[c]], (0, width - n))
            for c, n in zip(contexts, lengths, strict=True)
        ]
    )
    with torch.inference_mode(False):
        plan = compiled([pass_layouts[context] for context in contexts], windows, device)
        slices = plan.slices or {}
        end = plan.num_queries
        context = slices.get(Role.CONTEXT, slice(end, end))
        gists = slices.get(Role.MEMORY, slice(end, end))
        counts = [length - 1 for length in lengths] if gists.start < end else contexts
        ends = np.minimum(np.arange(width) * method.ratio, np.array(contexts)[:, None])
        first = gists.start if gists.start < end else context.start
        last = [first + count - 1 if first < end else 0 for count in counts]
        starts = tuple(int(full_layouts[c].positions[-1]) for c in contexts)
        return InPlacePass(
            lengths=lengths,
            positions=torch.from_numpy(positions),
            starts=starts,
            last=max(starts) - 1,
            last_rows=placed(last, device),
            plan=plan,
            context=context,
            gists=gists,
            windows=placed(ends, device),
        )


def _pass_layout(layout: Layout, pooled: bool) -> Layout:
    """The part of a layout that the model runs: all but the text, and but the memory if that is pooled."""
    left_out = (Role.MEMORY, Role.TEXT) if pooled else (Role.TEXT,)
    pass_layout = layout.take(~np.isin(layout.roles, left_out))
    # Means have no place in logical order, and fractional positions; the tokens of the pass have whole ones.
    ordinals = np.arange(len(pass_layout)) if pooled else pass_layout.ordinals
    return replace(pass_layout, positions=pass_layout.positions.astype(np.int64), ordinals=ordinals)
