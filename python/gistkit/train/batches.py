"""Batches: rows to train on, each determined only by the seed and its number, and batches of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from gistkit.common.checks import IGNORE, check_int
from gistkit.train.data import Corpus
from gistkit.train.recipe import context_length

# Arguments of `Compressor.forward`; labels are padded with -100, contexts by their attention mask.
CONTEXT, MASK = "input_ids", "attention_mask"
# The losses of answers to questions, and the losses that need each of the other arguments.
ANSWERED = ("qa", "kl", "reverse_kl", "hidden")
LOSSES_OF_LABELS = {"continuation_ids": ("lm",), "question_ids": ANSWERED, "answer_ids": ANSWERED}

# All others are images.
TOKENS = {CONTEXT, MASK, *LOSSES_OF_LABELS}

Batch = dict[str, Tensor]
# Token ids by argument; of other rows `Batches.collate` knows.
Row = Mapping[str, Any]
Numbers = Sequence[int] | np.ndarray


class Batches(Dataset[Any]):
    """The data of a `Trainer`: a dataset of torch whose row depends only on its number, in every process.

    Rows 0, 1, ... never end; those of a step are `size` on end, and `collate` makes a batch of any of them.
    """

    size: int

    def __getitem__(self, index: int) -> Any:
        """Row 0, 1, ... of all that are ever trained on."""
        raise NotImplementedError

    def held_out_rows(self, rows: int) -> list[Any]:
        """At most `rows` rows without any training row, the same at every call."""
        raise NotImplementedError

    def collate(self, rows: Sequence[Any]) -> Batch:
        """Rows as keyword arguments of `Compressor.forward`, each a CPU tensor int64 [B, ...].

        For a `LanguageModel` only contexts and continuations; for a `VoCo` also pixel_values and what belongs to them.
        """
        return collate(rows)

    def __call__(self, step: int) -> Batch:
        """The whole batch of step 0, 1, ..., of `size` rows."""
        return self.collate([self[row] for row in range(step * self.size, (step + 1) * self.size)])

    def held_out(self, rows: int) -> list[Batch]:
        """The held-out rows in batches of at most `size`."""
        chosen = self.held_out_rows(rows)
        return [self.collate(chosen[start : start + self.size]) for start in range(0, len(chosen), self.size)]

    @property
    def identity(self) -> dict[str, Any]:
        """JSON values that are equal only for equal batches."""
        raise NotImplementedError

    @property
    def rows(self) -> int | None:
        """Training rows of an epoch; None where rows are drawn at random, without epochs."""
        return None


class Epochs(Batches):
    """Rows of which every epoch goes once through all, in an order that its seed and number determine.

    `train` and `held_out` are the numbers of rows, which `row` makes.
    """

    def __init__(self, size: int, seed: int, train: Numbers, held_out: Numbers = ()) -> None:
        check_size(size, seed)
        self.size, self.seed, self._train, self._held_out = size, seed, train, held_out
        # The last epoch's.
        self._order: tuple[int, np.ndarray] | None = None

    def row(self, number: int) -> Any:
        """The row of a number."""
        raise NotImplementedError

    @property
    def rows(self) -> int:
        """Training rows of an epoch."""
        return len(self._train)

    def __getitem__(self, index: int) -> Any:
        """Row 0, 1, ... of all that are ever trained on."""
        epoch, place = divmod(index, self.rows)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.rows)
        return self.row(self._train[int(self._order[1][place])])

    def held_out_rows(self, rows: int) -> list[Any]:
        """At most `rows` held-out rows, in their own order."""
        return [self.row(number) for number in self._held_out[:rows]]


class Pretraining(Batches):
    """Passages of a corpus for a `LanguageModel`, or for "ae", "lm" and "compression" (Position IDs Matter, section 2).

    Every step draws one length |X|, uniform in [min_length, max_length], and `size` passages of that length; the first
    p = floor(|X| / 2) ids, or another share, are the context, the others its continuation. A passage may cross the end
    of a document.

    Args:
        corpus: the text of the passages.
        size: rows B of a batch.
        min_length, max_length: of a passage, context and continuation together, 2 <= min_length <= max_length.
        seed: at least 0.
        context_share: of a passage that is its context, rounded down and at least one token; above 0, at most 1.
    """

    def __init__(
        self,
        corpus: Corpus,
        size: int,
        min_length: int,
        max_length: int,
        seed: int = 0,
        *,
        context_share: float = 0.5,
    ) -> None:
        check_size(size, seed)
        _check_share(context_share)
        if not 2 <= min_length <= max_length:
            raise ValueError(f"min_length, max_length: expected 2 <= min <= max, got {min_length} and {max_length}")
        corpus.check(max_length)
        self.corpus = corpus
        self.size = size
        self.min_length, self.max_length = min_length, max_length
        self.seed, self.context_share = seed, context_share

    def __getitem__(self, index: int) -> Row:
        """{"input_ids": [p], "continuation_ids": [|X| - p]}."""
        step, row = divmod(index, self.size)
        random = np.random.default_rng([self.seed, step])
        length = int(random.integers(self.min_length, self.max_length + 1))
        starts = random.integers(0, self.corpus.train.numel() - length + 1, self.size)
        return _parts(self.corpus.passages(starts[row : row + 1], length)[0], self.context_share)

    def held_out_rows(self, rows: int) -> list[Row]:
        """Held-out passages of the mean length, whose contexts do not overlap."""
        length = (self.min_length + self.max_length) // 2
        stride = context_length(length, self.context_share)
        passages = self.corpus.chunks(length, stride=stride, count=rows)
        return [_parts(passage, self.context_share) for passage in passages]

    @property
    def identity(self) -> dict[str, Any]:
        """The corpus, the lengths and the seed."""
        return _identity(self, {"lengths": [self.min_length, self.max_length]})


class Packed(Epochs):
    """A corpus cut into rows one after another, without gaps and padding; every epoch goes once through all rows.

    As language models are trained (SeqPE, section 4.1, on WikiText-103): documents are packed one after another, and a
    row may begin within one. The order is a shuffle by seed and epoch; the ids that no whole row is left for are not
    trained on.

    Args:
        corpus, size, seed, context_share: as in `Pretraining`.
        length: of a row, context and continuation together, at least 2.
    """

    def __init__(self, corpus: Corpus, size: int, length: int, seed: int = 0, *, context_share: float = 0.5) -> None:
        _check_share(context_share)
        check_int("length", length, 2)
        super().__init__(size, seed, range(corpus.train.numel() // length))
        corpus.check(length)
        self.corpus, self.length, self.context_share = corpus, length, context_share

    def row(self, number: int) -> Row:
        """{"input_ids": [p], "continuation_ids": [length - p]}, p as in `Pretraining`."""
        start = number * self.length
        return _parts(self.corpus.train[start : start + self.length].long(), self.context_share)

    def held_out_rows(self, rows: int) -> list[Row]:
        """Held-out rows, which do not overlap."""
        return [_parts(chunk, self.context_share) for chunk in self.corpus.chunks(self.length, count=rows)]

    @property
    def identity(self) -> dict[str, Any]:
        """The corpus, the length and the seed."""
        return _identity(self, {"rows_of": self.length})


def _identity(batches: Pretraining | Packed, lengths: dict[str, Any]) -> dict[str, Any]:
    corpus = batches.corpus
    text = {"text": corpus.digest, corpus.unit: corpus.train.numel()}
    return text | lengths | {name: getattr(batches, name) for name in ("size", "seed", "context_share")}


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"context_share: expected a share above 0, at most 1, got {share}")


def _parts(passage: Tensor, share: float) -> Row:
    context = context_length(len(passage), share)
    return {CONTEXT: passage[:context], "continuation_ids": passage[context:]}


def collate(rows: Sequence[Row]) -> Batch:
    """Rows of tokens as one batch: contexts padded with 0, under a mask where there is padding, all others with -100.

    All rows have the same arguments; one may have padding of its own, and its mask.
    """
    names = rows[0].keys()
    if odd := next((row.keys() for row in rows if row.keys() != names), None):
        raise ValueError(f"batches: expected the same arguments, got {sorted(names)} and {sorted(odd)}")
    if unknown := sorted(names - TOKENS):
        raise ValueError(f"batches: expected only arguments of tokens, got {', '.join(unknown)}")
    columns = {name: [torch.as_tensor(row[name], dtype=torch.int64) for row in rows] for name in names}
    batch = {name: pad_sequence(column, batch_first=True, padding_value=IGNORE) for name, column in columns.items()}
    lengths = torch.tensor([len(context) for context in columns[CONTEXT]])
    mask = torch.arange(batch[CONTEXT].shape[1]) < lengths[:, None]
    own = batch.pop(MASK, None)
    if own is not None:
        for given, length in zip(columns[MASK], lengths.tolist(), strict=True):
            if len(given) != length:
                raise ValueError(f"{MASK}: expected as many values as {CONTEXT} has, {length}, got {len(given)}")
        mask &= own > 0
    batch[CONTEXT] = batch[CONTEXT].where(mask, 0)
    return batch if bool(mask.all()) else batch | {MASK: mask.long()}


def check_size(size: int, seed: int) -> None:
    """Refuses empty batches, and seeds that NumPy refuses."""
    check_int("size", size)
    check_int("seed", seed, 0)


def for_losses(batch: Batch, losses: Collection[str]) -> Batch:
    """The part of a batch that these losses need."""
    return {
        name: tensor for name, tensor in batch.items() if not {*LOSSES_OF_LABELS.get(name, losses)}.isdisjoint(losses)
    }


def texts(batch: Batch) -> Batch:
    """Contexts and continuations as one text a row, padded at its end, for a language model."""
    if unknown := sorted(batch.keys() - {CONTEXT, MASK, "continuation_ids"}):
        raise ValueError(
            f"batches: expected only {CONTEXT} and continuation_ids for a language model, got {', '.join(unknown)}"
        )
    context = batch[CONTEXT]
    continuation = batch.get("continuation_ids", context[:, :0])
    ids = torch.cat([context, continuation], 1)
    is_token = torch.cat([batch.get(MASK, torch.ones_like(context)).bool(), continuation != IGNORE], 1)
    order = (~is_token).long().argsort(dim=1, stable=True)
    return {CONTEXT: ids.where(is_token, 0).gather(1, order), MASK: is_token.gather(1, order).long()}


def targets(
    batch: Batch, *, end_token: bool = False, bos_token: int | None = None, window: int | None = None
) -> dict[str, int]:
    """The number of tokens that each loss of a batch is the mean over.

    Args:
        end_token: whether the autoencoding target of every row has an end token.
        bos_token: of a language model, whose "loss" does not count it at the start of a row, or of a compressor in
            place, whose window and "compression" do not.
        window: tokens of a longer context that are compressed, and predicted by "ae" and "compression"; None: all.
    """
    context, label_counts, bos_count = batch[CONTEXT], _other_tokens(batch), 0
    is_token = batch.get(MASK, torch.ones_like(context)).bool()
    others = is_token.sum(1)
    if bos_token is not None:
        first = context.gather(1, is_token.long().argmax(1, keepdim=True))[:, 0]
        bos_count, others = int((first == bos_token).sum()), others - (first == bos_token).long()
    compressed = int((others if window is None else others.clamp(max=window)).sum())
    return {
        "ae": compressed + bos_count + (len(context) if end_token else 0),
        "compression": compressed,
        "loss": int(others.sum()),
        "lm": label_counts.get("continuation_ids", 0),
        **dict.fromkeys(ANSWERED, label_counts.get("answer_ids", 0)),
    }


def num_tokens(batch: Batch) -> int:
    """Tokens of a batch, without padding."""
    contexts = int(batch[MASK].sum()) if MASK in batch else batch[CONTEXT].numel()
    return contexts + sum(_other_tokens(batch).values())


def _other_tokens(batch: Batch) -> dict[str, int]:
    return {name: int((tensor != IGNORE).sum()) for name, tensor in batch.items() if name in LOSSES_OF_LABELS}
