"""Token ids from texts, tensors, lists or a tokenizer's output, as rows padded at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gistkit.common.checks import IGNORE, moved, padded, placed

# The text around a question, in training and where nothing else is said.
QUESTION = "\n### Question:\n{question}\n### Answer:\n"
# Tokens that a pass encodes at most where it might encode more, by device: a GPU needs more of them to be busy.
PART = {"cpu": 1024, "cuda": 8192}


class Rows(NamedTuple):
    """Token ids int64 [B, N], each row padded with 0 after its `lengths[b]` tokens.

    `host` is the same on the CPU, where the host knows it without waiting for the device.
    """

    ids: Tensor
    lengths: tuple[int, ...]
    host: Tensor | None = None

    @property
    def batch_size(self) -> int:
        """Number of rows B."""
        return len(self.lengths)

    @property
    def valid(self) -> Tensor:
        """bool [B, N], False on padding."""
        lengths = placed(self.lengths, self.ids.device)
        return torch.arange(self.ids.shape[1], device=self.ids.device) < lengths[:, None]

    @property
    def known(self) -> Tensor:
        """The ids on the CPU."""
        return self.ids.cpu() if self.host is None else self.host

    def lists(self) -> list[list[int]]:
        """The rows without their padding."""
        return [row[:length] for row, length in zip(self.known.tolist(), self.lengths, strict=True)]

    def alone(self) -> list[Rows]:
        """Each row by itself, for models in which rows of one pass depend on each other."""
        return [pad([row], self.ids.device) for row in self.lists()]

    def columns(self, part: slice, lengths: tuple[int, ...]) -> Rows:
        """Some columns of all rows, of which `lengths` are tokens."""
        return Rows(self.ids[:, part], lengths, None if self.host is None else self.host[:, part])

    @classmethod
    def of(cls, host: Tensor, lengths: tuple[int, ...], device: torch.device | str) -> Rows:
        """Ids that the host knows, on a device."""
        return cls(moved(host, device), lengths, host)


def as_rows(
    name: str, ids: Any, attention_mask: Any = None, *, vocabulary: int, device: torch.device, shortest: int = 0
) -> Rows:
    """Checks token ids and pads them at the end.

    Args:
        name: what the argument is called in messages.
        ids: int64 [B, N] or [N], lists of ids of any lengths, or a mapping with "input_ids" (a tokenizer's output).
        attention_mask: [B, N], 0 on padding, which may be at either end of a row; None: no padding, or the mapping's.
        vocabulary: ids must be below it.
        shortest: fewest tokens a row may have.

    Raises:
        TypeError, ValueError: naming `name`, what was expected and what came.
    """
    if isinstance(ids, Mapping):
        if "input_ids" not in ids:
            raise ValueError(f"{name}: expected a mapping with input_ids, got the keys {sorted(ids)}")
        if ids.get("pixel_values") is not None:
            raise ValueError(f"{name}: expected only text, got pixel_values; gistkit.compress.VoCo reads images")
        attention_mask = ids.get("attention_mask") if attention_mask is None else attention_mask
        ids = ids["input_ids"]
    if isinstance(ids, Tensor | np.ndarray):
        # Ids that come from a device are waited for, once.
        mask = None if attention_mask is None else torch.as_tensor(attention_mask).cpu()
        rows = _from_tensor(name, _whole_numbers(ids), mask)
    else:
        try:
            rows = _from_lists(name, ids, attention_mask)
        except OverflowError as error:
            raise ValueError(f"{name}: expected token ids in [0, {vocabulary}), got one beyond 64 bits") from error
    if rows.ids.numel():
        low, high = int(rows.ids.min()), int(rows.ids.max())
        if low < 0 or high >= vocabulary:
            raise ValueError(f"{name}: expected token ids in [0, {vocabulary}), got {low if low < 0 else high}")
    if min(rows.lengths) < shortest:
        row = rows.lengths.index(min(rows.lengths))
        tokens = "token" if shortest == 1 else "tokens"
        raise ValueError(f"{name}: expected at least {shortest} {tokens}, got {rows.lengths[row]} in row {row}")
    return Rows.of(rows.ids, rows.lengths, device)


def texts_of(name: str, texts: Any) -> list[str]:
    """One text or a sequence of texts as a list.

    Raises:
        TypeError: for anything else; it names the argument `name`.
        ValueError: for a text with half of a surrogate pair, which no tokenizer takes.
    """
    rows = [texts] if isinstance(texts, str) else texts
    if not isinstance(rows, Sequence) or not rows or not all(isinstance(row, str) for row in rows):
        kinds = sorted({type(row).__name__ for row in rows}) if isinstance(rows, Sequence) else [type(texts).__name__]
        raise TypeError(f"{name}: expected a text or a sequence of texts, got {' and '.join(kinds) or 'none'}")
    for row in rows:
        try:
            row.encode()
        except UnicodeEncodeError as error:
            half = f"{row[error.start]!a}, at {error.start}"
            raise ValueError(f"{name}: expected a text of whole characters, got half of one, {half}") from None
    return list(rows)


def label_rows(name: str, ids: Any, *, vocabulary: int, device: torch.device) -> Rows:
    """`as_rows` of a tensor whose padding, at the end of rows, is -100; lists have none."""
    mask = None
    if isinstance(ids, Tensor | np.ndarray):
        ids = _whole_numbers(ids)
        mask = ids != IGNORE
        ids = ids.where(mask, 0)
    try:
        rows = as_rows(name, ids, mask, vocabulary=vocabulary, device=device)
    except ValueError as error:
        raise ValueError(
            str(error).replace("attention_mask: expected padding", f"{name}: expected {IGNORE}")
        ) from error
    if mask is not None and mask.shape[-1] and not rows.ids.shape[1]:
        # Rows of only padding are a batch without labels; no columns at all are a mistake.
        return Rows.of(torch.zeros(rows.batch_size, 1, dtype=torch.int64), rows.lengths, device)
    return rows


def join_rows(first: Rows, second: Rows) -> Rows:
    """Each row's tokens of `first`, then those of `second`, padded at the end."""
    if not any(first.lengths):
        return second
    if min(first.lengths) == first.ids.shape[1]:
        lengths = tuple(a + b for a, b in zip(first.lengths, second.lengths, strict=True))
        known = None if first.host is None or second.host is None else torch.cat([first.host, second.host], 1)
        return Rows(torch.cat([first.ids, second.ids], 1), lengths, known)
    return pad([a + b for a, b in zip(first.lists(), second.lists(), strict=True)], first.ids.device)


def pad(rows: Sequence[Sequence[int]], device: torch.device | None = None) -> Rows:
    """Lists of ids as rows padded at the end."""
    lengths = tuple(map(len, rows))
    return Rows.of(padded(rows), lengths, device or "cpu")


def _whole_numbers(ids: Any) -> Tensor:
    """Ids of any integers as int64 on the CPU; what is none stays as it is."""
    ids = torch.as_tensor(ids).cpu()
    return ids if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex() else ids.long()


def _from_tensor(name: str, ids: Tensor, mask: Any) -> Rows:
    if ids.dim() == 1:
        ids = ids[None]
    if ids.dim() != 2 or not ids.shape[0]:
        raise ValueError(f"{name}: expected token ids [B, N] with B >= 1, got shape {tuple(ids.shape)}")
    if ids.dtype != torch.int64:
        raise TypeError(f"{name}: expected integer token ids, got dtype {ids.dtype}")
    width = ids.shape[1]
    if mask is None:
        return Rows(ids, (width,) * ids.shape[0])
    mask = torch.as_tensor(mask, device=ids.device)
    mask = (mask[None] if mask.dim() == 1 else mask).bool()
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask: expected the shape {tuple(ids.shape)} of {name}, got {tuple(mask.shape)}")
    if bool(mask.all()):
        return Rows(ids, (width,) * ids.shape[0])
    lengths = mask.sum(1)
    # The first token of each row, and whether the tokens follow each other.
    start = mask.int().argmax(1) if width else lengths
    columns = torch.arange(width, device=ids.device)
    expected = (columns >= start[:, None]) & (columns < (start + lengths)[:, None])
    if bool((expected != mask).any()):
        row = int((expected != mask).any(1).nonzero()[0])
        raise ValueError(f"attention_mask: expected padding only at the ends of rows, got a gap in row {row}")
    longest = int(lengths.max())
    source = (start[:, None] + columns[:longest]).clamp(max=max(width - 1, 0))
    inside = columns[:longest] < lengths[:, None]
    return Rows(ids.gather(1, source).where(inside, 0), tuple(lengths.tolist()))


def _from_lists(name: str, ids: Any, mask: Any) -> Rows:
    expected = f"{name}: expected token ids as a tensor or lists of integers, got"
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes) or not len(ids):
        raise TypeError(f"{expected} {'an empty list' if ids == [] else type(ids).__name__}")
    if all(isinstance(value, int | np.integer) for value in ids):
        ids, mask = [ids], None if mask is None else [mask]
    for row in ids:
        if not isinstance(row, Sequence | np.ndarray) or not all(isinstance(value, int | np.integer) for value in row):
            raise TypeError(f"{expected} {row!r:.60} in a list")
    if mask is None:
        return pad(ids)
    if not all(isinstance(row, Sequence | np.ndarray | Tensor) for row in mask) or (
        [len(row) for row in mask] != [len(row) for row in ids]
    ):
        raise ValueError(f"attention_mask: expected rows as long as those of {name}, got other lengths")
    return _from_tensor(name, pad(ids).ids, padded([torch.as_tensor(row).bool().long().tolist() for row in mask]))


def check_rows(name: str, rows: Rows, batch_size: int) -> None:
    """Refuses texts whose number of rows differs from the memory's."""
    if rows.batch_size != batch_size:
        raise ValueError(f"{name}: expected {batch_size} rows as the memory has, got {rows.batch_size}")


def room(device: torch.device) -> int:
    """The tokens of `PART` of a device."""
    return PART.get(device.type, PART["cuda"])


def batches(lengths: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Indices of rows of similar length, longest first, at most `limit` tokens with padding in each batch."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    while order:
        size = max(1, limit // max(lengths[order[0]], 1))
        yield order[:size]
        order = order[size:]
