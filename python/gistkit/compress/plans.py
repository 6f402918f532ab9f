"""Compiled plans of the encoder and the decoder pass, made once for each set of lengths."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from gistkit import layouts
from gistkit.layouts import Layout, Plan
from gistkit.layouts.positions import decoder_positions
from gistkit.layouts.relations import CAUSAL, Role

# A plan takes some bytes a token on its device, and ragged batches seldom have the same lengths again.
_KEPT = 64


@dataclass(frozen=True, eq=False)
class EncoderPass:
    """One pass over a batch of contexts: all chunks of a row, then their memory tokens; a chunk sees only itself.

    Args:
        plan: rows in physical order; one for all rows of the batch where their lengths are equal.
        lengths: memory tokens of each row.
        source: int64 [B, N], for each physical row its column in [context columns, memory columns]; None where the
            input is that already.
        memory: int64 [B, K], the physical rows of the memory tokens; None where they are the last K rows.
        positions: int64 [B, K] on the CPU, the position ids that the decoder finds the memory tokens at.
        starts: the position id of each row's [LM] token in the decoder.
        last: the largest position id of the pass.
    """

    plan: Plan
    lengths: tuple[int, ...]
    source: Tensor | None
    memory: Tensor | None
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
    # A plan outlives the call: made in inference mode, its tensors could not serve training later.
    with torch.inference_mode(False):
        if len(set(contexts)) == 1:
            plan, source, slots = make(contexts[0]).compile(device=device, windows=windows), None, None
        else:
            plan = layouts.compile_batch([make(context) for context in contexts], device=device, windows=windows)
            source, slots = _ragged(contexts, lengths, plan.num_queries)
            source, slots = source.to(device), slots.to(device)
    last = int(plan.positions.max()) if plan.positions is not None else 0
    starts = tuple(ids.task for ids in reading)
    return EncoderPass(plan, lengths, source, slots, torch.from_numpy(positions), starts, last)


def _ragged(contexts: tuple[int, ...], lengths: tuple[int, ...], rows: int) -> tuple[Tensor, Tensor]:
    context, length = torch.tensor(contexts)[:, None], torch.tensor(lengths)[:, None]
    row, slot = torch.arange(rows), torch.arange(max(lengths))
    source = torch.where(row < context, row, row - context + max(contexts))
    return source.where(row < context + length, 0), (context + slot).where(slot < length, 0)


@dataclass(frozen=True)
class Reader:
    """One row that reads a memory: its memory tokens, then the task token, then blocks of text.

    Args:
        memory: memory tokens.
        positions: their position ids, int64 bytes.
        task: position id of the task token; text goes on from it.
        text: tokens in each block of text.
    """

    memory: int
    positions: bytes
    task: int
    text: tuple[int, ...]


@lru_cache(maxsize=_KEPT)
def decoder_plan(
    rows: tuple[Reader, ...], memory: int, widths: tuple[int, ...], cached: bool, windows: tuple[int, ...], device: str
) -> Plan:
    """[memory][task token][text block]...: causal; each part as wide as its longest row, padded at its end.

    Args:
        rows: one Reader a row of the batch.
        memory: columns of memory tokens.
        widths: columns of each block of text.
        cached: whether the memory tokens are keys alone, and no rows of the pass.
        windows: sliding windows of the model.
    """
    parts = {row: _reader_layout(row, memory, widths) for row in rows}
    queries = slice(memory, None) if cached else None
    with torch.inference_mode(False):
        if len(parts) == 1:
            return parts[rows[0]].compile(grouped=False, queries=queries, windows=windows, device=device)
        batch = [parts[row] for row in rows]
        return layouts.compile_batch(batch, grouped=False, queries=queries, windows=windows, device=device)


def _reader_layout(row: Reader, memory: int, widths: tuple[int, ...]) -> Layout:
    counts = (row.memory, 1, *row.text)
    columns = (memory, 1, *widths)
    kinds = (Role.MEMORY, Role.TASK, *[Role.TEXT] * len(widths))
    roles = np.concatenate(
        [np.repeat([kind, Role.PAD], [n, w - n]) for kind, n, w in zip(kinds, counts, columns, strict=True)]
    )
    real = roles != Role.PAD
    positions = np.zeros(len(roles), np.int64)
    ids = np.frombuffer(row.positions, np.int64)[: row.memory]
    positions[real] = np.concatenate([ids, row.task + np.arange(real.sum() - row.memory)])
    past = {Role.MEMORY: CAUSAL, Role.TASK: CAUSAL, Role.TEXT: CAUSAL}
    return Layout(
        roles=roles,
        sees={Role.MEMORY: {Role.MEMORY: CAUSAL}, Role.TASK: past, Role.TEXT: past},
        positions=positions,
        # Padding takes no place in logical order, which sliding windows count by.
        ordinals=np.cumsum(real),
        name="decoder",
    )
