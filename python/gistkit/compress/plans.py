"""Compiled plans of the encoder and the decoder pass, made once for each set of lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from gistkit import layouts
from gistkit.layouts import Layout, Plan
from gistkit.layouts.layout import physical_order
from gistkit.layouts.positions import decoder_positions
from gistkit.layouts.relations import CAUSAL, Role

# A plan takes some bytes for each token on its device, and ragged batches seldom repeat their lengths.
_KEPT = 64


@dataclass(frozen=True, eq=False)
class EncoderPass:
    """One pass over a batch of contexts: all chunks of a row, then their memory tokens. A chunk sees only itself.

    Args:
        plan: [context columns, memory columns]; one for all rows of the batch if their lengths are equal.
        lengths: memory tokens of each row.
        positions: int64 [B, K] on the CPU, the position ids of the memory tokens in the decoder.
        starts: the position id of each row's [LM] token in the decoder.
        last: the largest position id of the pass.
    """

    plan: Plan
    lengths: tuple[int, ...]
    positions: Tensor
    starts: tuple[int, ...]
    last: int


@lru_cache(maxsize=_KEPT)
def encoder_pass(
    contexts: tuple[int, ...], chunk: int, memory: int, scheme: str, carrier: str, windows: tuple[int, ...], device: str
) -> EncoderPass:
    """The pass over contexts of the given lengths, padded to the longest; `windows` are the model's sliding windows."""
    make = lambda context: layouts.icae_encoder(context, chunk, memory, positions=scheme)  # noqa: E731
    lengths = tuple(-(-context // chunk) * memory for context in contexts)
    reading = [decoder_positions(scheme, "lm", carrier, context, chunk, memory, 0) for context in contexts]
    positions = np.stack([np.pad(ids.memory, (0, max(lengths) - len(ids.memory))) for ids in reading])
    # A plan outlives the call: tensors made in inference mode could not be used in training later.
    with torch.inference_mode(False):
        plan = compiled([make(context) for context in contexts], windows, device)
    last = int(plan.positions.max()) if plan.positions is not None else 0
    starts = tuple(ids.task for ids in reading)
    return EncoderPass(plan, lengths, torch.from_numpy(positions), starts, last)


def compiled(parts: list[Layout], windows: tuple[int, ...], device: str) -> Plan:
    """The plan of a pass with a layout for each row, each role in the same columns; one for all if they are equal."""
    if len({len(part) for part in parts}) == 1:
        return parts[0].compile(device=device, windows=windows)
    return layouts.compile_batch(parts, aligned=True, device=device, windows=windows)


@dataclass(frozen=True)
class ReadingRow:
    """One row that reads a memory: its memory tokens, then blocks of text, the first of which is the task token.

    Args:
        memory: memory tokens.
        positions: their position ids, int64 bytes; empty if they are cached keys.
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


@lru_cache(maxsize=_KEPT)
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
        rows: how each row of the batch reads.
        memory: columns of memory tokens.
        widths: columns of each block of text.
        cached: whether the memory tokens are cached keys, without rows in the pass.
        windows: sliding windows of the model.
    """
    parts = {row: _reading_layout(row, memory, widths) for row in rows}
    queries = slice(memory, None) if cached else None
    with torch.inference_mode(False):
        if len(parts) == 1:
            return parts[rows[0]].compile(grouped=False, queries=queries, windows=windows, device=device)
        batch = [parts[row] for row in rows]
        return layouts.compile_batch(batch, grouped=False, queries=queries, windows=windows, device=device)


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
    ordinals[real] = np.concatenate([before, row.ordinal + text])
    return Layout(
        roles=roles,
        sees={Role.MEMORY: {Role.MEMORY: CAUSAL}, Role.TEXT: {Role.MEMORY: CAUSAL, Role.TEXT: CAUSAL}},
        positions=positions,
        ordinals=np.maximum.accumulate(ordinals),
        name="decoder",
    )


@dataclass(frozen=True)
class Builder:
    """A layout of `gistkit.layouts` for any length of the context; compressors of one method may differ in it.

    Args:
        method: the name of the layout's builder.
        ratio: context tokens a memory token; not of "no_context".
        options: its other keyword arguments, as sorted pairs.
    """

    method: str
    ratio: int
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self, context: int) -> Layout:
        """The layout of a context and one token of text behind it."""
        if self.method == "no_context":
            return layouts.no_context(1)
        return cast(Layout, getattr(layouts, self.method)(context, self.ratio, 1, **dict(self.options)))


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


@dataclass(frozen=True, eq=False)
class InPlacePass:
    """One pass over [BOS][context][gists] of a batch, and which of its tokens the memory keeps.

    Args:
        plan: of the pass, every role in the same columns of all rows of the batch.
        context, gists: the columns of each; empty if there are none.
        lengths: compressed tokens of each row of the batch, including BOS.
        positions: int64 or float64 [B, K] on the CPU, position ids of BOS and the compressed tokens.
        starts: position id of each row's text.
        last_rows: int64 [B], the column of each row that predicts the text.
        windows: int64 [B, K], where the pooling windows of each row begin, and where the last one ends, counted in the
            context's columns; shorter rows repeat their end.
    """

    plan: Plan
    context: slice
    gists: slice
    lengths: tuple[int, ...]
    positions: Tensor
    starts: tuple[int, ...]
    last_rows: Tensor
    windows: Tensor


@lru_cache(maxsize=_KEPT)
def in_place_pass(
    builder: Builder, contexts: tuple[int, ...], pooled: bool, windows: tuple[int, ...], device: str
) -> InPlacePass:
    """The pass over contexts of the given lengths, BOS not counted.

    Args:
        builder: of the layout.
        contexts: tokens of each row.
        pooled: memory tokens are means over the pass, without tokens of their own.
        windows: sliding windows of the model.
        device: where the plan goes.
    """
    full_layouts = {context: builder(context) for context in contexts}
    in_memory = {c: np.isin(layout.roles, (Role.BOS, Role.MEMORY)) for c, layout in full_layouts.items()}
    lengths = tuple(int(in_memory[context].sum()) for context in contexts)
    pass_layouts = {c: _pass_layout(layout, pooled) for c, layout in full_layouts.items()}
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
        ends = np.minimum(np.arange(width) * builder.ratio, np.array(contexts)[:, None])
        first = gists.start if gists.start < end else context.start
        last = [first + count - 1 if first < end else 0 for count in counts]
        return InPlacePass(
            plan,
            context,
            gists,
            lengths,
            torch.from_numpy(positions),
            tuple(int(full_layouts[c].positions[-1]) for c in contexts),
            torch.tensor(last, device=device),
            torch.from_numpy(ends).to(device),
        )


def _pass_layout(layout: Layout, pooled: bool) -> Layout:
    """The part of a layout that the model runs: all but the text, and but the memory if that is pooled."""
    left_out = (Role.MEMORY, Role.TEXT) if pooled else (Role.TEXT,)
    pass_layout = layout.take(~np.isin(layout.roles, left_out))
    # Means have no place in logical order, and fractional positions; the tokens of the pass have whole ones.
    ordinals = np.arange(len(pass_layout)) if pooled else pass_layout.ordinals
    return replace(pass_layout, positions=pass_layout.positions.astype(np.int64), ordinals=ordinals)
